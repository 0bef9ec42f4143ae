"""The loop: data, model, engine, checkpoints and monitor meet here, and nowhere else."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.agreement import check_inputs, check_view, on_all
from arriero.checkpoint.export import export_checkpoint
from arriero.checkpoint.layout import check_space, folder_name, prune, set_aside_later
from arriero.checkpoint.load import choose_checkpoint, load_random_state, load_state
from arriero.checkpoint.save import Saved, Saver
from arriero.checkpoint.saved import read_json
from arriero.compiling import compile_layers
from arriero.config.load import recipe_yaml
from arriero.config.schema import Recipe
from arriero.data.loader import MicroBatch, TrainingData, validation_batches
from arriero.describe import check_same_run, describe_run
from arriero.engine.ds_config import compile_ds_config, read_deepspeed_json
from arriero.engine.engine import (
    Engine,
    check_device,
    check_quantizers,
    gather_parameter,
    keep_part,
    parameter_placement,
)
from arriero.engine.ops import build_ops
from arriero.engine.parallel import World, device_memory_bytes, device_name, memory_bytes
from arriero.engine.schedule import learning_rates, length_change
from arriero.errors import UserError
from arriero.evaluate.perplexity import Score, score, sum_by_source
from arriero.isolation import leak, on_device
from arriero.launch.environment import own_address
from arriero.launch.local import leave_outcome
from arriero.launch.signals import StopRequest, stop_requests
from arriero.model.build import build_model
from arriero.monitor.health import Health
from arriero.monitor.heartbeat import LONG_S, Heartbeat
from arriero.monitor.monitor import Monitor
from arriero.planner.arithmetic import flops_per_token
from arriero.planner.calibration import rank_device
from arriero.planner.throughput import utilization
from arriero.resolve import Inputs, Plan, make_plan, planned, resolve, shape_of
from arriero.run_folder import RunFolder
from arriero.units import format_count

PREEMPTED = 75
_PROBE_TOKENS = 16
# The first evaluation may compile a graph of its own.
_EVALUATION_S = 300.0
# Going back to the same checkpoint more often than this changes nothing but the rows.
_MOST_ROLLBACKS = 3


@dataclass(frozen=True)
class State:
    """Where a run stands. All of it is in a checkpoint."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    updates: int = 0
    """Updates that were applied: what the schedule and Adam count."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """The last evaluation."""
    health: Health = field(default_factory=Health)
    passed_over: tuple[tuple[int, int], ...] = ()
    """Positions [start, stop) whose rows a rollback left out."""
    rollbacks: int = 0
    """Times that the run went back since it last wrote a checkpoint."""

    @classmethod
    def saved(cls, checkpoint: Path) -> State:
        """The state in a checkpoint."""
        value = read_json(checkpoint, "trainer_state.json")
        known: dict[str, Any] = {field.name: value[field.name] for field in fields(cls)}
        health: dict[str, Any] = {
            key: tuple(item) if isinstance(item, list) else item for key, item in known["health"].items()
        }
        known["health"] = Health(**health)
        known["passed_over"] = tuple((int(start), int(stop)) for start, stop in known["passed_over"])
        return cls(**known)


@dataclass(frozen=True)
class Parts:
    """What one start of a run is assembled from."""

    folder: RunFolder
    inputs: Inputs
    world: World
    engine: Engine
    monitor: Monitor
    heart: Heartbeat
    saver: Saver
    stop: StopRequest
    started_s: float
    peak_flops: float | None
    """Of one rank's device in this precision; None where it isn't known."""

    @property
    def recipe(self) -> Recipe:
        return self.inputs.recipe

    @property
    def data(self) -> TrainingData:
        return self.inputs.data

    @property
    def plan(self) -> Plan:
        return self.inputs.plan

    def learning_rate(self, update: int) -> float:
        """Of update ``update``, counted from 1."""
        return learning_rates(self.recipe.optim, self.plan.steps)(update)


def train(recipe: Recipe, overrides: Sequence[str], world: World) -> int:
    """Train, or continue: the same call after a crash goes on from the newest intact checkpoint. Returns the exit code.

    Every rank calls it. Raises ``UserError`` for what can be mended; ``run_state.json`` says how the run ended.
    """
    started_s = time.monotonic()
    folder = RunFolder(Path(recipe.output_dir))
    check_device(recipe.train.precision, world)
    build_ops(recipe)
    with ExitStack() as stack:
        _on_first(world, lambda: stack.enter_context(folder.held()))
        check_view(world, recipe, folder.path)
        checkpoint, notes = _on_first(world, lambda: _choose(folder, recipe))
        memory, on_gpu = min(world.gather(device_memory_bytes(world.local_size)))
        inputs = on_all(world, lambda: resolve(recipe, world.size, checkpoint, memory_bytes=memory, on_gpu=on_gpu))
        check_inputs(world, inputs)
        world = world.arranged(inputs.layout)
        if checkpoint is not None:
            notes += _on_first(world, lambda: set_aside_later(folder.path, checkpoint))
        state = State.saved(checkpoint) if checkpoint is not None else State()
        parts = _assemble(stack, folder, inputs, world, state, checkpoint, overrides, notes, started_s)
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
        losses = _losses_by_source(parts, batches, result.row_losses)
        step_s = time.perf_counter() - began
        parts.monitor.row(
            {
                "step": after.step,
                "loss": result.loss,
                "learning_rate": rate,
                "grad_norm": result.grad_norm,
                "skipped": not result.applied,
                "loss_scale": result.loss_scale,
                "target_tokens": int(targets),
                "tokens": after.tokens,
                "position": after.position,
                "epoch": {name: round(n, 6) for name, n in parts.data.mixture.epochs_at(after.position).items()},
                "tokens_per_second": round(rows * plan.seq_len / step_s, 3),
                "step_time_s": round(step_s, 6),
                "data_time_s": round(data_s, 6),
                "checkpoint_time_s": round(parts.monitor.take_checkpoint_s(), 6),
                "mfu": _mfu(parts, rows * plan.seq_len / step_s),
                "memory_bytes": memory_bytes(),
                **_source_keys(parts, losses),
            }
        )
    if fault is not None:
        report_fault(parts, state, rows, fault)
    check_budget(parts, after, fault)
    return after, stopping > 0, fault


def report_fault(parts: Parts, state: State, count: int, fault: str) -> None:
    """Name the rows and documents of a step that wasn't applied; all ranks' rows follow from the position."""
    stop = state.position + count
    batch = parts.data.rows_at(state.position, stop, stop)
    rows = [
        {
            "source": parts.inputs.sources[place.source].name,
            "row": place.row,
            "epoch": place.epoch,
            "documents": row.documents.tolist(),
        }
        for place, row in zip(batch.places, batch.rows, strict=True)
    ]
    parts.monitor.row(
        {"event": "skip", "step": state.step + 1, "reason": fault, "position": state.position, "rows": rows}
    )


def check_budget(parts: Parts, state: State, fault: str | None) -> None:
    """``UserError`` where the recipe's policy is to stop: at the first fault, or when too many updates were skipped."""
    health = parts.recipe.health
    reason = fault or "fp16's gradients overflow"
    if fault is not None and health.on_spike == "stop":
        problem = f"step {state.step}: {fault}, and health.on_spike is stop"
    elif state.health.skipped_in_row > health.max_consecutive_skips:
        problem = (
            f"step {state.step}: {state.health.skipped_in_row} updates in a row were skipped; in the last, {reason}"
        )
    else:
        return
    finish_saving(parts, state)
    raise UserError(
        problem,
        "The last checkpoint is from before it. Lower optim.learning_rate, or look at the rows that metrics.jsonl names "
        "with `arriero data show`.",
        exit_code=1,
    )


def roll_back(parts: Parts, state: State) -> tuple[Parts, State]:
    """Go back to the newest intact checkpoint and pass over every row taken since, those of the bad step included.

    Deterministic: killed after it and started again, the run meets the same step and goes back in the same way. Where
    there is no checkpoint yet the update was left out, and that is all. ``UserError`` where this is of no help.
    """
    finish_saving(parts, state)
    parts.heart.phase(state.step, "going back", limit_s=LONG_S)
    checkpoint, notes = _on_first(parts.world, lambda: choose_checkpoint(parts.folder.path, "auto"))
    for note in notes:
        parts.monitor.note(note)
    if checkpoint is None:
        parts.monitor.note("there is no checkpoint yet to go back to; the run goes on without that update")
        return parts, state
    saved = State.saved(checkpoint)
    back = replace(
        saved,
        position=state.position,
        passed_over=(*saved.passed_over, (saved.position, state.position)),
        rollbacks=state.rollbacks + 1,
    )
    if back.rollbacks > _MOST_ROLLBACKS:
        raise UserError(
            f"step {state.step}: the run went back to {checkpoint.name} {_MOST_ROLLBACKS} times, and it spiked again",
            "Lower optim.learning_rate, or continue from an older checkpoint (checkpoint.resume_from_checkpoint).",
            exit_code=1,
        )
    inputs = replace(parts.inputs, plan=_plan_from(parts.inputs, back))
    load_state(checkpoint, parts.engine, updates=back.updates)
    load_random_state(checkpoint, parts.world, seed=parts.recipe.train.seed)
    parts.monitor.row(
        {
            "event": "rollback",
            "step": back.step,
            "from_step": state.step,
            "checkpoint": checkpoint.name,
            "passed_over": list(back.passed_over[-1]),
        }
    )
    parts.monitor.row({"event": "resume", "step": back.step, "checkpoint": checkpoint.name})
    return replace(parts, inputs=inputs), back


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
    return replace(state, evaluation=row)


def save(parts: Parts, state: State, *, wait: bool) -> None:
    """Begin a checkpoint, which is written while training goes on; or, with ``wait``, have it complete on return."""
    finish_saving(parts, state)
    epochs = parts.data.mixture.epochs_at(state.position)
    parts.saver.begin(
        step=state.step,
        trainer={
            **asdict(replace(state, rollbacks=0)),
            "precision": parts.recipe.train.precision,
            "compiled": parts.engine.compiled,
            "steps": parts.plan.steps,
            "loss_scale_state": parts.engine.loss_scale_state(),
            "recipe": recipe_yaml(parts.recipe),
            "sources": [{"name": name, "epochs": count} for name, count in epochs.items()],
        },
        data=parts.data.record(state.position),
        probe=_probe(parts),
    )
    if wait:
        finish_saving(parts, state)


def finish_saving(parts: Parts, state: State) -> None:
    """Have the checkpoint that is on its way complete."""
    parts.heart.phase(state.step, "saving", limit_s=LONG_S)
    saved = parts.saver.wait()
    if saved is not None:
        note_saved(parts, state, saved)


def note_saved(parts: Parts, state: State, saved: Saved) -> None:
    """A checkpoint is complete: drop the oldest beyond the limit, and say so."""
    if parts.world.rank == 0:
        try:
            prune(parts.folder.path, parts.recipe.checkpoint.save_total_limit)
        except OSError as error:
            parts.monitor.note(f"an old checkpoint could not be removed: {error}")
    if not saved.copied:
        parts.monitor.note(
            f"training waited {saved.stall_s:.1f} s while {saved.path.name} was written: host memory has no room for a copy "
            "of the state, or it lies on NVMe"
        )
    parts.monitor.checkpoint(saved.step, saved.path.name, saved.seconds, saved.stall_s)
    _status(parts, state, "running", "", None)


def check_isolation(engine: Engine, inputs: Inputs, world: World) -> None:
    """``UserError`` where documents leak into one another.

    Run at every start, on the engine that will train: a kernel, a mask or a cache that undoes isolation gives no
    warning, and the loss falls all the same.
    """
    if not inputs.recipe.data.isolate_documents:
        return
    plan = inputs.plan
    difference = leak(engine, inputs.sources, world, micro_batch=plan.micro_batch, vocab_size=inputs.config.vocab_size)
    if difference:
        raise UserError(
            f"documents leak into one another: changing one moved a later one's loss by {difference:.3g}",
            f"The attention kernel {inputs.recipe.model.attn_implementation} doesn't keep packed documents apart here; "
            "choose another model.attn_implementation, or data.isolate_documents false to train across documents.",
            exit_code=1,
        )


def export(parts: Parts, state: State) -> None:
    """Write ``final/`` from the last checkpoint, on rank 0."""
    parts.heart.phase(state.step, "exporting", limit_s=LONG_S)

    def write() -> None:
        done = export_checkpoint(parts.folder.path / folder_name(state.step), parts.folder, parts.folder.final)
        parts.monitor.note(
            f"exported {format_count(done.parameters)} parameters to {done.path}; its logits match the trained model's "
            + (f"within {done.max_logit_difference:.2g}" if done.max_logit_difference else "exactly")
        )

    _on_first(parts.world, write)


def finish(parts: Parts, state: State, status: str, reason: str, exit_code: int) -> int:
    """Write down how the run ended."""
    _status(parts, state, status, reason, exit_code)
    compare_plan(parts, state)
    parts.monitor.row({"event": "stop", "step": state.step, "status": status, "reason": reason})
    parts.world.barrier()
    return exit_code


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


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


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


def _assemble(
    stack: ExitStack,
    folder: RunFolder,
    inputs: Inputs,
    world: World,
    state: State,
    checkpoint: Path | None,
    overrides: Sequence[str],
    notes: Sequence[str],
    started_s: float,
) -> Parts:
    """Everything that has to stand before the first step."""
    recipe, plan = inputs.recipe, inputs.plan
    # Also a run that ended before its first checkpoint has begun: what it logged is done again.
    begun = folder.metrics.is_file() and folder.metrics.stat().st_size > 0
    raw, origin = read_deepspeed_json(recipe.deepspeed)
    ds_config, more_notes = compile_ds_config(
        recipe,
        raw,
        origin,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        dp=plan.dp,
        hidden_size=inputs.config.hidden_size,
    )
    check_quantizers(ds_config, world)
    title = (
        f"{folder.path.name} · {format_count(plan.parameters)} parameters · "
        f"{format_count(state.tokens + (plan.end - state.position) * plan.seq_len)} tokens · "
        f"{inputs.layout.describe()} · "
        f"ZeRO-{recipe.parallel.zero_stage} · {recipe.train.precision}"
    )
    monitor = stack.enter_context(
        Monitor(
            folder,
            rank=world.rank,
            total_steps=plan.steps,
            title=title,
            tensorboard="tensorboard" in recipe.log.report_to,
            resumed_step=state.step if begun else None,
        )
    )
    heart = stack.enter_context(
        Heartbeat(
            folder.path,
            rank=world.rank,
            size=world.size,
            on_hang=lambda why: _end_hung(folder, world, why),
            address=own_address(),
        )
    )
    for note in [*inputs.notes, *notes, *more_notes]:
        monitor.note(note)
    _on_first(world, lambda: check_space(folder.path, plan.parameters))
    engine = _build_engine(inputs, ds_config, world)
    if checkpoint is not None:
        load_state(checkpoint, engine, updates=state.updates)
        rank_note = load_random_state(checkpoint, world, seed=recipe.train.seed)
        if rank_note:
            monitor.note(rank_note)
        saved = read_json(checkpoint, "trainer_state.json")
        if length_note := length_change(recipe.optim, saved.get("steps", plan.steps), plan.steps, state.updates):
            monitor.note(length_note)
        if not engine.set_loss_scale_state(saved.get("loss_scale_state", {})):
            monitor.note("fp16: the checkpoint holds no loss scale, so it starts from its first value")
    before = read_json(checkpoint, "trainer_state.json").get("compiled") if checkpoint is not None else None
    if told := compile_layers(engine, inputs, world, step=state.step, position=state.position, before=before):
        monitor.note(told)
    if begun:
        monitor.row({"event": "resume", "step": state.step, "checkpoint": checkpoint.name if checkpoint else None})
    check_isolation(engine, inputs, world)
    # Only now: a start that fails before this leaves the folder as it was.
    _on_first(world, lambda: describe_run(folder, inputs, overrides, ds_config))
    stop = stack.enter_context(stop_requests())
    device = rank_device(device_name(), world.local_size)
    peak = None if device is None else device.peak(recipe.train.precision)
    saver = Saver(folder.path, engine, world)
    parts = Parts(folder, inputs, world, engine, monitor, heart, saver, stop, started_s, peak)
    _status(parts, state, "running", "", None)
    return parts


def _build_engine(inputs: Inputs, ds_config: dict[str, Any], world: World) -> Engine:
    recipe = inputs.recipe
    torch.manual_seed(recipe.train.seed + world.rank)
    model = build_model(
        recipe.model,
        inputs.config,
        folder=inputs.folder,
        seed=recipe.train.seed,
        placement=parameter_placement(ds_config),
        gather=gather_parameter,
        keep_part=keep_part(world),
    )
    return Engine(recipe, model, ds_config, world)


def _plan_from(inputs: Inputs, state: State) -> Plan:
    """What is still to do from there by today's recipe and number of ranks."""
    return make_plan(
        inputs.recipe,
        inputs.data,
        inputs.plan.parameters,
        inputs.plan.dp,
        inputs.plan.micro_batch,
        step=state.step,
        position=state.position,
        tokens=state.tokens,
    )


def _choose(folder: RunFolder, recipe: Recipe) -> tuple[Path | None, list[str]]:
    """The checkpoint to continue from, and what a person should be told."""
    notes = check_same_run(folder, recipe)
    checkpoint, more = choose_checkpoint(folder.path, recipe.checkpoint.resume_from_checkpoint)
    return checkpoint, [*notes, *more]


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


def _probe(parts: Parts) -> Tensor:
    """The first tokens of the training data, int64 ``[1, L]``: their logits tell an export from the trained model."""
    ids = parts.inputs.sources[0].training[0].input_ids[:_PROBE_TOKENS]
    return torch.from_numpy(ids)[None].to(parts.world.device)


def _status(parts: Parts, state: State, status: str, reason: str, exit_code: int | None) -> None:
    parts.monitor.status(status=status, reason=reason, step=state.step, tokens=state.tokens, exit_code=exit_code)


def _end_hung(folder: RunFolder, world: World, why: str) -> None:
    """End this rank, and with it the run: its main thread waits for a rank that never comes."""
    if folder.read_state().get("status") == "running":  # the first rank to notice says why
        folder.write_failure(" ".join(line.strip() for line in why.splitlines()[:2]), 1)
    leave_outcome(1, why)
    os._exit(1)


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


def _on_first(world: World, work: Callable[[], Any]) -> Any:
    """Do something on rank 0 and give its result, or its error, to every rank."""
    value: Any = None
    problem: UserError | None = None
    if world.rank == 0:
        try:
            value = work()
        except UserError as error:
            problem = error
        except OSError as error:
            problem = UserError(
                str(error), "Free some space, or look at the disk; the same command goes on.", exit_code=1
            )
    value, problem = world.from_first((value, problem))
    if problem is not None:
        raise problem
    return value
