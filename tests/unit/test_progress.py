"""Progress: the plain lines word for word, a live view on a real pseudo-terminal, and no way into the training loop."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from arriero.monitor import progress as progress_module
from arriero.monitor.progress import Progress, Trend, event_line, sparkline, train_line

ROW: dict[str, object] = {
    "step": 120,
    "loss": 3.4123,
    "learning_rate": 2.9e-3,
    "grad_norm": 0.81,
    "tokens_per_second": 9800.0,
    "step_time_s": 0.5,
    "data_time_s": 0.1,
    "memory_bytes": 1024**3,
    "tokens": 4000,
    "skipped": 0,
}
EVAL: dict[str, object] = {
    "event": "eval",
    "step": 100,
    "eval_loss": 2.1052,
    "eval_perplexity": 8.207,
    "eval_bits_per_byte": 1.98,
}


class Terminal:
    """A pseudo-terminal: ``stream`` is what a program writes to, ``text()`` what the screen was sent."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self._sent = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._sent += os.read(self._master, 65536)
            except OSError:  # the writing end was closed
                return

    def text(self) -> str:
        """Everything so far, without colours and cursor movements; ends the terminal."""
        self.stream.close()
        self._reader.join(5)
        os.close(self._master)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._sent.decode())


@contextmanager
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [1000.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    yield now


def test_training_line() -> None:
    assert train_line(ROW, 400, 72.0) == (
        "step 120/400  loss 3.412  lr 2.9e-03  grad_norm 0.81  9.8k tok/s  eta 1m 12s"
    )


def test_training_line_leaves_out_what_is_unknown_and_says_what_is_wrong() -> None:
    row = {"step": 7, "loss": math.nan, "grad_norm": None, "learning_rate": 1e-4, "skipped": True}
    assert train_line(row, None, None) == "step 7  loss nan  lr 1.0e-04  skipped 1"


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (EVAL, "eval step 100  loss 2.105  perplexity 8.207  bits_per_byte 1.980"),
        (
            {**EVAL, "eval_bits_per_byte/code": 1.5, "eval_bits_per_byte/prose": 2.5},
            "eval step 100  loss 2.105  perplexity 8.207  bits_per_byte 1.980  (code 1.500, prose 2.500)",
        ),
        (
            {"event": "checkpoint", "step": 100, "path": "runs/x/checkpoint-100", "seconds": 0.41},
            "checkpoint step 100  checkpoint-100  in 0.4s",
        ),
        (
            {"event": "resume", "step": 100, "checkpoint": "checkpoint-100", "time": 1.0},
            "resume step 100  from checkpoint-100",
        ),
        (
            {
                "event": "skip",
                "step": 37,
                "reason": "the loss is nan",
                "position": 288,
                "rows": [{"source": "code", "row": row, "epoch": 0, "documents": [1]} for row in range(9)],
            },
            "skip step 37  the loss is nan; its update was left out. Rows: code row 0, code row 1, code row 2, code row 3, "
            "code row 4, code row 5, code row 6, code row 7 …",
        ),
        (
            {
                "event": "rollback",
                "step": 20,
                "from_step": 24,
                "checkpoint": "checkpoint-20",
                "passed_over": [160, 192],
            },
            "rollback step 20  from step 24; rows 160 to 192 are passed over",
        ),
        (
            {
                "event": "plan",
                "step": 40,
                "planned_memory_bytes": 2**30,
                "memory_bytes": 1.5 * 2**30,
                "planned_step_time_s": None,
                "step_time_s": 0.04,
            },
            "plan step 40  memory 1.5 GiB, planned 1.0 GiB (+50%)  time of a step 40 ms",
        ),
        ({"event": "stop", "step": 40, "reason": "max_time"}, "stop step 40  reason max_time"),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else None,
)
def test_event_lines(row: dict[str, object], line: str) -> None:
    assert event_line(row) == line


def test_plain_lines_where_the_stream_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as some batch systems do; rich alone would take this for a terminal
    stream = io.StringIO()
    with clock(monkeypatch) as now, Progress(400, stream=stream, title="runs/x") as progress:
        progress.train_row({**ROW, "step": 100})
        now[0] += 40
        progress.train_row(ROW)
        progress.event(EVAL)
        progress.note("a note")
    assert stream.getvalue().splitlines() == [
        "runs/x",
        "step 100/400  loss 3.412  lr 2.9e-03  grad_norm 0.81  9.8k tok/s  eta 2m 30s",  # 300 steps at step_time_s
        "step 120/400  loss 3.412  lr 2.9e-03  grad_norm 0.81  9.8k tok/s  eta 9m 20s",  # 280 steps at 2 s, measured
        "eval step 100  loss 2.105  perplexity 8.207  bits_per_byte 1.980",
        "a note",
    ]


def test_time_left_follows_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with clock(monkeypatch) as now, Progress(400, stream=stream) as progress:
        for step in (200, 210, 100, 110):
            progress.train_row({"step": step})
            now[0] += 10
    assert [line.partition("eta ")[2] for line in stream.getvalue().splitlines()] == ["", "3m 10s", "", "4m 50s"]


def test_live_view_on_a_terminal() -> None:
    terminal = Terminal()
    with Progress(400, stream=terminal.stream, title="runs/x") as progress:
        assert progress._live is not None
        progress.train_row({**ROW, "mfu": 0.41, "loss/code": 3.0, "loss/prose": 4.0})
        progress.event({**EVAL, "step": 0, "eval_bits_per_byte": 3.61})
        progress.event(EVAL)
        progress.event({"event": "checkpoint", "step": 100, "path": "runs/x/checkpoint-100", "seconds": 0.4})
        progress.note("[bold]not markup[/bold]")
    screen = terminal.text()
    last_view = screen[screen.rindex("runs/x") :]
    for part in (
        "step 120/400",
        "30%",
        "loss     3.412",
        "lr 2.9e-03   grad norm 0.81",
        "9.8k tok/s   0.50 s/step   mfu 41%   waiting for data 20%",
        "memory   1.0 GiB at most   4k tokens taken",
        "code 3.000   prose 4.000",
        "1.980 bits per byte (3.610 at step 0)   loss 2.105   step 100",
        "checkpoint-100   in 0.4s   0s ago",
        "health   every update applied",
    ):
        assert part in last_view
    assert "[bold]not markup[/bold]" in screen.replace(last_view, "")  # above the view, as written
    assert "eval step 100  loss 2.105" in screen
    assert sys.stdout is not None
    assert type(sys.stdout).__name__ != "FileProxy"  # given back


def test_live_view_says_what_was_wrong_and_breaks_lines_between_words() -> None:
    terminal = Terminal()
    with Progress(400, stream=terminal.stream, title="runs/x") as progress:
        progress.train_row({**ROW, "step": 119, "skipped": True})
        progress.event({"event": "skip", "step": 119, "reason": "the loss is nan", "rows": []})
        progress.train_row({**ROW, "skipped": True})
        progress.event({"event": "skip", "step": 120, "reason": "the loss is inf", "rows": []})
        progress.event({"event": "rollback", "step": 100, "from_step": 120, "passed_over": [10, 20]})
        progress.note(" ".join(["packhorse"] * 20))
    screen = terminal.text()
    assert "health   2 steps skipped, 1 rollback; last step 120, the loss is inf" in screen
    assert max(len(line.rstrip()) for line in screen.splitlines()) <= 80
    assert screen.count("packhorse") == 20


def test_live_view_before_the_first_step_and_without_a_length() -> None:
    terminal = Terminal()
    with Progress(None, stream=terminal.stream) as progress:
        time.sleep(0.05)
        progress.train_row(ROW)
    screen = terminal.text()
    assert "waiting for the first step" in screen
    assert "step 120 " in screen
    assert "%" not in screen.replace("data 20%", "")


def test_live_view_says_how_long_nothing_came(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with clock(monkeypatch) as now, Progress(400, stream=terminal.stream) as progress:
        progress.train_row({**ROW, "step": 1})
        now[0] += 1
        progress.train_row({**ROW, "step": 2})
        now[0] += 120
        assert progress._live is not None
        progress._live.refresh()
    assert "last step 2m 00s ago" in terminal.text()


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_no_live_view_on_a_terminal_that_cannot_move_its_cursor(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    terminal = Terminal()
    with Progress(400, stream=terminal.stream) as progress:
        progress.train_row(ROW)
    assert terminal.text().splitlines() == [
        "step 120/400  loss 3.412  lr 2.9e-03  grad_norm 0.81  9.8k tok/s  eta 2m 20s"
    ]


def test_a_broken_live_view_goes_on_in_plain_lines() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)  # can't take the frame's characters
    with Progress(400, stream=stream, live=True) as progress:
        progress.train_row(ROW)
        progress.note("naïve")
    stream.seek(0)
    lines = stream.read().splitlines()
    assert "live view off (UnicodeEncodeError " in lines[-3]
    assert lines[-2].startswith("step 120/400  loss 3.412")
    assert lines[-1] == r"na\xefve"


def test_a_closed_stream_never_raises() -> None:
    stream = io.StringIO()
    with Progress(400, stream=stream, live=False) as progress:
        stream.close()
        progress.train_row(ROW)
        progress.event(EVAL)
        progress.note("text")
    assert progress.problem is not None
    assert "closed file" in progress.problem


def test_a_terminal_that_hangs_up_never_raises() -> None:
    terminal = Terminal()
    with Progress(400, stream=terminal.stream, live=True) as progress:
        os.close(terminal._master)  # every later write is EIO
        progress._drawn_s = -math.inf
        progress.train_row(ROW)
        progress.event(EVAL)
    assert progress._live is None


def test_a_reader_that_leaves_changes_neither_the_run_nor_its_exit_code() -> None:
    script = (
        "import sys, time\n"
        "from arriero.monitor.progress import Progress\n"
        "with Progress(100, title='title') as progress:\n"
        "    for step in range(1, 101):\n"
        "        time.sleep(0.001)\n"
        "        progress.train_row({'step': step, 'loss': 1.0})\n"
        "    print('more')\n"
        "print('finished', progress.problem is not None, file=sys.stderr)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "title\n"
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == "finished True\n"
    child.stderr.close()
    assert child.wait(10) == 0


def test_no_stdout_at_all() -> None:
    script = (
        "import os, sys\n"
        "from arriero.monitor.progress import Progress\n"
        "assert sys.stdout is None\n"
        "with Progress(100, title='title') as progress: progress.train_row({'step': 1})\n"
    )
    subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "$0" >&-', script], check=True)


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([9.0, 4.0, 3.0, 2.0, 2.5, 2.0, 2.25, 2.0]) == "███▁▅▁▃▁"  # 9 and 4 lie above the scale


def test_trend_keeps_the_whole_run_in_24_bars() -> None:
    trend = Trend()
    for step in range(1000):
        trend.add(float(step))
        trend.add(math.nan)
        trend.add(None)
        assert len(trend.values()) <= 25
    bars = trend.values()
    assert len(bars) >= 12
    assert bars == sorted(bars)
    assert bars[0] == pytest.approx(31.5)  # 1000 values: 64 to a bar
    assert bars[1] == pytest.approx(95.5)
