"""``metrics.jsonl``: what a run measured, one flat JSON object a line, appended and never rewritten.

A line without an ``event`` is a training step; ``"event": "eval" | "checkpoint" | "resume" | …`` names the others.
``docs/run-folder.md`` lists the keys.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from arriero.errors import UserError

# How far back the end of the last whole line is looked for at once; a line is a few hundred bytes.
_TAIL_BYTES = 64 * 1024


class MetricsFile:
    """Appends rows to one ``metrics.jsonl``; only rank 0 opens it.

    Every row reaches the kernel as one whole line before ``write`` returns, so SIGKILL costs at most the line that was
    being written. Opening cuts such a torn last line off; ``torn_bytes`` says how many bytes that were (0: none).
    Raises ``UserError`` when the file can't be opened or the disk takes no more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"{path} can't be opened for writing: {error.strerror}", "choose another output_dir"
            ) from error
        self.torn_bytes = _cut_torn_line(self._fd)

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row.

        Values are numbers, booleans, strings, None, or one level of mapping or list of those; numpy's scalars count as
        numbers, anything else is a ``TypeError``. NaN and infinities become null and their keys are listed under
        ``non_finite`` (``epoch/code`` for a nested one). ``time`` (Unix seconds) is filled in where it is missing.
        """
        non_finite: list[str] = []
        plain = {key: _plain(key, value, non_finite) for key, value in row.items()}
        plain.setdefault("time", round(time.time(), 3))
        if non_finite:
            plain["non_finite"] = non_finite
        line = orjson.dumps(plain, option=orjson.OPT_APPEND_NEWLINE)
        start = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
            while written < len(line):  # a nearly full disk takes a part first and then says ENOSPC
                written += os.write(self._fd, line[written:])
        except OSError as error:
            os.ftruncate(self._fd, start)  # half a line in the middle would make the file unreadable for good
            raise UserError(
                f"{self.path} can't be written: {error.strerror}",
                "free some space (arriero checkpoints prune) and run the same command again",
                exit_code=1,
            ) from error

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows in the order they were written, those of abandoned attempts included (see ``latest_by_step``).

    A last line without its newline is one that a kill tore or that a live run is writing, and is left out. Any other
    line that isn't a JSON object raises ``UserError`` with its number.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}", "give a run folder that has trained") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise UserError(
                f"{path}:{number} isn't JSON: {line[:60]!r}", "the file was edited or damaged; remove that line"
            ) from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} isn't a JSON object: {line[:60]!r}", "remove that line")
        rows.append(row)
    return rows


def latest_by_step(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the run as it went in the end: what a curve shows after resumes.

    A resume at step S takes back everything that was recorded for later steps, and of two rows of one kind
    (``event``) for the same step the last one wins. Ordered by step, and within a step as written. Rows without a
    ``step`` are left out.
    """
    kept: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        step = row.get("step")
        if step is None:
            continue
        event = str(row.get("event", "train"))
        if event == "resume":
            kept = {key: old for key, old in kept.items() if key[0] <= step}
        kept.pop((step, event), None)  # so that the winner also takes its place in the order
        kept[step, event] = dict(row)
    return sorted(kept.values(), key=lambda row: int(row["step"]))


def _plain(key: str, value: object, non_finite: list[str]) -> Any:
    """The value as JSON has it; keys of NaN and infinite numbers are added to ``non_finite``."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        non_finite.append(key)
        return None
    if isinstance(value, Mapping):
        return {str(inner): _plain(f"{key}/{inner}", item, non_finite) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{key}/{index}", item, non_finite) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"metrics row: {key} is a {type(value).__name__}, not a number or a text")


def _cut_torn_line(fd: int) -> int:
    """Truncate the file after its last newline; returns how many bytes that removed."""
    size = os.fstat(fd).st_size
    end = size
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return size - end
