"""What happens to a step whose numbers are wrong: named, counted, gone back from."""

from __future__ import annotations

from dataclasses import replace

from arriero.checkpoint.load import choose_checkpoint, load_random_state, load_state
from arriero.errors import UserError
from arriero.monitor.heartbeat import LONG_S
from arriero.resolve import Inputs, Plan, make_plan
from arriero.run import Parts, State
from arriero.saving import finish_saving

# Going back to the same checkpoint more often than this changes nothing but the rows.
_MOST_ROLLBACKS = 3


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
    checkpoint, notes = parts.world.on_first(lambda: choose_checkpoint(parts.folder.path, "auto"))
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
