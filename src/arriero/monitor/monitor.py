"""Everything that rank 0 shows and writes down while a run goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from types import TracebackType
from typing import Any, Self

from arriero.monitor.metrics import MetricsFile
from arriero.monitor.progress import Progress
from arriero.monitor.report import write_report
from arriero.monitor.sinks import TensorBoardSink, TrackerSink
from arriero.run_folder import RunFolder, replace_text


class Monitor:
    """Rows and events to metrics.jsonl, trackers and the terminal, notes to the log; silent on ranks above 0.

    report_to: names of ``log.report_to``. config: the recipe, which trackers show. resumed_step: the step of the checkpoint
    that this start goes on from, or None for a new run; curves in TensorBoard then begin again behind it.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        rank: int,
        total_steps: int,
        title: str,
        report_to: Sequence[str],
        config: Mapping[str, Any],
        resumed_step: int | None,
    ) -> None:
        self._run, self._total_steps, self._title = run, total_steps, title
        self._report_to, self._config, self._resumed_step = report_to, config, resumed_step
        self._active = rank == 0
        self._checkpoint_s = 0.0
        self._step_s: list[float] = []
        self._last_checkpoint: str | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if not self._active:
            return self
        log = self._run.log(0)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = self._stack.enter_context(log.open("a", encoding="utf-8"))
        self._metrics = self._stack.enter_context(MetricsFile(self._run.metrics))
        self._progress = self._stack.enter_context(Progress(self._total_steps, title=self._title))
        self._sinks: list[TensorBoardSink | TrackerSink] = []
        for name in dict.fromkeys(self._report_to):
            self._sinks.append(self._sink(name))
            self._stack.push(self._sinks[-1])
        if self._metrics.torn_bytes:
            self.note(f"metrics.jsonl: cut off {self._metrics.torn_bytes} bytes of an unfinished last line")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _sink(self, name: str) -> TensorBoardSink | TrackerSink:
        if name != "tensorboard":
            return TrackerSink(name, self._run, self._config, tell=self.note)
        purge_step = None if self._resumed_step is None else self._resumed_step + 1
        return TensorBoardSink(self._run.tensorboard, purge_step=purge_step, tell=self.note)

    def row(self, row: Mapping[str, Any]) -> None:
        """A training row, or an event."""
        if not self._active:
            return
        self._metrics.write(row)
        for sink in self._sinks:
            sink.write(row)
        if "event" in row:
            self._progress.event(row)
        else:
            self._progress.train_row(row)
            self._step_s.append(row["step_time_s"])

    def said(self, step: int, continued: Sequence[Mapping[str, Any]]) -> None:
        """What the model made of the recipe's prompts: objects with prompt and text, into ``samples/`` and TensorBoard."""
        if not self._active:
            return
        file = self._run.samples / f"step-{step:06}.jsonl"
        try:
            file.parent.mkdir(exist_ok=True)
            replace_text(
                file, "".join(json.dumps({"step": step, **one}, ensure_ascii=False) + "\n" for one in continued)
            )
        except OSError as error:  # a full disk must not end a run that could go on
            self.note(f"{file} could not be written: {error}")
        texts = {f"samples/{n}": f"**{one['prompt']}**{one['text']}" for n, one in enumerate(continued)}
        for sink in self._sinks:
            if isinstance(sink, TensorBoardSink):
                sink.write_texts(step, texts)
        self.note(f"samples step {step}  {file.relative_to(self._run.path)}")

    def checkpoint(self, step: int, name: str, seconds: float, stall_s: float) -> None:
        """A checkpoint is complete, so long after it was begun; training waited ``stall_s`` for it."""
        self._checkpoint_s += stall_s
        self._last_checkpoint = name
        times = {"seconds": round(seconds, 6), "stall_s": round(stall_s, 6)}
        self.row({"event": "checkpoint", "step": step, "path": name, **times})

    def take_checkpoint_s(self) -> float:
        """Seconds spent on checkpoints since this was last asked."""
        spent, self._checkpoint_s = self._checkpoint_s, 0.0
        return spent

    def median_step_s(self) -> float | None:
        """Of the steps logged by this start but its first, which may have compiled; None before the second, and on ranks
        above 0."""
        return median(self._step_s[1:]) if len(self._step_s) > 1 else None

    def note(self, text: str) -> None:
        """A line for people."""
        if self._active:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._log.flush()
            self._progress.note(text)

    def report(self) -> None:
        """Write report.html. Whatever happens to it is a note: the run is done, and its numbers are in metrics.jsonl."""
        if not self._active:
            return
        try:
            self.note(f"the run on one page: {write_report([self._run.path]).path}")
        except Exception as error:  # noqa: BLE001 - nothing of this must turn a finished run into a failed one
            self.note(f"report.html could not be written ({type(error).__name__}: {error}); arriero report tries again")

    def status(self, **fields: Any) -> None:
        """Replace run_state.json; the last checkpoint is known here."""
        if self._active:
            known = self._last_checkpoint or self._run.read_state().get("last_checkpoint")
            try:
                self._run.write_state(**fields, last_checkpoint=known)
            except OSError as error:  # a full disk must not end a run that could go on
                self.note(f"run_state.json could not be written: {error}")
