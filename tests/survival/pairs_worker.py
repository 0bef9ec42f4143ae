"""One rank of the test over all pairs of layouts: what each saves, and what each loads. Not a test file itself.

torchrun --nproc-per-node N tests/survival/pairs_worker.py save|load OUT.json SHARED_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "parity"))

import engine_worker as parity
import torch

from arriero.checkpoint.load import load_state
from arriero.checkpoint.save import save_checkpoint
from arriero.checkpoint.saved import SavedState
from arriero.engine.engine import MOMENTS, Engine
from arriero.engine.parallel import leave_world

SAVED_AT, STAGES = 3, (0, 1, 2, 3)


def save(folder: Path, engine: Engine) -> Path:
    save_checkpoint(
        folder,
        engine,
        engine.world,
        step=SAVED_AT,
        trainer={"updates": SAVED_AT},
        data={"position": 1},
        probe=torch.arange(3, 16)[None],
    )
    return folder / f"checkpoint-{SAVED_AT}"


def straight_and_resumed(stage: int, precision: str, shared: Path) -> dict[str, Any]:
    """Train, save in the middle, go on; and the same again from what was saved, by another engine."""
    recipe = parity.make_recipe(stage=stage, precision=precision, micro=2)
    engine, micro, accumulation = parity.start(recipe)
    parity.run_steps(engine, recipe, micro, accumulation, 1, SAVED_AT)
    name = f"{precision}-z{stage}-w{parity.world.size}"
    checkpoint = save(shared / name, engine)
    straight = parity.run_steps(engine, recipe, micro, accumulation, SAVED_AT + 1, parity.STEPS)
    again, *_ = parity.start(recipe)
    load_state(checkpoint, again, updates=SAVED_AT)
    resumed = parity.run_steps(again, recipe, micro, accumulation, SAVED_AT + 1, parity.STEPS)
    states = parity.full_state(engine), parity.full_state(again)
    return {
        "name": name,
        "numbers_equal": straight == resumed,
        "state_equal": all(torch.equal(value, states[1][key]) for key, value in states[0].items()),
    }


def load(source: Path, stage: int, truth: list[float]) -> dict[str, Any]:
    """Load a checkpoint of any layout into this one: is its state the same bit for bit, and what comes next?"""
    recipe = parity.make_recipe(stage=stage, precision="fp32", micro=2)
    engine, micro, accumulation = parity.start(recipe)
    load_state(source, engine, updates=SAVED_AT)
    state = parity.full_state(engine)
    with SavedState(source) as saved:
        equal = all(
            torch.equal(state[f"{name}/{kind}"], saved.read(name, kind))
            for name in saved.parameters
            for kind in ("master", *MOMENTS)
        )
    losses, _ = parity.run_steps(engine, recipe, micro, accumulation, SAVED_AT + 1, parity.STEPS)
    return {
        "from": source.parent.name,
        "to": f"z{stage}-w{parity.world.size}",
        "bit_equal": equal,
        "loss": max(abs(a - b) / b for a, b in zip(losses, truth[SAVED_AT:], strict=True)),
    }


def main() -> None:
    what, out, shared = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if what == "save":
        found = [
            straight_and_resumed(stage, precision, shared)
            for precision in ("fp32", "bf16")
            for stage in STAGES
            if not (precision == "bf16" and stage == 0)
        ]
    else:
        truth = parity.oracle(parity.make_recipe(stage=1, precision="fp32", micro=8)).losses
        found = [load(path, stage, truth) for path in sorted(shared.glob("fp32-*/checkpoint-*")) for stage in STAGES]
    if parity.world.rank == 0:
        out.write_text(json.dumps(found))
    parity.world.barrier()
    leave_world()
    os._exit(0)


main()
