"""Everything that has to stand before a run's first step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from arriero.checkpoint.layout import check_space
from arriero.checkpoint.load import choose_checkpoint, load_random_state, load_state
from arriero.checkpoint.save import Saver
from arriero.checkpoint.saved import read_json
from arriero.compiling import compile_layers
from arriero.config.schema import Recipe
from arriero.describe import check_same_run, describe_run
from arriero.engine.engine import (
    Engine,
    check_quantizers,
    gather_parameter,
    keep_part,
    parameter_placement,
)
from arriero.engine.parallel import World, device_name, give_back_freed_memory
from arriero.engine.schedule import length_change
from arriero.errors import UserError
from arriero.isolation import leak
from arriero.launch.environment import own_address
from arriero.launch.local import leave_outcome
from arriero.launch.signals import stop_requests
from arriero.model.build import build_model
from arriero.monitor.heartbeat import Heartbeat
from arriero.monitor.monitor import Monitor
from arriero.planner.calibration import rank_device
from arriero.resolve import Inputs, deepspeed_config
from arriero.run import Parts, State, tell_status
from arriero.run_folder import RunFolder
from arriero.samples import prompt_ids
from arriero.units import format_count


def assemble(
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
    ds_config, more_notes, _ = deepspeed_config(inputs)
    check_quantizers(ds_config, world)
    monitor = stack.enter_context(
        Monitor(
            folder,
            rank=world.rank,
            total_steps=plan.steps,
            title=_title(folder, inputs, state),
            report_to=recipe.log.report_to,
            config=recipe.model_dump(mode="json"),
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
    world.on_first(lambda: check_space(folder.path, plan.parameters))
    prompt_ids(inputs)  # what is wrong with them is said now and not at their first step
    engine = _build_engine(inputs, ds_config, world)
    before = None
    if checkpoint is not None:
        for note in _restore(checkpoint, engine, inputs, world, state):
            monitor.note(note)
        before = read_json(checkpoint, "trainer_state.json").get("compiled")
    if told := compile_layers(engine, inputs, world, step=state.step, position=state.position, before=before):
        monitor.note(told)
    if begun:
        monitor.row({"event": "resume", "step": state.step, "checkpoint": checkpoint.name if checkpoint else None})
    check_isolation(engine, inputs, world)
    give_back_freed_memory()
    # Only now: a start that fails before this leaves the folder as it was.
    world.on_first(lambda: describe_run(folder, inputs, overrides, ds_config))
    stop = stack.enter_context(stop_requests())
    device = rank_device(device_name(), world.local_size)
    peak = None if device is None else device.peak(recipe.train.precision)
    saver = Saver(folder.path, engine, world)
    parts = Parts(folder, inputs, world, engine, monitor, heart, saver, stop, started_s, peak)
    tell_status(parts, state, "running", "", None)
    return parts


def _title(folder: RunFolder, inputs: Inputs, state: State) -> str:
    plan, recipe = inputs.plan, inputs.recipe
    return (
        f"{folder.path.name} · {format_count(plan.parameters)} parameters · "
        f"{format_count(state.tokens + (plan.end - state.position) * plan.seq_len)} tokens · "
        f"{inputs.layout.describe()} · "
        f"ZeRO-{recipe.parallel.zero_stage} · {recipe.train.precision}"
    )


def _restore(checkpoint: Path, engine: Engine, inputs: Inputs, world: World, state: State) -> list[str]:
    """Put a checkpoint's weights, optimizer and random states in place; what a person should be told of it."""
    recipe, plan = inputs.recipe, inputs.plan
    load_state(checkpoint, engine, updates=state.updates)
    saved = read_json(checkpoint, "trainer_state.json")
    notes = [
        load_random_state(checkpoint, world, seed=recipe.train.seed),
        length_change(recipe.optim, saved.get("steps", plan.steps), plan.steps, state.updates),
    ]
    if not engine.set_loss_scale_state(saved.get("loss_scale_state", {})):
        notes.append("fp16: the checkpoint holds no loss scale, so it starts from its first value")
    return [note for note in notes if note]


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


def choose(folder: RunFolder, recipe: Recipe) -> tuple[Path | None, list[str]]:
    """The checkpoint to continue from, and what a person should be told."""
    notes = check_same_run(folder, recipe)
    checkpoint, more = choose_checkpoint(folder.path, recipe.checkpoint.resume_from_checkpoint)
    return checkpoint, [*notes, *more]


def _end_hung(folder: RunFolder, world: World, why: str) -> None:
    """End this rank, and with it the run: its main thread waits for a rank that never comes."""
    if folder.read_state().get("status") == "running":  # the first rank to notice says why
        folder.write_failure(" ".join(line.strip() for line in why.splitlines()[:2]), 1)
    leave_outcome(1, why)
    os._exit(1)
