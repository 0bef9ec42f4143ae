"""Ranks that train with Muon at the stages that have it, against a plain PyTorch loop. Not a test file itself.

torchrun --nproc-per-node N tests/parity/muon_worker.py OUT.json SHARED_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engine_worker import STEPS, Trained, build, compare, full_state, make_recipe, make_step, start, world
from torch import Tensor
from torch.nn import functional

from arriero.checkpoint.load import load_state
from arriero.checkpoint.saved import SavedState
from arriero.config.schema import Recipe
from arriero.engine.schedule import learning_rates
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
    """Nesterov momentum, an orthogonal step of root mean square 0.2, decoupled decay."""

    def __init__(self, matrices: list[Tensor], decay: float, momentum: float) -> None:
        self.matrices, self.decay, self.momentum = matrices, decay, momentum
        self.buffers = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for matrix, buffer in zip(self.matrices, self.buffers, strict=True):
            assert matrix.grad is not None
            buffer.lerp_(matrix.grad, 1 - self.momentum)
            update = orthogonal(matrix.grad.lerp(buffer, self.momentum))
            matrix.mul_(1 - rate * self.decay)
            matrix.sub_(update * rate * 0.2 * max(matrix.shape) ** 0.5)


def oracle(recipe: Recipe) -> Trained:
    """Muon by hand on the layers' matrices, torch.optim.AdamW on the rest; one process, whole logits."""
    low = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
    model = build(recipe, None).causal_lm
    model.lm_head.__class__ = torch.nn.Linear
    for parameter in model.parameters():
        parameter.data = parameter.data.to(low)
    masters = {name: p.detach().float().clone().requires_grad_() for name, p in model.named_parameters()}
    outer = [m for name, m in masters.items() if ".layers." not in name and m.dim() == 2]
    vectors = [m for m in masters.values() if m.dim() == 1]
    optim = recipe.optim
    muon = PlainMuon(
        [m for name, m in masters.items() if ".layers." in name and m.dim() == 2],
        optim.weight_decay,
        optim.muon_momentum,
    )
    adam = torch.optim.AdamW(
        [{"params": outer, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.0,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_epsilon,
    )
    rate = learning_rates(optim, STEPS)
    trained = Trained([], [], {})
    for step in range(1, STEPS + 1):
        batch = make_step(step)
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits.float()
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
        loss = loss / (batch.targets != -100).sum()
        loss.backward()
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.float()
            parameter.grad = None
        norm = torch.stack([m.grad.norm() for m in masters.values()]).norm()
        muon.step(rate(step))
        for group in adam.param_groups:
            group["lr"] = rate(step)
        adam.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name].detach())
        trained.losses.append(float(loss.detach()))
        trained.norms.append(float(norm))
    trained.weights = {name: master.detach() for name, master in masters.items()}
    return trained


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
        truth = oracle(muon_recipe(3, precision))
        for stage in stages:
            name = f"muon-{precision}-z{stage}-w{world.size}"
            results["layouts"].append(compare(name, muon_recipe(stage, precision), truth, shared))
    for source in sorted(shared.glob("muon-fp32-*/checkpoint-*")):
        results["reloads"] += [reload(source, muon_recipe(stage, "fp32")) for stage in (0, 3)]
    try:
        load_state(source, start(make_recipe(stage=3, precision="fp32", micro=2))[0], updates=STEPS)
    except UserError as error:
        results["adamw"] = str(error)
    if world.rank == 0:
        out.write_text(json.dumps(results))
    world.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
