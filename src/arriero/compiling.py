"""Whether the decoder layers of a run are compiled: the recipe's word, or whether it pays."""

from __future__ import annotations

import time
from dataclasses import dataclass

from arriero.engine.engine import Engine
from arriero.engine.parallel import World
from arriero.isolation import on_device
from arriero.resolve import Inputs

# What compiling saves of a step, and how long it takes before the first one, by the kind of device. The CPU's are
# those of docs/benchmarks.md; the GPU's are cautious guesses, none was at hand.
_SAVED_SHARE = {"cpu": 0.1, "cuda": 0.15}
_COMPILE_S = {"cpu": 30.0, "cuda": 60.0}
# Backward has two products for each one of forward's.
_STEP_PER_FORWARD = 3.0
# The gain has to be twice the price: both are estimates, and a run that is stopped early has paid in full.
_MARGIN = 2.0


@dataclass(frozen=True)
class Choice:
    """Whether to compile, and why, in words for a person."""

    compiled: bool
    reason: str


def choose(*, forward_s: float, steps: int, device: str, zero_stage: int) -> Choice:
    """The choice of ``torch_compile: auto``: the steps that are left against the price of compiling.

    forward_s: seconds of a step's forward passes on a rank, measured; device: cpu or cuda.
    """
    if zero_stage == 3:
        return Choice(False, "not compiled: ZeRO-3 fetches weights inside the layers, and compiling gains nothing")
    step_s = _STEP_PER_FORWARD * forward_s
    gain_s, price_s = _SAVED_SHARE[device] * step_s * steps, _COMPILE_S[device]
    pays = gain_s > _MARGIN * price_s
    return Choice(
        pays,
        f"{'decoder layers are' if pays else 'not'} compiled: {steps:,} steps of about {step_s:.2g} s would gain about "
        f"{gain_s:,.0f} s, compiling takes about {price_s:.0f} s",
    )


def compile_layers(
    engine: Engine, inputs: Inputs, world: World, *, step: int, position: int, before: bool | None
) -> str | None:
    """Compile the layers where the recipe says so or, by ``auto``, where it pays; what a person should be told of it.

    before: whether the run was compiled up to the checkpoint that it continues from; None: a new run. Compiled layers
    round otherwise, so by ``auto`` a continued run stays as it was and goes on bit for bit. Every rank calls it.
    """
    wanted = inputs.recipe.train.torch_compile
    words = {True: "compiled", False: "not compiled"}
    told = None
    if wanted == "auto" and before is not None:
        wanted, told = before, f"train.torch_compile auto: {words[before]}, as the run was before"
    elif wanted == "auto":
        choice = choose(
            forward_s=_forward_s(engine, inputs, world, position),
            steps=inputs.plan.steps - step,
            device=world.device.type,
            zero_stage=engine.stage,
        )
        choice = world.from_first(choice)
        wanted, told = choice.compiled, f"train.torch_compile auto: {choice.reason}"
    elif before is not None and before != wanted:
        told = f"the layers are {words[wanted]} now and were {words[before]}: losses go on within rounding"
    if wanted:
        engine.compile_layers()
    elif world.device.type == "cuda":
        told = "; ".join(filter(None, [told, _kernels(engine)]))
    return told


def _kernels(engine: Engine) -> str:
    """What isn't compiled is at least fused by hand; compiled layers need no such kernels."""
    try:
        return f"Liger's kernels serve {engine.use_liger()} norms and gated units"
    except ImportError as error:
        return f"Liger's kernels are missing ({error}): pip install 'arriero[gpu]'"


def _forward_s(engine: Engine, inputs: Inputs, world: World, position: int) -> float:
    """Seconds that the forward passes of a step take on this rank, by the second of two of one micro-batch."""
    plan = inputs.plan
    batches = inputs.data.micro_batches(
        position,
        end=plan.end,
        rank=world.dp_rank,
        size=world.dp_size,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
    )
    batch = on_device(next(iter(batches)), world)
    began = time.perf_counter()
    for _ in range(2):
        began = time.perf_counter()
        float(engine.row_losses(batch).sum())
    return (time.perf_counter() - began) * plan.accumulation
