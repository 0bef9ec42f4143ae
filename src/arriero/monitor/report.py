"""``report.html``: one page with what a run, or several side by side, has to show; it loads nothing from anywhere.

The page is ``page/report.html`` with its style and script put in, and the runs as JSON. ``docs/report.md`` says what
it shows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from arriero.__version__ import __version__
from arriero.config.load import differing_keys
from arriero.errors import UserError
from arriero.monitor.record import NOT_FINITE, Columns, Record, read_record
from arriero.run_folder import RunFolder, replace_text

# A page stays below 2 MB: what mail takes, and what a browser opens at once.
MOST_BYTES = 1_900_000
# Rows of curves kept at first, over all runs: four for each pixel of a wide screen.
_KEEP = 8000
_KEEP_LEAST = 100
_MOST_EVENTS = 600
_PAGE = Path(__file__).with_name("page")
# The most telling events first.
_RANK_OF_EVENT = ("rollback", "resume", "stop", "skip", "overflow", "eval", "checkpoint")
# Where an extreme says nothing that the rows around it, or another key, don't.
_SMOOTH = {"step", "hours", "tokens", "learning_rate", "step_time_s", "mfu", "memory_bytes", "loss_scale"}


@dataclass(frozen=True)
class Report:
    """What was written."""

    path: Path
    size_bytes: int
    rows: int
    """Logged steps of all runs."""
    rows_shown: int


def write_report(folders: Sequence[Path], out: Path | None = None) -> Report:
    """Write one page about these run folders, by default ``report.html`` in the first.

    Raises ``UserError`` where a folder isn't a run's, ``metrics.jsonl`` is damaged, or the page can't be written.
    """
    data = page_data(read_records(folders))
    path = RunFolder(folders[0]).report if out is None else out
    html = page(data)
    try:
        replace_text(path, html)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}", "Give another place: --out FILE.") from error
    runs = data["runs"]
    return Report(
        path, len(html.encode()), sum(run["figures"]["rows"] for run in runs), sum(run["rows_shown"] for run in runs)
    )


def read_records(folders: Sequence[Path]) -> list[Record]:
    """The runs in the order given, with names that tell them apart."""
    return [read_record(folder) for folder in folders]


def page_data(records: Sequence[Record], *, live: bool = False) -> dict[str, Any]:
    """What the page shows, as plain JSON of at most 1.9 MB; ``rows_shown`` says how many rows of the curves are left.

    live: the page asks for newer data every few seconds.
    """
    keep = _KEEP
    while True:
        each = max(_KEEP_LEAST, keep // len(records))
        data = {
            "version": __version__,
            "made": round(time.time(), 3),
            "live": live,
            "runs": [_run(record, name, each) for record, name in zip(records, _names(records), strict=True)],
            "differences": _differences(records),
        }
        size_bytes = len(orjson.dumps(data)) + _page_bytes()
        if each == _KEEP_LEAST or size_bytes <= MOST_BYTES:
            return data
        keep = min(keep * MOST_BYTES // size_bytes, keep * 9 // 10)


def page(data: dict[str, Any]) -> str:
    """The page with its data; ``<`` is spelled so that no text in it can end the script element."""
    html = (_PAGE / "report.html").read_text(encoding="utf-8")
    for name in ("report.css", "charts.js", "report.js"):
        html = html.replace(f"/* {name} */", (_PAGE / name).read_text(encoding="utf-8"))
    return html.replace("{{data}}", orjson.dumps(data).decode().replace("<", "\\u003c"))


def _page_bytes() -> int:
    return sum(path.stat().st_size for path in _PAGE.iterdir())


def _names(records: Sequence[Record]) -> list[str]:
    names = [record.name for record in records]
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, start=1)]


def _run(record: Record, name: str, keep: int) -> dict[str, Any]:
    value = dict(vars(record))
    events = record.events
    if len(events) > _MOST_EVENTS:
        # Python's sort is stable: the earliest of a kind stay.
        order = sorted(range(len(events)), key=lambda number: _rank(events[number]["kind"]))
        events = [events[number] for number in sorted(order[:_MOST_EVENTS])]
    training = thin(record.training, keep)
    weights = {
        str(source.get("name") or Path(str(source.get("path"))).name): source.get("weight")
        for source in (record.recipe.get("data") or {}).get("sources") or []
    }
    del value["recipe"]
    return value | {
        "name": name,
        "training": training,
        "evaluation": thin(record.evaluation, max(_KEEP_LEAST, keep // 4)),
        "taken_back": thin(record.taken_back, max(_KEEP_LEAST, keep // 8)),
        "rows_shown": len(training.get("step", [])),
        "events": events,
        "events_total": len(record.events),
        "weights": weights,
        "max_grad_norm": (record.recipe.get("optim") or {}).get("max_grad_norm"),
        "max_steps": (record.recipe.get("train") or {}).get("max_steps"),
    }


def _rank(kind: str) -> int:
    return _RANK_OF_EVENT.index(kind) if kind in _RANK_OF_EVENT else len(_RANK_OF_EVENT)


def thin(columns: Columns, keep: int) -> Columns:
    """About ``keep`` rows at most, the same of every column, none of them changed.

    The rows are cut into equal parts; of each part stay its first row and those with the lowest and the highest number, and
    the first that isn't finite, of each column that swings. The last row stays too.
    """
    count = len(next(iter(columns.values()), []))
    if count <= keep:
        return columns
    parts = keep // 2
    rows = _telling(columns, count, parts)
    while len(rows) > keep and parts > 1:
        parts = max(1, min(parts - 1, parts * keep // len(rows)))
        rows = _telling(columns, count, parts)
    return {key: [column[row] for row in rows] for key, column in columns.items()}


def _telling(columns: Columns, count: int, parts: int) -> list[int]:
    swinging = [column for key, column in columns.items() if key.partition("/")[0] not in _SMOOTH | {"epoch"}]
    bounds = [count * part // parts for part in range(parts + 1)]
    chosen = {*bounds[:-1], count - 1}
    for column in swinging:
        for start, stop in pairwise(bounds):
            cells = column[start:stop]
            numbers = [cell for cell in cells if isinstance(cell, int | float)]
            if numbers:
                chosen |= {start + cells.index(min(numbers)), start + cells.index(max(numbers))}
            if NOT_FINITE in cells:
                chosen.add(start + cells.index(NOT_FINITE))
    breaks = {row for row, step in enumerate(columns.get("step", [])) if step is None}
    return sorted(chosen | breaks)


def _differences(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The keys of recipe and environment in which the runs differ, each with a value per run."""
    described = [{**record.recipe, "environment": record.environment} for record in records]
    values: dict[str, list[Any]] = {}
    for number, other in enumerate(described[1:], start=1):
        for path, first, its in differing_keys(described[0], other):
            values.setdefault(path, [first] * len(described))[number] = its
    values.pop("output_dir", None)  # differs always
    return [{"key": path, "values": each} for path, each in values.items()]
