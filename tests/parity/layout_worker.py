"""One rank of the parity tests of model parallelism: one axis a launch, since DeepSpeed makes its groups once for a
process. Not a test file itself.

torchrun --nproc-per-node N tests/parity/layout_worker.py OUT.json SHARED_FOLDER AXIS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine_worker import (
    GLOBAL_BATCH,
    SHAPE,
    compare,
    full_state,
    make_recipe,
    make_step,
    masked_step,
    oracle,
    part,
    plain_descent,
    reload,
    run_steps,
    start,
    world,
)

from arriero.engine.parallel import leave_world
from arriero.engine.state import Batch
from arriero.oracle import Trained
from arriero.samples import continue_ids

# Three layers don't divide by two stages, nor five by four; with four heads and two key-value heads two ranks share a
# group each; Qwen's norms of single heads stand between matrices that are split.
SHAPES = {
    "llama": SHAPE,
    "uneven": SHAPE | {"num_hidden_layers": 3},
    "deep": SHAPE | {"num_hidden_layers": 5},
    "qwen": SHAPE | {"model_type": "qwen3"},
}


def stages(axis: str) -> tuple[int, ...]:
    """The ZeRO stages that go with it."""
    return (1,) if axis == "pipeline" else (0, 1, 2, 3)


def plan(axis: str) -> list[dict[str, Any]]:
    """The layouts of one launch, as arguments of make_recipe."""
    layouts: list[dict[str, Any]] = [
        {"stage": stage, "precision": "fp32", "micro": 1 + stage % 2, "shape": "llama"} for stage in stages(axis)
    ]
    layouts += [{"stage": stage, "precision": "bf16", "micro": 2, "shape": "llama"} for stage in {1, stages(axis)[-1]}]
    tied = {"stage": 1, "micro": 1, "shape": "uneven", "tied": True, "checkpointing": True}
    layouts.append(tied | {"precision": "fp32"})
    if axis == "pipeline":
        layouts.append(tied | {"precision": "bf16"})
        layouts.append(tied | {"precision": "fp32", "shape": "deep", "pipeline_parallel_size": 4})
    if axis == "tensor":
        layouts.append({"stage": 1, "precision": "fp32", "micro": 2, "shape": "qwen"})
    return layouts


def first_half_step(recipe: Any) -> float:
    """The gradient norm of a step whose targets all stand in the first half of the rows."""
    engine, micro, accumulation = start(recipe)
    here = engine.world
    batch = make_step(3)
    targets = batch.targets.clone()
    targets[:, targets.shape[1] // 2 :] = -100
    batch = Batch(batch.input_ids, targets, batch.position_ids)
    firsts = [(k * here.dp_size + here.dp_rank) * micro for k in range(accumulation)]
    mine = [part(batch, slice(first, first + micro)) for first in firsts]
    return engine.optimizer_step(mine, int((targets != -100).sum()), 1e-2).grad_norm


def tied_copies_differ(recipe: Any) -> float:
    """Largest difference between the stages' copies of the embeddings, over three steps."""
    engine, micro, accumulation = start(recipe)
    worst = 0.0
    for step in range(1, 4):
        run_steps(engine, recipe, micro, accumulation, step, step)
        held = {n: p.detach().clone() for n, p in engine._named if n == "model.embed_tokens.weight"}
        copies = [copy["model.embed_tokens.weight"] for copy in world.gather(held) if copy]
        worst = max([worst, *(float((copy - copies[0]).abs().max()) for copy in copies)])
        assert len(copies) == world.size, "with two stages every rank holds a copy"
    return worst


def said_between(recipe: Any) -> dict[str, Any]:
    """Three steps with a prompt continued before the first and the last, against three without."""
    found = []
    for prompts in ([], [[5, 6, 7]]):
        engine, micro, accumulation = start(recipe)
        torch.manual_seed(world.rank)
        numbers, said = [], []
        for step in range(1, 4):
            if prompts and step != 2:
                said.append(continue_ids(engine, prompts, 48, 2, engine.world, lambda: None))
            numbers.append(run_steps(engine, recipe, micro, accumulation, step, step))
        state = {name: part.tolist() for name, part in full_state(engine).items()}
        found.append((numbers, state, torch.get_rng_state().tolist(), said))
    (numbers, state, random, _), (others, other_state, other_random, said) = found
    same = numbers == others and state == other_state and random == other_random
    return {"same": all(world.gather(same)), "said": world.gather(said)}


def main() -> None:
    out, shared, axis = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    axes = {f"{axis}_parallel_size": 2}
    results: dict[str, Any] = {"layouts": [], "reloads": []}
    truths: dict[tuple[str, str, bool], Trained] = {}
    for layout in plan(axis):
        shape, precision, tied = layout["shape"], layout["precision"], layout.get("tied", False)
        truth = truths.get((shape, precision, tied)) or oracle(
            make_recipe(stage=1, precision=precision, micro=GLOBAL_BATCH, tied=tied, shape=SHAPES[shape])
        )
        truths[shape, precision, tied] = truth
        recipe = make_recipe(**(axes | layout | {"shape": SHAPES[shape]}))
        name = f"{axis}-{shape}-{precision}-z{layout['stage']}"
        results["layouts"].append(compare(name, recipe, truth, shared))
    descent = oracle(make_recipe(stage=1, precision="fp32", micro=GLOBAL_BATCH), plain_descent)
    with mock.patch("arriero.engine.engine.build_optimizer", plain_descent):
        for stage in (1,) if axis == "pipeline" else (1, 3):
            recipe = make_recipe(stage=stage, precision="fp32", micro=1, **axes)
            results["layouts"].append(compare(f"{axis}-sgd-z{stage}", recipe, descent, shared))
    sample = make_recipe(stage=1, precision="fp32", micro=2, **axes)
    results["masked"] = masked_step(sample)
    results["first_half"] = first_half_step(sample)
    if axis == "pipeline":
        results["tied_copies"] = tied_copies_differ(make_recipe(stage=1, precision="bf16", micro=2, tied=True, **axes))
    for source in sorted(shared.glob("*-llama-fp32-z[13]/checkpoint-*")):
        for stage in (1,) if axis == "pipeline" else (0, 3):
            results["reloads"].append(reload(source, make_recipe(stage=stage, precision="fp32", micro=2, **axes)))
    results["said"] = [
        said_between(make_recipe(stage=stage, precision="bf16", micro=2, **axes)) for stage in {1, stages(axis)[-1]}
    ]
    if world.rank == 0:
        out.write_text(json.dumps(results))
    world.barrier()
    leave_world()
    os._exit(0)


if __name__ == "__main__":
    main()
