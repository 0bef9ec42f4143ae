"""The self-test: the recipe's update, shrunk to fit, in every layout this machine can run, against a plain loop.

Real rows of the recipe's data, its model's architecture with small sizes, its kernels, optimizer and clipping.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from arriero.config.schema import Parallel, Recipe
from arriero.data.loader import MicroBatch, TrainingData
from arriero.data.packing import IGNORED_TARGET
from arriero.engine.engine import Engine, gather_parameter, keep_part, parameter_placement
from arriero.engine.optimizer import build_optimizer, parameter_roles
from arriero.engine.parallel import World
from arriero.engine.state import put_part
from arriero.errors import UserError
from arriero.isolation import leak, on_device
from arriero.model.build import PretrainModel, build_model, parameter_total
from arriero.oracle import Rows, Trained, plain_updates
from arriero.resolve import Inputs, deepspeed_config, resolve

STEPS = 3
_LONGEST_ROW = 256
_LAYERS = 2
_HEADS, _HEAD_WIDTH = 4, 16
# Each update moves a weight by about this much. With 1e-2 three updates of a narrow model are chaotic enough that bf16
# moves the last gradient norm by 5 %.
_LEARNING_RATE = 1e-3
# Relative differences of a step's loss, of its gradient norm, and of the way that all weights have gone. In fp32 they
# come from the order of sums; a bf16 gradient has 8 bits, and which sums are rounded depends on the split. Adam turns
# the last bit of a tiny gradient into a whole step, hence the width for weights.
TOLERANCES = {
    "fp32": {"loss": 1e-5, "grad_norm": 1e-4, "weights": 1e-2},
    "bf16": {"loss": 2e-3, "grad_norm": 4e-2, "weights": 4e-1},
    "fp16": {"loss": 2e-3, "grad_norm": 4e-2, "weights": 4e-1},
}


@dataclass(frozen=True)
class Check:
    """One comparison. ``worst_difference`` is relative, but for documents, where it is the leak itself."""

    name: str
    passed: bool
    worst_difference: float
    tolerance: float


@dataclass(frozen=True)
class Layout:
    """One way to split the update: what it changes in the recipe."""

    name: str
    precision: str
    micro_batch: int
    parallel: dict[str, Any]
    raw: bool
    """Whether the recipe's own ``deepspeed`` section is part of it."""


def layouts(recipe: Recipe, ranks: int, rows: int) -> Iterator[Layout]:
    """Every ZeRO stage in fp32 and in the recipe's precision, one micro-batch and as many as there are rows."""
    axes = {
        key: value
        for key, value in recipe.parallel.model_dump().items()
        if key.endswith("_parallel_size") and value > 1
    }
    own = recipe.parallel.model_dump() | dict.fromkeys(axes, 1)
    for precision in dict.fromkeys(["fp32", recipe.train.precision]):
        for stage in range(4):
            if stage == 0 and precision != "fp32":
                continue  # refused by the recipe's own rules
            parallel = own if stage == own["zero_stage"] else {"zero_stage": stage}
            for micro_batch in dict.fromkeys([rows // ranks, 1]):
                split = f"{ranks} × {rows // ranks // micro_batch} × {micro_batch} rows"
                name = f"{precision} ZeRO-{stage} {split}"
                yield Layout(name, precision, micro_batch, parallel, raw=stage == own["zero_stage"])
    # Last: DeepSpeed keeps the groups of model parallelism for as long as the process lives.
    if axes and ranks % recipe.parallel.replica_ranks == 0:
        dp = ranks // recipe.parallel.replica_ranks
        listed = ", ".join(f"{key.removesuffix('_parallel_size')} {size}" for key, size in axes.items())
        for precision in dict.fromkeys(["fp32", recipe.train.precision]):
            name = f"{precision} ZeRO-{own['zero_stage']} {listed}, {dp} × {rows // dp} × 1 rows"
            yield Layout(name, precision, 1, own | axes, raw=True)


def check_layouts(recipe: Recipe, world: World, rows: int) -> list[Check]:
    """Run every layout of this number of ranks; every rank calls it, and rank 0 says how each came out."""
    if recipe.optim.optimizer == "muon":
        raise UserError(
            "the plain loop that layouts are compared with has no Muon",
            "Check the recipe with AdamW: optim.optimizer=adamw; the layouts' gradients are the same.",
        )
    done: list[Check] = []
    truths: dict[str, Trained] = {}
    for layout in layouts(recipe, world.size, rows):
        small = shrunk(recipe, layout, rows)
        inputs = resolve(small, world.size)
        model = small_config(inputs.config, recipe.parallel)
        if layout.precision not in truths:
            truths[layout.precision] = _truth(small, inputs, model, rows)
        arranged = world.arranged(inputs.layout)
        checks = _check_layout(layout, small, inputs, model, arranged, rows, truths[layout.precision])
        if world.rank == 0:
            wrong = [check.name.rsplit(": ", 1)[1] for check in checks if not check.passed]
            outcome = f"differs in {', '.join(wrong)}" if wrong else "equal"
            print(f"{layout.name}  {outcome}", file=sys.stderr, flush=True)
        done += checks
    return done


def shrunk(recipe: Recipe, layout: Layout, rows: int) -> Recipe:
    """The recipe for three steps of few short rows in this layout."""
    value = recipe.model_dump()
    value["data"]["seq_len"] = min(recipe.data.seq_len, _LONGEST_ROW)
    value["train"] |= {"max_tokens": None, "num_train_epochs": None, "max_steps": STEPS, "global_batch_size": rows}
    value["train"] |= {"per_device_train_batch_size": layout.micro_batch, "precision": layout.precision}
    value["optim"] |= {"learning_rate": _LEARNING_RATE, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}}
    value["parallel"] = layout.parallel
    value["deepspeed"] = recipe.deepspeed if layout.raw else {}
    return Recipe.model_validate(value)


def small_config(config: Any, parallel: Parallel) -> Any:
    """A Transformers configuration of the same architecture with a few narrow layers, as many heads and layers as the
    recipe's own layout splits; its vocabulary stays."""
    small = copy.deepcopy(config)
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    few = _HEADS * max(1, parallel.tensor_parallel_size // 2, parallel.sequence_parallel_size // 2)
    small.num_attention_heads = few
    # As many key/value heads as query heads, one, or half: whichever kind the model is of.
    small.num_key_value_heads = few if shared in (None, heads) else 1 if shared == 1 else few // 2
    small.head_dim = _HEAD_WIDTH
    small.hidden_size = few * _HEAD_WIDTH
    small.intermediate_size = 11 * small.hidden_size // 4
    small.num_hidden_layers = min(max(_LAYERS, parallel.pipeline_parallel_size), config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        small.layer_types = config.layer_types[: small.num_hidden_layers]
    return small


def _check_layout(
    layout: Layout, recipe: Recipe, inputs: Inputs, config: Any, world: World, rows: int, truth: Trained
) -> list[Check]:
    plan = replace(inputs.plan, parameters=parameter_total(config))
    ds_config, _, _ = deepspeed_config(replace(inputs, recipe=recipe, config=config, plan=plan))
    engine = Engine(recipe, _model(recipe, config, ds_config, world), ds_config, world)
    before = _masters(engine, world)
    losses, norms = [], []
    for number in range(STEPS):
        batches = [on_device(batch, world) for batch in _my_share(inputs, number, rows, world)]
        targets = int(world.total([sum(int((batch.targets != IGNORED_TARGET).sum()) for batch in batches)])[0])
        result = engine.optimizer_step(batches, targets, _LEARNING_RATE)
        losses.append(float(world.total([float(result.row_losses.double().sum())])[0]) / targets)
        norms.append(result.grad_norm)
    after = _masters(engine, world)
    found = {
        "loss": _worst(losses, truth.losses),
        "grad_norm": _worst(norms, truth.norms),
        "weights": _way(before, after, truth.weights),
    }
    tolerances = TOLERANCES[layout.precision]
    checks = [
        Check(f"{layout.name}: {measure}", difference <= tolerances[measure], difference, tolerances[measure])
        for measure, difference in found.items()
    ]
    if recipe.data.isolate_documents:
        leaked = leak(engine, inputs.sources, world, micro_batch=plan.micro_batch, vocab_size=config.vocab_size)
        if leaked is not None:
            checks.append(Check(f"{layout.name}: leak", leaked == 0, leaked, 0.0))
    return checks


def _truth(recipe: Recipe, inputs: Inputs, config: Any, rows: int) -> Trained:
    """The same steps by the plain loop, on this rank alone."""
    model = _model(recipe, config, {"zero_optimization": {"stage": 0}}).causal_lm
    return plain_updates(
        model,
        [
            Rows(batch.input_ids, batch.targets, batch.position_ids)
            for batch in (_hardened(_data(inputs).rows_at(n * rows, (n + 1) * rows, _end(rows))) for n in range(STEPS))
        ],
        make_optimizer=partial(build_optimizer, roles=parameter_roles(model), optim=recipe.optim),
        rates=[_LEARNING_RATE] * STEPS,
        max_grad_norm=recipe.optim.max_grad_norm,
        low={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.train.precision],
    )


def _model(recipe: Recipe, config: Any, ds_config: dict[str, Any], world: World | None = None) -> PretrainModel:
    """world: this rank in the layout; None: the whole model."""
    return build_model(
        recipe.model,
        config,
        seed=recipe.train.seed,
        placement=parameter_placement(ds_config),
        gather=gather_parameter,
        keep_part=keep_part(world) if world else None,
    )


def _data(inputs: Inputs) -> TrainingData:
    return TrainingData(inputs.sources, seed=inputs.recipe.train.seed)


def _end(rows: int) -> int:
    """The last step is a left-over one: half its rows and one more are padding."""
    return STEPS * rows - rows // 2 - 1


def _my_share(inputs: Inputs, step: int, rows: int, world: World) -> list[MicroBatch]:
    """One rank's micro-batches, as training cuts them, of rows with unequal counts of targets."""
    plan = inputs.plan
    batches = _data(inputs).micro_batches(
        step * rows,
        end=_end(rows),
        rank=world.dp_rank,
        size=world.dp_size,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
    )
    return [_hardened(batch) for batch in batches]


def _hardened(batch: MicroBatch) -> MicroBatch:
    """Take targets away by position: in every step each fourth row has none at all, and the others unequal numbers."""
    for number, place in enumerate(batch.places):
        kept = batch.targets.shape[1] * (place.position % 4) // 3
        batch.targets[number, kept:] = IGNORED_TARGET
    return batch


def _masters(engine: Engine, world: World) -> dict[str, torch.Tensor]:
    """Every master weight, whole, on every rank."""
    mine = [
        (piece.parameter, piece.shape, piece.start, piece.columns, piece.master.detach().cpu().clone())
        for piece in engine.state_slices()
        if piece.counted
    ]
    whole: dict[str, torch.Tensor] = {}
    for part in world.gather(mine):
        for name, shape, start, columns, master in part:
            put_part(whole.setdefault(name, torch.full(shape, float("nan"))), start, columns, master)
    return whole


def _worst(found: Sequence[float], truth: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, truth, strict=True))


def _way(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """‖weights − true weights‖ / ‖way that the true weights have gone‖, over all parameters."""
    wrong = sum(float((after[name] - truth[name].cpu()).double().pow(2).sum()) for name in truth)
    gone = sum(float((truth[name].cpu() - before[name]).double().pow(2).sum()) for name in truth)
    return float((wrong / gone) ** 0.5)
