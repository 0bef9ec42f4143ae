"""Ranks that keep the optimizer's state, and the weights, in files: against the plain loop, saved, and loaded elsewhere.

torchrun --nproc-per-node N tests/parity/nvme_worker.py OUT.json SHARED_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engine_worker import STEPS, compare, full_state, make_recipe, oracle, reload, run_steps, start, world

from arriero.checkpoint.load import load_state
from arriero.checkpoint.save import save_checkpoint
from arriero.config.schema import Recipe
from arriero.engine.ops import build_ops


def wide(stage: int, optimizer: str, param: str, folder: Path) -> Recipe:
    """Wide enough that a rank's matrices are swapped: DeepSpeed leaves what is below 1 MiB, here norms, in memory."""
    value = make_recipe(stage=stage, precision="fp32", micro=2).model_dump(mode="json")
    value["model"]["config"] |= {"hidden_size": 256, "intermediate_size": 704}
    value["parallel"] |= {"offload_optimizer": optimizer, "offload_param": param}
    if "nvme" in (optimizer, param):
        value["parallel"]["nvme_path"] = str(folder / "nvme")
    return Recipe.model_validate(value)


# DeepSpeed's five buffers of 10⁸ weights would take 2 GB in each of the engines here.
SMALL: dict[str, Any] = {"zero_optimization": {"offload_param": {"buffer_size": 4_000_000}}}


def goes_on(folder: Path) -> bool:
    """Three steps, a save, two more; and the two more from the save in a new engine: the same state, bit for bit?"""
    recipe = wide(3, "nvme", "nvme", folder)
    engine, micro, accumulation = start(recipe, **SMALL)
    run_steps(engine, recipe, micro, accumulation, 1, 3)
    assert engine.swaps
    probe = torch.arange(3, 15)[None]
    saved = save_checkpoint(folder, engine, world, step=3, trainer={"updates": 3}, data={"position": 1}, probe=probe)
    run_steps(engine, recipe, micro, accumulation, 4, STEPS)
    straight = full_state(engine)
    again, *_ = start(recipe, **SMALL)
    load_state(saved, again, updates=3)
    run_steps(again, recipe, micro, accumulation, 4, STEPS)
    resumed = full_state(again)
    return all(torch.equal(straight[key], resumed[key]) for key in straight)


def main() -> None:
    out, shared = Path(sys.argv[1]), Path(sys.argv[2])
    build_ops(wide(3, "nvme", "nvme", shared))
    results: dict[str, Any] = {"layouts": [], "reloads": []}
    truth = oracle(wide(3, "none", "none", shared))
    for optimizer, param in (("none", "none"), ("nvme", "none"), ("nvme", "nvme"), ("cpu", "nvme")):
        name = f"w{world.size}-{optimizer}-{param}"
        results["layouts"].append(compare(name, wide(3, optimizer, param, shared), truth, shared, **SMALL))
    for source in sorted(shared.glob("w*-nvme-*/checkpoint-*")):
        results["reloads"] += [reload(source, wide(stage, "none", "none", shared)) for stage in (0, 1, 3)]
    for source in sorted(shared.glob("w*-none-none/checkpoint-*")):
        results["reloads"].append(reload(source, wide(3, "nvme", "nvme", shared), **SMALL))
    own = shared / f"goes-on-{world.size}"
    own.mkdir(exist_ok=True)
    results["goes_on"] = goes_on(own)
    if world.rank == 0:
        out.write_text(json.dumps(results))
    world.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
