"""What a run has done with its data, from its folder alone: no model, no ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arriero.checkpoint.layout import list_checkpoints, step_of, verify
from arriero.checkpoint.saved import read_json
from arriero.config.load import check_recipe, parse_yaml
from arriero.data.loader import TrainingData, open_sources
from arriero.data.seen import Seen, find_document, positions_of_rows, rows_of_document, seen_by_source
from arriero.errors import UserError
from arriero.monitor.metrics import latest_by_step, read_metrics
from arriero.run_folder import RunFolder


@dataclass(frozen=True)
class History:
    """A run as it stood after one step."""

    step: int
    position: int
    data: TrainingData
    sources: dict[str, Seen]
    ends: list[tuple[int, int]]
    """(step, position after it) of the steps that were logged, ascending."""
    batch: int
    """Rows of a step."""
    passed_over: list[tuple[int, int]]
    """Positions [start, stop) whose rows a rollback left out: taken, and never trained on."""


def open_history(path: Path, step: int | None) -> History:
    """The state of a run's data after ``step`` (None: its newest checkpoint).

    Raises ``UserError`` where no checkpoint reaches that step, the step wasn't logged, or the data has changed since.
    """
    run = RunFolder(path)
    if not run.config.is_file():
        raise UserError(f"{path} is no run folder: it has no config.yaml")
    ends = [(row["step"], row["position"]) for row in latest_by_step(read_metrics(run.metrics)) if "position" in row]
    checkpoints = [c for c in list_checkpoints(path) if verify(c, content=False).intact]
    if not checkpoints:
        raise UserError(f"{path} holds no whole checkpoint yet", "What a run has taken is in its checkpoints.")
    wanted = step_of(checkpoints[-1]) if step is None else step
    checkpoint = next((c for c in checkpoints if step_of(c) >= wanted), None)
    if checkpoint is None:
        raise UserError(f"the newest checkpoint of {path} is of step {step_of(checkpoints[-1])}, before {wanted}")
    record, saved = read_json(checkpoint, "data_state.json"), read_json(checkpoint, "trainer_state.json")
    # The recipe of then: today's may have another mixture or seq_len.
    recipe = check_recipe(parse_yaml(saved["recipe"]), f"{checkpoint}/trainer_state.json")
    position = record["position"] if step_of(checkpoint) == wanted else dict(ends).get(wanted)
    if position is None or position < record["start"]["position"]:
        raise UserError(
            f"where step {wanted} ended isn't known: it was not logged, or the mixture was edited after it",
            "Ask for a step in metrics.jsonl, or one with a checkpoint.",
        )
    data = TrainingData.continued(open_sources(recipe.data), seed=recipe.train.seed, record=record)
    passed_over = [(start, min(stop, position)) for start, stop in saved["passed_over"] if start < position]
    seen = seen_by_source(data, position)
    return History(wanted, position, data, seen, ends, recipe.train.global_batch_size, passed_over)


def document_history(history: History, document: str) -> list[dict[str, Any]]:
    """Every time that a document (``FILE:ROW``) came, in order: source, epoch, position, and the step where it is known.

    Where the mixture was edited, from that edit on; without what a rollback passed over.
    """
    file, separator, row = document.rpartition(":")
    if not separator or not row.isdigit():
        raise UserError(f"--document {document}: expected FILE:ROW, e.g. corpus/a.jsonl:17")
    found, missing = [], []
    for number, source in enumerate(history.data.sources):
        try:
            place = find_document(source, file, int(row))
        except UserError as error:
            missing.append(error)
            continue
        if place is None:
            raise UserError(f"{document} is held out for validation in {source.name}: it is never trained on")
        rows = rows_of_document(source.training, place)
        for position, epoch in positions_of_rows(history.data, number, rows, history.position):
            if any(start <= position < stop for start, stop in history.passed_over):
                continue
            step = _step_of(history, position)
            found.append({"source": source.name, "epoch": epoch, "position": position, "step": step})
    if len(missing) == len(history.data.sources):
        raise missing[0]
    return sorted(found, key=lambda one: one["position"])


def _step_of(history: History, position: int) -> int | None:
    """The step that took a position; None where it lies between two logged steps of another batch size."""
    before, begin = 0, 0
    for step, end in history.ends:
        if position < end:
            full = (step - before - 1) * history.batch < end - begin <= (step - before) * history.batch
            if step - before > 1 and not full:
                return None
            return before + 1 + (position - begin) // history.batch if step - before > 1 else step
        before, begin = step, end
    return None
