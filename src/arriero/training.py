"""The loop: data, model, engine, checkpoints and monitor meet here, and nowhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from arriero.agreement import check_inputs, check_view, on_all
from arriero.assembly import assemble, choose
from arriero.checkpoint.layout import set_aside_later
from arriero.config.schema import Recipe
from arriero.data.loader import MicroBatch
from arriero.engine.engine import (
    StepResult,
    check_device,
)
from arriero.engine.ops import build_ops
from arriero.engine.parallel import World, device_memory_bytes, memory_bytes
from arriero.errors import UserError
from arriero.evaluate.perplexity import sum_by_source
from arriero.isolation import on_device
from arriero.planner.arithmetic import flops_per_token
from arriero.planner.throughput import utilization
from arriero.resolve import resolve, shape_of
from arriero.run import Parts, State, due, tell_status
from arriero.run_folder import RunFolder
from arriero.saving import export, note_saved, save
from arriero.scoring import compare_plan, evaluate, sample
from arriero.setbacks import check_budget, report_fault, roll_back

PREEMPTED = 75


def train(recipe: Recipe, overrides: Sequence[str], world: World) -> int:
    """Train, or continue: the same call after a crash goes on from the newest intact checkpoint. Returns the exit code.

    Every rank calls it. Raises ``UserError`` for what can be mended; ``run_state.json`` says how the run ended.
    """
    started_s = time.monotonic()
    folder = RunFolder(Path(recipe.output_dir))
    check_device(recipe.train.precision, world)
    build_ops(recipe)
    with ExitStack() as stack:
        world.on_first(lambda: stack.enter_context(folder.held()))
        check_view(world, recipe, folder.path)
        checkpoint, notes = world.on_first(lambda: choose(folder, recipe))
        memory, on_gpu = min(world.gather(device_memory_bytes(world.local_size)))
        inputs = on_all(world, lambda: resolve(recipe, world.size, checkpoint, memory_bytes=memory, on_gpu=on_gpu))
        check_inputs(world, inputs)
        world = world.arranged(inputs.layout)
        if checkpoint is not None:
            notes += world.on_first(lambda: set_aside_later(folder.path, checkpoint))
        state = State.saved(checkpoint) if checkpoint is not None else State()
        parts = assemble(stack, folder, inputs, world, state, checkpoint, overrides, notes, started_s)
        return run_loop(parts, state)


def run_loop(parts: Parts, state: State) -> int:
    """Steps, evaluations and checkpoints until the plan is done or somebody asks for a stop."""
    recipe = parts.recipe
    if state.step >= parts.plan.steps:
        parts.monitor.note(
            f"nothing is left to train: the run is at step {state.step}, its length is {parts.plan.steps}"
        )
    if state.step == 0 and recipe.eval.eval_on_start:
        state = evaluate(parts, state)
    while state.step < parts.plan.steps:
        state, stopping, fault = take_step(parts, state)
        if fault is not None and recipe.health.on_spike == "rollback":
            done = state.step
            parts, state = roll_back(parts, state)
            if state.step < done and not stopping:
                continue
        last = state.step == parts.plan.steps
        if last or due(state.step, recipe.eval.eval_steps):
            state = evaluate(parts, state)
        if recipe.log.sample_prompts and (last or due(state.step, recipe.log.sample_steps)):
            sample(parts, state)
        if last or stopping or due(state.step, recipe.checkpoint.save_steps):
            save(parts, state, wait=last or stopping)
            state = replace(state, rollbacks=0)
        if stopping and not last:
            return finish(parts, state, *_why_stopped(parts))
    if state.updates == 0:
        raise UserError(f"all {state.step} updates were skipped: nothing was trained", exit_code=1)
    export(parts, state)
    return finish(parts, state, "completed", f"all {parts.plan.steps} steps done", 0)


def take_step(parts: Parts, state: State) -> tuple[State, bool, str | None]:
    """One step; logs it where it is due. Returns the next state, whether all ranks stop now, and the step's fault."""
    began = time.perf_counter()
    plan, world, health = parts.plan, parts.world, parts.recipe.health
    parts.heart.phase(state.step + 1, "reading rows")
    batches = list(
        parts.data.micro_batches(
            state.position,
            end=plan.end,
            rank=world.dp_rank,
            size=world.dp_size,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
        )
    )
    data_s = time.perf_counter() - began
    parts.heart.phase(state.step + 1, "training")
    # One small all-reduce: the divisor of the loss, whether anyone was asked to stop, how far a checkpoint is.
    wants_stop = float(parts.stop.requested or _out_of_time(parts))
    mine = [sum(batch.target_tokens for batch in batches), wants_stop, *parts.saver.signals()]
    targets, stopping, *signals = world.total(mine).tolist()
    saved = parts.saver.heard(signals)
    if saved is not None:
        note_saved(parts, state, saved)
    rate = parts.learning_rate(state.updates + 1)
    result = parts.engine.optimizer_step(
        [on_device(batch, world) for batch in batches],
        int(targets),
        rate,
        lambda loss, norm: state.health.fault(loss, norm, health.spike_factor) is None,
    )
    fault = state.health.fault(result.loss, result.grad_norm, health.spike_factor)
    if fault is not None and parts.recipe.train.precision == "fp16" and math.isfinite(result.loss):
        fault = None if not math.isfinite(result.grad_norm) else fault  # its loss scale settles by skipping
    if not result.applied and fault is None:
        parts.monitor.note(_skip_note(state, result.loss_scale))
    rows = min(plan.global_batch_size, plan.end - state.position)
    after = replace(
        state,
        step=state.step + 1,
        position=state.position + rows,
        tokens=state.tokens + rows * plan.seq_len,
        updates=state.updates + int(result.applied),
        health=state.health.after(result.loss, result.grad_norm, applied=result.applied),
    )
    if due(after.step, parts.recipe.log.logging_steps) or after.step in (1, plan.steps) or not result.applied:
        log_step(parts, after, result, rate, rows, _losses_by_source(parts, batches, result.row_losses), began, data_s)
    if fault is not None:
        report_fault(parts, state, rows, fault)
    check_budget(parts, after, fault)
    return after, stopping > 0, fault


def log_step(
    parts: Parts, state: State, result: StepResult, rate: float, rows: int, losses: Tensor, began: float, data_s: float
) -> None:
    """The line of a step that was just done, for metrics.jsonl and whoever looks on. ``began``: perf_counter's seconds."""
    step_s = time.perf_counter() - began
    tokens_per_second = rows * parts.plan.seq_len / step_s
    parts.monitor.row(
        {
            "step": state.step,
            "loss": result.loss,
            "learning_rate": rate,
            "grad_norm": result.grad_norm,
            "skipped": not result.applied,
            "loss_scale": result.loss_scale,
            "target_tokens": int(losses[1].sum()),
            "tokens": state.tokens,
            "position": state.position,
            "epoch": {name: round(n, 6) for name, n in parts.data.mixture.epochs_at(state.position).items()},
            "tokens_per_second": round(tokens_per_second, 3),
            "step_time_s": round(step_s, 6),
            "data_time_s": round(data_s, 6),
            "checkpoint_time_s": round(parts.monitor.take_checkpoint_s(), 6),
            "mfu": _mfu(parts, tokens_per_second),
            "memory_bytes": memory_bytes(),
            **_source_keys(parts, losses),
        }
    )


def finish(parts: Parts, state: State, status: str, reason: str, exit_code: int) -> int:
    """Write down how the run ended."""
    tell_status(parts, state, status, reason, exit_code)
    compare_plan(parts, state)
    parts.monitor.row({"event": "stop", "step": state.step, "status": status, "reason": reason})
    parts.world.barrier()
    if exit_code == 0:  # one that was preempted has no time for it
        parts.monitor.report()
    return exit_code


def _losses_by_source(parts: Parts, batches: Sequence[MicroBatch], row_losses: Tensor) -> Tensor:
    """Summed loss and targets per source over all ranks, fp64 ``[2, sources]``."""
    count = len(parts.inputs.sources)
    sums = torch.zeros(2, count, dtype=torch.float64)
    for batch, losses in zip(batches, torch.split(row_losses, parts.plan.micro_batch), strict=True):
        sums += sum_by_source(batch, losses, count)
    return parts.world.total(sums)


def _mfu(parts: Parts, tokens_per_second: float) -> float | None:
    """Share of what the devices could do that the model's own operations took; None where a device isn't known."""
    if parts.peak_flops is None:
        return None
    flops = flops_per_token(shape_of(parts.inputs.config), parts.inputs.config.vocab_size, parts.plan.seq_len)
    return round(utilization(flops, tokens_per_second, parts.world.size, parts.peak_flops), 4)


def _source_keys(parts: Parts, losses: Tensor) -> dict[str, float]:
    keys: dict[str, float] = {}
    if len(parts.inputs.sources) > 1:
        for source, loss, targets in zip(parts.inputs.sources, *losses.tolist(), strict=True):
            if targets:
                keys |= {f"loss/{source.name}": loss / targets, f"target_tokens/{source.name}": int(targets)}
    return keys


def _out_of_time(parts: Parts) -> bool:
    limit_s = parts.recipe.train.max_time
    return limit_s is not None and time.monotonic() - parts.started_s > limit_s


def _why_stopped(parts: Parts) -> tuple[str, str, int]:
    """Status, reason and exit code of a run that stops before its end."""
    signals = [name for name in parts.world.gather(parts.stop.signal_name) if name]
    if signals:
        return "preempted", f"{signals[0]}: saved and stopped, the same command continues", PREEMPTED
    return "stopped", f"train.max_time {parts.recipe.train.max_time:g} s is over, the same command continues", 0


def _skip_note(state: State, loss_scale: float) -> str:
    text = f"step {state.step + 1}: the gradient overflowed fp16, so its update was skipped; loss scale {loss_scale:g}"
    if state.updates == 0:
        return f"{text}. Usual in the first steps, until a scale is found"
    return f"{text}. If this goes on: train.precision bf16, or a lower optim.learning_rate"
