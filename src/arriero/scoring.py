"""What a run is measured by: its evaluations, and the planner's forecast beside what was taken."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from arriero.data.loader import MicroBatch, validation_batches
from arriero.engine.parallel import device_name, memory_bytes
from arriero.evaluate.perplexity import Score, score
from arriero.isolation import on_device
from arriero.resolve import planned
from arriero.run import Parts, State
from arriero.samples import continue_prompts

# The first evaluation may compile a graph of its own.
_EVALUATION_S = 300.0


def evaluate(parts: Parts, state: State) -> State:
    """Every validation row once, over all ranks; neither weights nor the data's position change."""
    sources, world = parts.inputs.sources, parts.world
    if all(source.validation is None for source in sources):
        return state
    began = time.perf_counter()

    def row_losses(batch: MicroBatch) -> Tensor:
        parts.heart.phase(state.step, "evaluating", limit_s=_EVALUATION_S)
        return parts.engine.row_losses(on_device(batch, world))

    overall, each = score(
        _validation(parts),
        row_losses,
        world.total,
        [source.targets_per_byte for source in sources],
    )
    row = score_row(overall, [source.name for source in sources], each)
    parts.monitor.row({"event": "eval", "step": state.step, **row, "seconds": round(time.perf_counter() - began, 6)})
    return replace(state, evaluation={**row, "eval_step": state.step})


def sample(parts: Parts, state: State) -> None:
    """Continue the recipe's prompts into ``samples/``; no training number is moved by it."""
    alive = partial(parts.heart.phase, state.step, "continuing prompts", limit_s=_EVALUATION_S)
    parts.monitor.said(state.step, continue_prompts(parts.engine, parts.inputs, parts.world, alive))


def score_row(overall: Score, names: Sequence[str], each: Sequence[Score | None]) -> dict[str, float]:
    """An evaluation by the keys of metrics.jsonl; sources are listed where there are several."""
    row = _score_keys(overall, "")
    if len(names) > 1:
        for name, one in zip(names, each, strict=True):
            row |= _score_keys(one, f"/{name}") if one else {}
    return row


def _score_keys(one: Score, suffix: str) -> dict[str, float]:
    row = {f"eval_loss{suffix}": one.loss, f"eval_perplexity{suffix}": one.perplexity}
    if one.bits_per_byte is not None:
        row[f"eval_bits_per_byte{suffix}"] = one.bits_per_byte
    return row | {f"eval_target_tokens{suffix}": one.target_tokens}


def _validation(parts: Parts) -> Iterator[MicroBatch]:
    settings, world = parts.recipe.eval, parts.world
    for number, source in enumerate(parts.inputs.sources):
        if source.validation is not None:
            yield from validation_batches(
                source.validation,
                number,
                max_rows=settings.max_rows,
                rank=world.dp_rank,
                size=world.dp_size,
                micro_batch=settings.per_device_eval_batch_size or parts.plan.micro_batch,
            )


def compare_plan(parts: Parts, state: State) -> None:
    """Write what the planner said of the run beside what this start of it took, once it has logged two steps."""
    peaks, device = parts.world.gather(memory_bytes()), device_name()
    step_s = parts.monitor.median_step_s()
    if step_s is None:
        return
    memory, step = planned(parts.inputs, device, parts.world.local_size)
    parts.monitor.row(
        {
            "event": "plan",
            "step": state.step,
            # What ``memory_bytes`` counts: on a GPU tensors, on a CPU the process.
            "planned_memory_bytes": memory.total if device == "cpu" else memory.allocated,
            "memory_bytes": max(peaks),
            "planned_step_time_s": None if step is None else round(step.total, 6),
            "step_time_s": round(step_s, 6),
        }
    )
