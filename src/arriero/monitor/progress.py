"""What a person sees of a run on rank 0: a live view on a terminal, one plain line per logged step elsewhere.

Rows are those of ``metrics.jsonl``. A missing value, an odd terminal or a closed pipe never reaches the training loop.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from arriero.units import format_bytes, format_count, format_time

Row = Mapping[str, object]

_BLOCKS = "▁▂▃▄▅▆▇█"
_TREND_BARS = 12  # to 24: what fits beside loss, rate and norm on 80 columns
_RATE_WINDOW = 20  # logged steps behind the time left: long enough to average an evaluation in
_REFRESH_PER_SECOND = 2  # one takes 1 ms of this rank's interpreter
_MAX_WIDTH = 100


class Progress:
    """Shows rows as they come; use it as a context manager.

    ``total_steps`` is None where the length isn't known. ``live`` forces the live view on or off (None: on where
    ``stream`` is a Unicode terminal that can move its cursor). If the live view breaks, one line says so and plain lines
    follow; if the stream itself is gone, ``problem`` says why and nothing more is written.
    """

    def __init__(
        self, total_steps: int | None, *, stream: TextIO | None = None, live: bool | None = None, title: str = ""
    ) -> None:
        self.total_steps = total_steps
        self.title = title
        self.problem: str | None = None
        self._stream: TextIO | None = sys.stdout if stream is None else stream  # None where stdout is closed (>&-)
        self._wants_live = live
        self._live: Live | None = None
        self._console: Console | None = None
        self._started_s = time.monotonic()
        self._drawn_s = -math.inf
        self._times: deque[tuple[int, float]] = deque(maxlen=_RATE_WINDOW)
        self._row: Row | None = None
        self._trend = Trend()
        self._first_eval: Row | None = None
        self._last_eval: Row | None = None
        self._last_checkpoint: Row | None = None
        self._saved_s = 0.0
        self._skipped = self._rollbacks = 0
        self._fault = ""

    def __enter__(self) -> Self:
        self._started_s = time.monotonic()
        if self._wants_live if self._wants_live is not None else _can_show_live(self._stream):
            self._try_live(self._start_live)
        if self._live is None and self.title:
            self.note(self.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def train_row(self, row: Row) -> None:
        """Show a training row: a plain line, or the live view's numbers."""
        step = _int(row.get("step"))
        now_s = time.monotonic()
        if self._times and step <= self._times[-1][0]:
            self._times.clear()  # rolled back: the old pace would be counted against a smaller step
        self._times.append((step, now_s))
        self._row = row
        self._trend.add(row.get("loss"))
        if row.get("skipped"):
            self._skipped += 1
            self._fault = f"step {step}"
        if self._live is not None and self._try_live(lambda: self._draw(now_s)):
            return
        self._print(train_line(row, self.total_steps, self._left_s()))

    def event(self, row: Row) -> None:
        """Show a row that has an ``event``: eval, checkpoint, resume, skip, stop or any other."""
        kind = row.get("event")
        if kind == "eval":
            self._first_eval = self._first_eval or row
            self._last_eval = row
        elif kind == "skip":
            self._fault = f"step {_int(row.get('step'))}, {row.get('reason')}"
        elif kind == "rollback":
            self._rollbacks += 1
        elif kind == "checkpoint":
            self._last_checkpoint, self._saved_s = row, time.monotonic()
            if self._live is not None:
                return  # the view shows the last one, and a line each would push everything else away
        self.note(event_line(row))

    def note(self, text: str) -> None:
        """Print a line, above the live view where there is one."""
        console = self._console
        if (
            self._live is not None
            and console is not None
            and self._try_live(lambda: console.print(text, markup=False, highlight=False))
        ):
            return
        self._print(text)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back; closing twice is allowed."""
        if self._live is not None and self._try_live(self._live.stop):
            self._live = None

    def _draw(self, now_s: float) -> None:
        """Refresh, but not for each of a hundred steps a second. rich's own thread keeps the clock going between rows;
        drawing from here as well is how a terminal that went away is noticed."""
        if self._live is not None and now_s - self._drawn_s >= 1 / _REFRESH_PER_SECOND:
            self._drawn_s = now_s
            self._live.refresh()

    def _start_live(self) -> None:
        self._console = Console(file=self._stream, force_terminal=True)
        live = Live(
            get_renderable=self._view,
            console=self._console,
            refresh_per_second=_REFRESH_PER_SECOND,
            # Prints of this process go above the view, but only those that went to a terminal anyway.
            redirect_stdout=_is_tty(sys.stdout),
            redirect_stderr=_is_tty(sys.stderr),
        )
        self._live = live
        live.start(refresh=True)

    def _try_live(self, action: Callable[[], object]) -> bool:
        """Run something on the live view; if that fails, whatever it is, go on in plain lines."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a terminal can fail in any way, and training matters more
            live, self._live = self._live, None
            if live is not None:
                with suppress(Exception):
                    live.stop()
            reason = " ".join([type(error).__name__, *str(error).splitlines()[:1]])
            self._print(f"live view off ({reason}); plain lines from here")
            return False
        return True

    def _print(self, line: str) -> None:
        if self.problem is not None or self._stream is None:
            return
        try:
            try:
                self._stream.write(f"{line}\n")
            except UnicodeEncodeError:
                self._stream.write(f"{line.encode('ascii', 'backslashreplace').decode()}\n")
            self._stream.flush()
        except (OSError, ValueError) as error:  # a closed pipe, a terminal that hung up, a closed file
            self.problem = f"progress is no longer shown: {error}"
            # What Python could not flush it would try again at exit, and turn the run's exit code into 120.
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def _left_s(self) -> float | None:
        """Seconds to the last step at the recent pace, pauses for evaluation and checkpoints included."""
        if self.total_steps is None or self._row is None or not self._times:
            return None
        (first_step, first_s), (step, last_s) = self._times[0], self._times[-1]
        if step > first_step:
            pace_s: float | None = (last_s - first_s) / (step - first_step)
        else:
            pace_s = _number(self._row.get("step_time_s"))
        return None if pace_s is None else max(0, self.total_steps - step) * pace_s

    def _view(self) -> RenderableType:
        """The live view; runs on rich's refresh thread, so it only reads."""
        try:
            return self._panel(time.monotonic())
        except Exception as error:  # noqa: BLE001 - would end the refresh thread with a traceback across the screen
            return Text(f"{self.title}  (the view can't be drawn: {type(error).__name__}: {error})")

    def _panel(self, now_s: float) -> RenderableType:
        row, width = self._row, min(self._console.width if self._console else 80, _MAX_WIDTH)
        lines: list[RenderableType] = [self._bar(row, now_s)]
        details = Table.grid(padding=(0, 2, 0, 0))
        details.add_column(style="dim", no_wrap=True, min_width=len("sources"))
        details.add_column(no_wrap=True, overflow="ellipsis")
        if row is not None:
            details.add_row("loss", self._loss_text(row))
            details.add_row("speed", _speed_text(row))
            details.add_row("memory", _memory_text(row))
            if sources := _per_source(row, "loss"):
                details.add_row("sources", "   ".join(f"{name} {_loss(loss)}" for name, loss in sources))
        if self._last_eval is not None:
            details.add_row("eval", _eval_text(self._last_eval, self._first_eval))
        if self._last_checkpoint is not None:
            ago = f"{format_time(now_s - self._saved_s)} ago"
            details.add_row("saved", "   ".join([*_checkpoint_words(self._last_checkpoint), ago]))
        if row is not None:
            details.add_row("health", self._health_text())
        if details.row_count:
            lines.append(details)
        return Panel(
            Group(*lines),
            title=Text(self.title, style="bold") if self.title else None,
            title_align="left",
            subtitle=Text(format_time(now_s - self._started_s), style="dim"),
            subtitle_align="right",
            border_style="cyan",
            width=width,
        )

    def _bar(self, row: Row | None, now_s: float) -> RenderableType:
        if row is None:
            return Text(f"waiting for the first step  {format_time(now_s - self._started_s)}", style="yellow")
        step, since_s = _int(row.get("step")), now_s - self._times[-1][1]
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(no_wrap=True)
        if self.total_steps:
            grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        left_s = self._left_s()
        words = [] if left_s is None else [f"{format_time(max(0.0, left_s - since_s))} left"]
        if self.total_steps:
            words = [f"{100 * step // self.total_steps}%", *words] if step < self.total_steps else ["done"]
        status = Text("  ".join(words))
        if step != self.total_steps and since_s > max(30.0, 5 * self._interval_s()):
            status = Text(f"last step {format_time(since_s)} ago", style="yellow")
        title = Text(f"step {_of(step, self.total_steps)}", style="bold")
        if self.total_steps:
            grid.add_row(title, ProgressBar(total=self.total_steps, completed=step), status)
        else:
            grid.add_row(title, status)
        return grid

    def _interval_s(self) -> float:
        """Seconds between the last two training rows."""
        return self._times[-1][1] - self._times[-2][1] if len(self._times) > 1 else 0.0

    def _loss_text(self, row: Row) -> Text:
        loss = _number(row.get("loss"))
        text = Text(_loss(loss), style="bold" if loss is None or math.isfinite(loss) else "bold red")
        text.append(f"  {sparkline(self._trend.values())}", style="not bold cyan")
        rest = [
            ("lr", row.get("learning_rate"), _rate),
            ("grad norm", row.get("grad_norm"), _short),
        ]
        for label, value, spell in rest:
            number = _number(value)
            if number is not None:
                text.append(f"   {label} ", style="not bold dim")
                text.append(spell(number), style="not bold")
        return text

    def _health_text(self) -> Text:
        """Of this start: skipped steps, rollbacks, and what was last wrong."""
        if not self._skipped and not self._rollbacks:
            return Text("every update applied", style="green")
        words = [f"{self._skipped} step{'' if self._skipped == 1 else 's'} skipped"]
        if self._rollbacks:
            words.append(f"{self._rollbacks} rollback{'' if self._rollbacks == 1 else 's'}")
        return Text(f"{', '.join(words)}; last {self._fault}", style="yellow")


class Trend:
    """The mean loss over equal parts of the run, 12 to 24 of them, however long it gets."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._per_bar = 1
        self._pending: list[float] = []

    def add(self, value: object) -> None:
        """Take one loss; None, NaN and infinities are left out."""
        number = _number(value)
        if number is None or not math.isfinite(number):
            return
        self._pending.append(number)
        if len(self._pending) < self._per_bar:
            return
        means = [*self._means, sum(self._pending) / len(self._pending)]
        self._pending = []
        if len(means) > 2 * _TREND_BARS:
            last = means.pop()  # 24 bars become 12, twice as wide; the 25th begins the next
            means = [(left + right) / 2 for left, right in zip(means[::2], means[1::2], strict=True)]
            self._pending = [last] * self._per_bar
            self._per_bar *= 2
        self._means = means

    def values(self) -> list[float]:
        """One mean per bar, oldest first."""
        pending = self._pending
        return [*self._means, sum(pending) / len(pending)] if pending else list(self._means)


def sparkline(values: list[float]) -> str:
    """One block per value. The scale is that of the last three quarters: a loss falls most at the very start, and
    would press all the rest onto the lowest block; what lies above is drawn as the highest."""
    if not values:
        return ""
    scale = values[len(values) // 4 :]
    low, high = min(scale), max(scale)
    top = len(_BLOCKS) - 1
    if high == low:
        return _BLOCKS[0] * len(values)
    return "".join(_BLOCKS[max(0, min(top, round((value - low) / (high - low) * top)))] for value in values)


def train_line(row: Row, total_steps: int | None, left_s: float | None) -> str:
    """``step 120/400  loss 3.412  lr 2.9e-03  grad_norm 0.81  9.8k tok/s  eta 1m 12s``; what is None is left out."""
    words = [f"step {_of(_int(row.get('step')), total_steps)}"]
    spelled: list[tuple[str, str, Callable[[float], str]]] = [
        ("loss", "loss {}", _loss),
        ("learning_rate", "lr {}", _rate),
        ("grad_norm", "grad_norm {}", _short),
        ("tokens_per_second", "{} tok/s", format_count),
    ]
    for key, form, spell in spelled:
        number = _number(row.get(key))
        if number is not None:
            words.append(form.format(spell(number)))
    skipped = _number(row.get("skipped") or None)
    if skipped is not None:
        words.append(f"skipped {_short(skipped)}")
    if left_s is not None:
        words.append(f"eta {format_time(left_s)}")
    return "  ".join(words)


def event_line(row: Row) -> str:
    """One line for a row with an ``event``: ``eval step 400  loss 2.105  perplexity 8.207  bits_per_byte 1.980``."""
    kind = str(row.get("event", "event"))
    words = [f"{kind} step {_int(row.get('step'))}"]
    if kind == "eval":
        for name in ("loss", "perplexity", "bits_per_byte"):
            number = _number(row.get(f"eval_{name}"))
            if number is not None:
                words.append(f"{name} {_loss(number)}")
        if sources := _per_source(row, "eval_bits_per_byte"):
            words.append(f"({', '.join(f'{name} {_loss(value)}' for name, value in sources)})")
    elif kind == "checkpoint":
        words += _checkpoint_words(row)
    elif kind == "resume":
        words.append(f"from {row.get('checkpoint')}")
    elif kind == "skip":
        words.append(_skip_text(row))
    elif kind == "rollback":
        words.append(_rollback_text(row))
    elif kind == "plan":
        words.append(_compared("memory", row, "memory_bytes", format_bytes))
        words.append(_compared("time of a step", row, "step_time_s", _step_time))
    else:
        words += [f"{key} {value}" for key, value in row.items() if key not in ("event", "step", "time")]
    return "  ".join(words)


def _skip_text(row: Mapping[str, Any]) -> str:
    rows = row.get("rows") or []
    named = ", ".join(f"{place['source']} row {place['row']}" for place in rows[:8])
    return f"{row.get('reason')}; its update was left out. Rows: {named}{' …' if len(rows) > 8 else ''}"


def _rollback_text(row: Mapping[str, Any]) -> str:
    start, stop = row.get("passed_over") or (0, 0)
    return f"from step {_int(row.get('from_step'))}; rows {_int(start)} to {_int(stop)} are passed over"


def _compared(label: str, row: Row, key: str, spell: Callable[[float], str]) -> str:
    planned, measured = _number(row.get(f"planned_{key}")), _number(row.get(key))
    if measured is None or not planned:
        return f"{label} {'-' if measured is None else spell(measured)}"
    return f"{label} {spell(measured)}, planned {spell(planned)} ({measured / planned - 1:+.0%})"


def _step_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"


def _speed_text(row: Row) -> str:
    words = []
    tokens_per_second, step_s = _number(row.get("tokens_per_second")), _number(row.get("step_time_s"))
    if tokens_per_second is not None:
        words.append(f"{format_count(tokens_per_second)} tok/s")
    if step_s is not None:
        words.append(f"{_step_time(step_s)}/step")
    mfu = _number(row.get("mfu"))
    if mfu is not None:
        words.append(f"mfu {100 * mfu:.0f}%")
    data_s = _number(row.get("data_time_s"))
    if data_s is not None and step_s and data_s > 0.01 * step_s:  # below 1 % loading is hidden, as it should be
        words.append(f"waiting for data {100 * data_s / step_s:.0f}%")
    return "   ".join(words)


def _memory_text(row: Row) -> str:
    memory, tokens = _number(row.get("memory_bytes")), _number(row.get("tokens"))
    words = [] if memory is None else [f"{format_bytes(memory)} at most"]
    if tokens is not None:
        words.append(f"{format_count(tokens)} tokens taken")
    return "   ".join(words)


def _eval_text(row: Row, first: Row | None) -> Text:
    bits, loss = _number(row.get("eval_bits_per_byte")), _number(row.get("eval_loss"))
    text = Text()
    if bits is not None:
        text.append(f"{_loss(bits)} bits per byte", style="bold green")
        before = None if first is None or first is row else _number(first.get("eval_bits_per_byte"))
        if first is not None and before is not None:
            text.append(f" ({_loss(before)} at step {_int(first.get('step'))})", style="dim")
        text.append("   ")
    if loss is not None:
        text.append(f"loss {_loss(loss)}   ")
    return text.append(f"step {_int(row.get('step'))}", style="dim")


def _checkpoint_words(row: Row) -> list[str]:
    name, seconds = str(row.get("path") or "").rstrip("/").rpartition("/")[2], _number(row.get("seconds"))
    return ([name] if name else []) + ([] if seconds is None else [f"in {seconds:.1f}s"])


def _per_source(row: Row, key: str) -> list[tuple[str, float | None]]:
    prefix = f"{key}/"
    return [(name.removeprefix(prefix), _number(value)) for name, value in row.items() if name.startswith(prefix)]


def _of(step: int, total_steps: int | None) -> str:
    return f"{step}/{total_steps}" if total_steps else str(step)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, Real) else None


def _int(value: object) -> int:
    return int(value) if isinstance(value, int) else 0


def _loss(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if 0.1 <= abs(value) < 1000 else f"{value:.3g}"


def _rate(value: float) -> str:
    return f"{value:.1e}"


def _short(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= abs(value) < 100 and value != int(value) else f"{value:.3g}"


def _is_tty(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def _can_show_live(stream: TextIO | None) -> bool:
    """A terminal that can move its cursor and knows the bar's characters. Asked of the stream itself: rich also says
    yes where FORCE_COLOR is set, and a batch system that sets it would fill its log with panels."""
    if stream is None or not _is_tty(stream) or Console(file=stream).is_dumb_terminal:
        return False
    return (getattr(stream, "encoding", None) or "").lower().startswith("utf")
