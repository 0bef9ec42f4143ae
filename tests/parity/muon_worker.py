"""Ranks that train with Muon at the stages that have it, against a plain PyTorch loop. Not a test file itself.

torchrun --nproc-per-node N tests/parity/muon_worker.py OUT.json SHARED_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from engine_worker import STEPS, compare, full_state, make_recipe, make_step, oracle, part, run_steps, start, world
from torch import Tensor

from arriero.checkpoint.load import load_state
from arriero.checkpoint.saved import SavedState
from arriero.config.schema import Optim, Recipe
from arriero.errors import UserError


def muon_recipe(stage: int, precision: str) -> Recipe:
    value = make_recipe(stage=stage, precision=precision, micro=2).model_dump(mode="json")
    value["optim"] |= {"optimizer": "muon", "max_grad_norm": 0, "weight_decay": 0.1}
    return Recipe.model_validate(value)


def orthogonal(matrix: Tensor) -> Tensor:
    """Five quintic Newton–Schulz steps towards the nearest orthogonal matrix, by their published coefficients
    (K. Jordan, "Muon", 2024), in the matrix's own precision."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class PlainMuon:
    """Muon on the layers' matrices (Nesterov momentum, an orthogonal step of root mean square 0.2, decoupled decay),
    torch.optim.AdamW on the rest."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], optim: Optim) -> None:
        everything = dict(named)
        matrices = {name: value for name, value in everything.items() if ".layers." in name and value.dim() == 2}
        rest = [value for name, value in everything.items() if name not in matrices]
        self.adam = torch.optim.AdamW(
            [
                {"params": [value for value in rest if value.dim() == 2], "weight_decay": optim.weight_decay},
                {"params": [value for value in rest if value.dim() == 1], "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_epsilon,
        )
        self.buffers = [(matrix, torch.zeros_like(matrix)) for matrix in matrices.values()]
        self.muon = {"lr": 0.0, "decay": optim.weight_decay, "momentum": optim.muon_momentum}
        self.param_groups = [*self.adam.param_groups, self.muon]

    @torch.no_grad()
    def step(self) -> None:
        rate, momentum = self.muon["lr"], self.muon["momentum"]
        for matrix, buffer in self.buffers:
            assert matrix.grad is not None
            buffer.lerp_(matrix.grad, 1 - momentum)
            update = orthogonal(matrix.grad.lerp(buffer, momentum))
            matrix.mul_(1 - rate * self.muon["decay"])
            matrix.sub_(update * rate * 0.2 * max(matrix.shape) ** 0.5)
        self.adam.step()


def left_out() -> dict[str, float]:
    """How far a step that its verdict leaves out moves masters, moments and momentum."""
    recipe = muon_recipe(3, "fp32")
    engine, micro, accumulation = start(recipe)
    run_steps(engine, recipe, micro, accumulation, 1, 2)
    before = {key: value.clone() for key, value in full_state(engine).items()}
    batch = make_step(3)
    mine = [part(batch, slice((k * world.size + world.rank) * micro, None)) for k in range(accumulation)]
    mine = [part(rows, slice(0, micro)) for rows in mine]
    result = engine.optimizer_step(mine, 0, 1e-2, lambda loss, norm: False)
    after = full_state(engine)
    return {"applied": result.applied, "moved": max(float((after[key] - before[key]).abs().max()) for key in before)}


def reload(source: Path, recipe: Recipe) -> dict[str, Any]:
    engine, _, _ = start(recipe)
    load_state(source, engine, updates=STEPS)
    state = full_state(engine)
    with SavedState(source) as saved:
        equal = all(torch.equal(value, saved.read(*key.rsplit("/", 1))) for key, value in state.items())
    return {"from": source.parent.name, "stage": engine.stage, "bit_equal": equal, "kinds": len(state)}


def main() -> None:
    out, shared = Path(sys.argv[1]), Path(sys.argv[2])
    results: dict[str, Any] = {"layouts": [], "reloads": []}
    for precision, stages in (("fp32", (0, 3)), ("bf16", (3,))):
        truth = oracle(muon_recipe(3, precision), lambda named, roles, optim: PlainMuon(named, optim))
        for stage in stages:
            name = f"muon-{precision}-z{stage}-w{world.size}"
            results["layouts"].append(compare(name, muon_recipe(stage, precision), truth, shared))
    for source in sorted(shared.glob("muon-fp32-*/checkpoint-*")):
        results["reloads"] += [reload(source, muon_recipe(stage, "fp32")) for stage in (0, 3)]
    try:
        load_state(source, start(make_recipe(stage=3, precision="fp32", micro=2))[0], updates=STEPS)
    except UserError as error:
        results["adamw"] = str(error)
    results["left_out"] = left_out()
    if world.rank == 0:
        out.write_text(json.dumps(results))
    world.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
