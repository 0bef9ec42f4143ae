"""One rank of the engine's parity tests: many layouts in one launch, results as JSON. Not a test file itself.

torchrun --nproc-per-node N tests/parity/engine_worker.py OUT.json SHARED_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

warnings.filterwarnings("ignore", module=r"torch|deepspeed|transformers")

from arriero.engine.parallel import World, join_world, leave_world

world = join_world()

import torch
from torch import Tensor

from arriero.checkpoint.load import load_state
from arriero.checkpoint.save import save_checkpoint
from arriero.checkpoint.saved import SavedState
from arriero.config.schema import Recipe
from arriero.doctor.building import compiler_check
from arriero.engine.ds_config import compile_ds_config
from arriero.engine.engine import MOMENTS, Engine, gather_parameter, keep_part, parameter_placement
from arriero.engine.ops import build_ops
from arriero.engine.optimizer import build_optimizer, parameter_roles
from arriero.engine.schedule import learning_rates
from arriero.engine.state import Batch, put_part
from arriero.model.build import PretrainModel, build_model, model_config
from arriero.oracle import Rows, Trained, plain_updates
from arriero.planner.arithmetic import parameter_count
from arriero.planner.layouts import choose_layout

VOCAB, SEQ_LEN, GLOBAL_BATCH, STEPS = 320, 48, 8, 5
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


# Stage, and where the optimizer's state and the weights live.
OFFLOADS = [(1, "cpu", "none"), (2, "cpu", "none"), (3, "cpu", "none"), (3, "none", "cpu"), (3, "cpu", "cpu")]


def make_recipe(
    *,
    stage: int,
    precision: str,
    micro: int,
    tied: bool = False,
    checkpointing: bool = False,
    offload: tuple[str, str] = ("none", "none"),
    shape: dict[str, Any] | None = None,
    **axes: int,
) -> Recipe:
    """axes: tensor_parallel_size and the like. shape: the model's, in place of the usual one."""
    return Recipe.model_validate(
        {
            "output_dir": "unused",
            "model": {"config": (shape or SHAPE) | {"tie_word_embeddings": tied}, "tokenizer": "unused"},
            "data": {"sources": [{"path": "unused"}], "seq_len": SEQ_LEN},
            "train": {
                "global_batch_size": GLOBAL_BATCH,
                "per_device_train_batch_size": micro,
                "max_steps": STEPS,
                "precision": precision,
                "activation_checkpointing": checkpointing,
            },
            "optim": {"learning_rate": 1e-2, "warmup_steps": 1, "max_grad_norm": 0.5},
            "parallel": {"zero_stage": stage, "offload_optimizer": offload[0], "offload_param": offload[1]} | axes,
        }
    )


def make_step(step: int) -> Batch:
    """The rows of one step: two to four documents each, unequal target counts, rows 2 and 3 without any target."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    targets = ids[:, 1:].clone()
    positions = torch.arange(SEQ_LEN).repeat(GLOBAL_BATCH, 1)
    for row in range(GLOBAL_BATCH):
        for cut in sorted(torch.randint(4, SEQ_LEN, (3,), generator=generator).tolist()):
            positions[row, cut:] = torch.arange(SEQ_LEN - cut)
            targets[row, cut - 1] = -100
        targets[row, SEQ_LEN - 4 * row :] = -100
    targets[2:4] = -100
    return Batch(ids[:, :-1].contiguous(), targets, positions)


def part(batch: Batch, rows: slice) -> Batch:
    return Batch(batch.input_ids[rows], batch.targets[rows], batch.position_ids[rows])


def build(recipe: Recipe, ds_config: dict[str, Any] | None, here: World | None = None) -> PretrainModel:
    """here: this rank in its layout; None: the whole model."""
    config = model_config(recipe.model, None, vocab_size=VOCAB, seq_len=SEQ_LEN, token_ids=IDS)
    placement = parameter_placement(ds_config or {"zero_optimization": {"stage": 0}})
    part = keep_part(here) if here else None
    return build_model(recipe.model, config, seed=5, placement=placement, gather=gather_parameter, keep_part=part)


def start(recipe: Recipe, **raw: Any) -> tuple[Engine, int, int]:
    here = world.arranged(choose_layout(recipe, recipe.model.config, world.size))
    micro = int(recipe.train.per_device_train_batch_size)
    accumulation = GLOBAL_BATCH // (micro * here.dp_size)
    if recipe.parallel.zero_stage:
        raw["zero_allow_untested_optimizer"] = True  # for plain descent
    ds_config, _ = compile_ds_config(
        recipe,
        raw,
        "none",
        micro_batch=micro,
        accumulation=accumulation,
        dp=here.dp_size,
        parameters=parameter_count(recipe.model.config, VOCAB),
    )
    return Engine(recipe, build(recipe, ds_config, here), ds_config, here), micro, accumulation


def run_steps(
    engine: Engine, recipe: Recipe, micro: int, accumulation: int, first: int, last: int
) -> tuple[list, list]:
    rate, here = learning_rates(recipe.optim, STEPS), engine.world
    losses, norms = [], []
    for step in range(first, last + 1):
        batch = make_step(step)
        targets = int((batch.targets != -100).sum())
        firsts = [(k * here.dp_size + here.dp_rank) * micro for k in range(accumulation)]
        mine = [part(batch, slice(first, first + micro)) for first in firsts]
        result = engine.optimizer_step(mine, targets, rate(step))
        losses.append(float(here.total([float(result.row_losses.double().sum())])[0]) / targets)
        norms.append(result.grad_norm)
    return losses, norms


def full_state(engine: Engine) -> dict[str, Tensor]:
    """Masters and moments, whole, from every rank's slices."""
    mine = [
        (piece.parameter, piece.shape, piece.start, piece.columns, kind, value.clone())
        for piece in engine.state_slices()
        if piece.counted
        for kind, value in {"master": piece.master, **piece.moments}.items()
    ]
    state: dict[str, Tensor] = {}
    for rank_part in world.gather(mine):
        for name, shape, begin, columns, kind, value in rank_part:
            put_part(state.setdefault(f"{name}/{kind}", torch.full(shape, float("nan"))), begin, columns, value)
    return state


def oracle(recipe: Recipe, make_optimizer: Any = build_optimizer) -> Trained:
    """The plain loop on one process."""
    model = build(recipe, None).causal_lm
    roles = parameter_roles(model)
    rate = learning_rates(recipe.optim, STEPS)
    return plain_updates(
        model,
        [Rows(batch.input_ids, batch.targets, batch.position_ids) for batch in map(make_step, range(1, STEPS + 1))],
        make_optimizer=lambda named: make_optimizer(named, roles, recipe.optim),
        rates=[rate(step) for step in range(1, STEPS + 1)],
        max_grad_norm=recipe.optim.max_grad_norm,
        low=torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32,
    )


def plain_descent(named: Any, *rest: Any, **options: Any) -> torch.optim.Optimizer:
    """Without Adam's division: a gradient that is twice too large moves a weight twice as far."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)


def compare(name: str, recipe: Recipe, truth: Trained, folder: Path, **raw: Any) -> dict[str, Any]:
    """Train one layout, then save it; its differences from the oracle. raw: DeepSpeed's own keys."""
    engine, micro, accumulation = start(recipe, **raw)
    losses, norms = run_steps(engine, recipe, micro, accumulation, 1, STEPS)
    state = full_state(engine)
    evaluated = float(engine.row_losses(make_step(99)).sum())
    probe = torch.arange(3, 16)[None]
    save_checkpoint(
        folder / name, engine, engine.world, step=STEPS, trainer={"updates": STEPS}, data={"position": 1}, probe=probe
    )
    weights = {key.removesuffix("/master"): value for key, value in state.items() if key.endswith("/master")}
    return {
        "name": name,
        "world": world.size,
        "layout": engine.world.layout.describe(),
        "stage": engine.stage,
        "precision": recipe.train.precision,
        "loss": max(abs(a - b) / b for a, b in zip(losses, truth.losses, strict=True)),
        "norm": max(abs(a - b) / b for a, b in zip(norms, truth.norms, strict=True)),
        "first_norm": abs(norms[0] - truth.norms[0]) / truth.norms[0],
        "weights": max(float((weights[n] - truth.weights[n]).abs().max()) for n in truth.weights),
        "parameters": sorted(weights) == sorted(truth.weights),
        "finite": all(bool(value.isfinite().all()) for value in state.values()),
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated,
        "tables": [str(t.dtype) for name, t in engine._engine.module.named_buffers() if "inv_freq" in name],
    }


def masked_step(recipe: Recipe) -> dict[str, Any]:
    """A step without any target: no gradient, and weights that move by decay alone."""
    engine, micro, accumulation = start(recipe)
    before = full_state(engine)
    batch = make_step(1)
    empty = Batch(batch.input_ids, torch.full_like(batch.targets, -100), batch.position_ids)
    result = engine.optimizer_step([part(empty, slice(0, micro))] * accumulation, 0, 1e-2)
    after = full_state(engine)
    moved = {
        key: float((after[key] - before[key] * (1 - (1e-2 * 0.1 if before[key].dim() > 1 else 0))).abs().max())
        for key in before
        if key.endswith("/master")
    }
    return {"stage": engine.stage, "norm": result.grad_norm, "moved_beyond_decay": max(moved.values())}


def reload(source: Path, recipe: Recipe, **raw: Any) -> dict[str, Any]:
    """Load a checkpoint of another layout: is the state bit-equal, and does the forward pass use it?"""
    engine, _, _ = start(recipe, **raw)
    load_state(source, engine, updates=STEPS)
    state = full_state(engine)
    with SavedState(source) as saved:
        equal = all(
            torch.equal(state[f"{name}/{kind}"], saved.read(name, kind))
            for name in saved.parameters
            for kind in ("master", *MOMENTS)
        )
    return {
        "from": source.parent.name,
        "stage": engine.stage,
        "world": world.size,
        "optimizer": recipe.parallel.offload_optimizer,
        "bit_equal": equal,
        "evaluated": float(engine.row_losses(make_step(99)).sum()),
    }


def offloaded(truths: dict[str, Trained], shared: Path) -> dict[str, Any]:
    """What is offloaded against the same oracle, and its checkpoints into layouts that offload nothing, and back."""
    problem = next((check.detail for check in [compiler_check()] if not check.ok), None)
    layouts, reloads = [], []
    for precision, truth in truths.items():
        for stage, *offload in OFFLOADS:
            if problem and offload[0] != "none":
                continue
            recipe = make_recipe(stage=stage, precision=precision, micro=2, offload=tuple(offload))
            build_ops(recipe)
            name = f"{precision}-z{stage}-w{world.size}-{'-'.join(offload)}"
            layouts.append(compare(name, recipe, truth, shared))
    if world.size > 1:  # ZeRO++: a second, whole copy of the weights in each group of ranks
        recipe, groups = make_recipe(stage=3, precision="fp32", micro=2), {"zero_hpz_partition_size": world.size}
        layouts.append(compare("fp32-z3-hpz", recipe, truths["fp32"], shared, zero_optimization=groups))
    for source in sorted(shared.glob("fp32-*-cpu-*/checkpoint-*")):
        for stage in (0, 3):
            reloads.append(reload(source, make_recipe(stage=stage, precision="fp32", micro=2)))
    for source in sorted(shared.glob("fp32-z[03]-w*-m[12]/checkpoint-*")) if not problem else []:
        for stage in (2, 3):
            reloads.append(reload(source, make_recipe(stage=stage, precision="fp32", micro=2, offload=("cpu", "none"))))
    return {"problem": problem, "layouts": layouts, "reloads": reloads, "resumed": not problem and exact_resumes()}


def exact_resumes() -> dict[str, bool]:
    """State and a step more after a save and a load into a new engine, against going on: bit for bit."""
    found = {}
    for stage in (1, 3):
        recipe = make_recipe(stage=stage, precision="bf16", micro=2, offload=("cpu", "none"))
        engine, micro, accumulation = start(recipe)
        run_steps(engine, recipe, micro, accumulation, 1, 3)
        before = {key: value.clone() for key, value in full_state(engine).items()}
        run_steps(engine, recipe, micro, accumulation, 4, STEPS)
        again, *_ = start(recipe)
        again.begin_optimizer_state(3)
        with torch.no_grad():
            for piece in again.state_slices(writes=True):
                part_of = slice(piece.start, piece.start + piece.master.numel())
                for kind, target in {"master": piece.master, **piece.moments}.items():
                    target.copy_(before[f"{piece.parameter}/{kind}"].view(-1)[part_of])
        again.publish_masters()
        run_steps(again, recipe, micro, accumulation, 4, STEPS)
        straight, resumed = full_state(engine), full_state(again)
        found[str(stage)] = all(torch.equal(straight[key], resumed[key]) for key in straight)
    return found


def main() -> None:
    out, shared = Path(sys.argv[1]), Path(sys.argv[2])
    results: dict[str, Any] = {"layouts": [], "masked": [], "reloads": []}
    truths = {precision: oracle(make_recipe(stage=1, precision=precision, micro=8)) for precision in ("fp32", "bf16")}
    tied_truth = oracle(make_recipe(stage=1, precision="fp32", micro=8, tied=True))
    micros = (8, 2) if world.size == 1 else (4, 1)
    for precision in ("fp32", "bf16"):
        for stage in (0, 1, 2, 3):
            if precision == "bf16" and stage == 0:
                continue
            for micro in micros:
                recipe = make_recipe(stage=stage, precision=precision, micro=micro)
                name = f"{precision}-z{stage}-w{world.size}-m{micro}"
                results["layouts"].append(compare(name, recipe, truths[precision], shared))
    descent = oracle(make_recipe(stage=1, precision="fp32", micro=8), plain_descent)
    with mock.patch("arriero.engine.engine.build_optimizer", plain_descent):
        for stage in (0, 1, 2, 3):
            recipe = make_recipe(stage=stage, precision="fp32", micro=2)
            results["layouts"].append(compare(f"sgd-z{stage}-w{world.size}", recipe, descent, shared))
    for stage in (1, 3):
        recipe = make_recipe(stage=stage, precision="fp32", micro=2, tied=True, checkpointing=True)
        name = f"tied-z{stage}-w{world.size}"
        results["layouts"].append(compare(name, recipe, tied_truth, shared))
    results["masked"] = [masked_step(make_recipe(stage=stage, precision="fp32", micro=2)) for stage in (0, 1, 2, 3)]
    for source in sorted(shared.glob("fp32-*-m[12]/checkpoint-*")):
        # Its own stage is in the name: fp32-z1-w2-m1. Two others; tests/survival/test_pairs.py has all.
        own = int(source.parent.name[len("fp32-z")])
        for stage in ((own + 1) % 4, (own + 2) % 4):
            results["reloads"].append(reload(source, make_recipe(stage=stage, precision="fp32", micro=2)))
    results["offload"] = offloaded(truths, shared)
    if world.rank == 0:
        results["norms"] = truths["fp32"].norms
        out.write_text(json.dumps(results))
    world.barrier()
    leave_world()
    os._exit(0)


if __name__ == "__main__":
    assert isinstance(world, World)
    main()
