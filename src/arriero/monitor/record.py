"""What a run folder says of its run, gathered for a report: curves, events, figures, samples of text, recipe.

Nothing is read but the folder, so it may have been copied to a laptop; a file that is missing or damaged is named and
leaves its part out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from arriero.config.load import parse_yaml
from arriero.errors import UserError
from arriero.monitor.metrics import latest_by_step, read_metrics
from arriero.run_folder import RunFolder

Cell = float | str | None
"""A number of ``metrics.jsonl``; ``NOT_FINITE``; None where a row doesn't have the key."""
Columns = dict[str, list[Cell]]
NOT_FINITE = "nan"

# Of the keys of a training row these have no curve: they are an axis, or another key says it.
_NO_CURVE = {"time", "event", "non_finite", "position", "target_tokens", "skipped", "seconds"}
_X = ("step", "hours", "tokens")
_NAMED_ROWS = 4
# What a page of two megabytes can carry beside the curves.
_SAMPLE_STEPS, _SAMPLES_OF_STEP, _SAMPLE_CHARACTERS = 12, 16, 3000


@dataclass(frozen=True)
class Record:
    """A run as its folder tells it; everything in it is plain JSON."""

    name: str
    training: Columns
    """A column per key, all of one length: a row per logged step that counts, in their order."""
    evaluation: Columns
    taken_back: Columns
    """Training rows that a later resume took back; a row of None parts one attempt from the next."""
    events: list[dict[str, Any]]
    """Everything else in ``metrics.jsonl``, as written, skipped steps without an event of their own included."""
    figures: dict[str, Any]
    """What the whole run comes to: first and last loss, medians, peaks, counts."""
    plans: list[dict[str, Any]]
    state: dict[str, Any]
    config: str
    recipe: dict[str, Any]
    overrides: list[str]
    environment: dict[str, Any]
    ds_config: dict[str, Any]
    samples: list[dict[str, Any]]
    sample_steps: int
    missing: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def read_record(path: Path) -> Record:
    """Read a run folder, of a finished run or of one that goes on.

    Raises ``UserError`` where the folder isn't one, or a line of ``metrics.jsonl`` is damaged.
    """
    run = RunFolder(path)
    if not run.config.is_file() and not run.metrics.is_file():
        raise UserError(
            f"{path} is no run folder: it has neither config.yaml nor metrics.jsonl", "Give a run's output_dir."
        )
    files = _Files(path)
    raw = read_metrics(run.metrics) if run.metrics.is_file() else []
    if not run.metrics.is_file():
        files.missing.append("metrics.jsonl")
    written = _with_hours(raw)
    counted = latest_by_step(written)
    training = [row for row in counted if "event" not in row]
    evaluation = [row for row in counted if row.get("event") == "eval"]
    events = _events(written)
    config = files.text("config.yaml")
    samples, sample_steps = _samples(path, files)
    return Record(
        name=path.resolve().name,
        training=_columns(training),
        evaluation=_columns(evaluation),
        taken_back=_columns(_lost(written)),
        events=events,
        figures=_figures(training, evaluation, events, written),
        plans=[_plain_keys(row) for row in written if row.get("event") == "plan"],
        state=files.parsed("run_state.json", json.loads),
        config=config,
        recipe=files.parsed("config.yaml", parse_yaml) if config else {},
        overrides=[line for line in files.text("overrides.txt").splitlines() if line],
        environment=files.parsed("environment.json", json.loads),
        ds_config=files.parsed("ds_config.json", json.loads),
        samples=samples,
        sample_steps=sample_steps,
        missing=files.missing,
        damaged=files.damaged,
    )


class _Files:
    """Reads a run folder's small files and remembers which could not be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.missing: list[str] = []
        self.damaged: list[str] = []

    def text(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            self.missing.append(name)
        except (OSError, UnicodeDecodeError):
            self.damaged.append(name)
        return ""

    def parsed(self, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        text = self.text(name) if name not in self.missing else ""
        try:
            value = parse(text) if text else {}
        except (ValueError, UserError):
            value = None
        if isinstance(value, dict):
            return value
        self.damaged.append(name)
        return {}


def _with_hours(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each row with ``hours`` since the first, pauses between two starts of the run left out."""
    timed: list[dict[str, Any]] = []
    began: float | None = None
    before = paused = hours = 0.0
    for row in rows:
        now = row.get("time")
        if isinstance(now, int | float):
            began = now if began is None else began
            if row.get("event") == "resume" and timed:
                paused += max(0.0, now - before)
            before = now
            hours = max(hours, (now - began - paused) / 3600)  # a clock may be set back
        timed.append({**row, "hours": round(hours, 6)})
    return timed


def _taken_back(rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Of each row, whether a later resume goes back to before its step."""
    flags, resumed = [], float("inf")
    for row in reversed(rows):
        step = row.get("step")
        flags.append(isinstance(step, int) and step > resumed)
        if row.get("event") == "resume" and isinstance(step, int):
            resumed = min(resumed, step)
    return flags[::-1]


def _lost(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    lost: list[dict[str, Any]] = []
    for row, back in zip(rows, _taken_back(rows), strict=True):
        if back and "event" not in row:
            lost.append({key: row.get(key) for key in (*_X, "loss", "non_finite")})
        elif row.get("event") == "resume" and lost and lost[-1]["step"] is not None:
            lost.append(dict.fromkeys((*_X, "loss")))
    return lost[:-1] if lost and lost[-1]["step"] is None else lost


def _columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """A column for each key with a number: those per source as ``key/source``."""
    flat = [_flat(row) for row in rows]
    keys = dict.fromkeys(key for row in flat for key in row)
    return {key: [row.get(key) for row in flat] for key in keys}


def _flat(row: Mapping[str, Any]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for key, value in row.items():
        if key in _NO_CURVE or key.startswith("target_tokens/"):
            continue
        if isinstance(value, dict):
            cells |= {f"{key}/{inner}": item for inner, item in value.items() if _is_number(item)}
        elif _is_number(value):
            cells[key] = value
    for key in row.get("non_finite") or ():
        if str(key).partition("/")[0] not in _NO_CURVE:
            cells[str(key)] = NOT_FINITE
    return cells


def _is_number(value: object) -> bool:
    return type(value) in (int, float)  # what JSON has; isinstance(…, Real) took a third of a long run's reading


def _events(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    told = {(row.get("step"), row.get("event")) for row in rows if row.get("event") == "skip"}
    events = []
    for row, back in zip(rows, _taken_back(rows), strict=True):
        kind = row.get("event")
        if kind is None:
            # fp16's overflows have no event: nothing is wrong with their rows.
            if row.get("skipped") and (row.get("step"), "skip") not in told:
                events.append(_event(row, "overflow", back))
        elif kind != "plan":
            events.append(_event(row, str(kind), back))
    return events


def _event(row: Mapping[str, Any], kind: str, back: bool) -> dict[str, Any]:
    event = {key: row.get(key) for key in ("step", "time", "hours")} | {"kind": kind}
    if back:
        event["taken_back"] = True
    if kind == "overflow":
        return event | {"loss_scale": row.get("loss_scale")}
    kept = {key: value for key, value in row.items() if key not in ("event", "step", "time", "hours", "rows")}
    if kind == "skip":
        places = row.get("rows") or []
        kept["row_count"] = len(places)
        kept["named"] = [f"{place.get('source')} {place.get('row')}" for place in places[:_NAMED_ROWS]]
    return event | kept


def _plain_keys(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("event", "time", "hours")}


def _figures(
    training: Sequence[Mapping[str, Any]],
    evaluation: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    written: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    def numbers(key: str, rows: Sequence[Mapping[str, Any]] = training) -> list[float]:
        return [row[key] for row in rows if _is_number(row.get(key))]

    losses = numbers("loss")
    best = min((row for row in evaluation if _is_number(row.get("eval_loss"))), key=_eval_loss, default=None)
    kinds = Counter(event["kind"] for event in events)
    figures: dict[str, Any] = {
        "rows": len(training),
        "step": max((row["step"] for row in (*training, *evaluation)), default=0),
        "tokens": max(numbers("tokens"), default=0),
        "hours": written[-1]["hours"] if written else 0.0,
        "began": written[0].get("time") if written else None,
        "last": written[-1].get("time") if written else None,
        "first_loss": losses[0] if losses else None,
        "loss": losses[-1] if losses else None,
        "peak_memory_bytes": max(numbers("memory_bytes"), default=None),
        "not_finite": sum("loss" in (row.get("non_finite") or ()) for row in training),
        "first_eval": _evaluation(evaluation[0]) if evaluation else None,
        "eval": _evaluation(evaluation[-1]) if evaluation else None,
        "best_eval": _evaluation(best) if best else None,
        "epochs": dict(training[-1].get("epoch") or {}) if training else {},
        "skipped": kinds["skip"] + kinds["overflow"],
        "rollbacks": kinds["rollback"],
        "resumes": kinds["resume"] - kinds["rollback"],  # each rollback writes one too
    }
    for key in ("tokens_per_second", "step_time_s", "data_time_s", "mfu"):
        # The first row of a run may have compiled, and its last step may be short.
        middle = numbers(key, training[1:-1] if len(training) > 3 else training)
        figures[key] = median(middle) if middle else None
    return figures


def _eval_loss(row: Mapping[str, Any]) -> float:
    return float(row["eval_loss"])


def _evaluation(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key == "step" or key.startswith("eval_")}


def _samples(folder: Path, files: _Files) -> tuple[list[dict[str, Any]], int]:
    """The texts of ``samples/*.jsonl``, newest step first, and how many steps have some.

    Of two for one step and prompt the last one counts, as in ``metrics.jsonl``. Long ones are cut, and only the newest
    steps kept: they say how many there are.
    """
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("samples/*.jsonl")):
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError):
            files.damaged.append(f"samples/{path.name}")
            continue
        for line in filter(None, lines[:-1]):  # what has no newline yet is being written
            try:
                one = json.loads(line)
                place, text = (int(one["step"]), str(one["prompt"])), str(one["text"])
            except (ValueError, TypeError, KeyError):
                files.damaged.append(f"samples/{path.name}")
                break
            found.pop(place, None)
            found[place] = {"step": place[0], "prompt": place[1], "text": text[:_SAMPLE_CHARACTERS]}
            if len(text) > _SAMPLE_CHARACTERS:
                found[place]["characters"] = len(text)
    steps = sorted({step for step, _ in found}, reverse=True)
    kept = [
        one
        for step in steps[:_SAMPLE_STEPS]
        for one in [sample for (its, _), sample in found.items() if its == step][:_SAMPLES_OF_STEP]
    ]
    return kept, len(steps)
