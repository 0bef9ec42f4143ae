"""One rank of the tests of compiled layers; results as JSON. Not a test file itself.

torchrun --nproc-per-node N tests/parity/compiled_worker.py OUT.json SHARED_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engine_worker import STEPS, full_state, leave_world, make_recipe, run_steps, start, world
from torch._dynamo.utils import counters

from arriero.checkpoint.load import load_state
from arriero.checkpoint.save import save_checkpoint


def train(folder: Path, checkpointing: bool, compiled: bool) -> dict[str, Any]:
    """Five steps; and the last two again by a new engine that loads the third's checkpoint."""
    recipe = make_recipe(stage=1, precision="bf16", micro=4, checkpointing=checkpointing)
    # Else the second kind would find the first one's graphs: they belong to the layers' code, not to one model.
    torch._dynamo.reset()
    counters.clear()
    straight, micro, accumulation = start(recipe)
    if compiled:
        straight.compile_layers()
    losses, norms = run_steps(straight, recipe, micro, accumulation, 1, 3)
    name = folder / f"{compiled}-{checkpointing}"
    probe = torch.arange(3, 15)[None]
    save_checkpoint(name, straight, world, step=3, trainer={"updates": 3}, data={"position": 1}, probe=probe)
    more = run_steps(straight, recipe, micro, accumulation, 4, STEPS)
    losses, norms = losses + more[0], norms + more[1]
    graphs = counters["stats"]["unique_graphs"]
    again, _, _ = start(recipe)
    if compiled:
        again.compile_layers()
    load_state(name / "checkpoint-3", again, updates=3)
    resumed = run_steps(again, recipe, micro, accumulation, 4, STEPS)
    states = full_state(straight), full_state(again)
    return {
        "losses": losses,
        "norms": norms,
        "graphs": graphs,
        "resumed": [*resumed[0], *resumed[1]] == [*losses[3:], *norms[3:]],
        "state": all(torch.equal(states[0][key], states[1][key]) for key in states[0]),
    }


def main() -> None:
    out, shared = Path(sys.argv[1]), Path(sys.argv[2])
    results = {
        f"{'recomputed' if checkpointing else 'kept'}, {'compiled' if compiled else 'eager'}": train(
            shared, checkpointing, compiled
        )
        for checkpointing in (False, True)
        for compiled in (False, True)
    }
    if world.rank == 0:
        out.write_text(json.dumps(results))
    leave_world()
    os._exit(0)


main()
