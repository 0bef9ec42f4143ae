"""TensorBoard files from the rows of ``metrics.jsonl``; the only file that imports a tracker.

``metrics.jsonl`` is the record of a run. What is here shows the same rows elsewhere, and may fail without stopping one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard

# Tags are those of Hugging Face's Trainer wherever it has one, so that runs of both lie in one chart.
_TAG_OF_KEY = {
    "tokens": "train/num_input_tokens_seen",
    "position": "data/position",
    "tokens_per_second": "perf/tokens_per_second",
    "step_time_s": "perf/step_time_s",
    "data_time_s": "perf/data_time_s",
    "checkpoint_time_s": "perf/checkpoint_time_s",
    "mfu": "perf/mfu",
    "memory_bytes": "memory/used_gib",
}
_NOT_A_CURVE = {"step", "time", "event"}
_GIB = 1024**3


def tensorboard_scalars(row: Mapping[str, object]) -> dict[str, float]:
    """The scalars of a row under their tags.

    Training rows: ``train/<key>`` (``train/loss``, ``train/learning_rate``, ``train/grad_norm`` …), ``perf/*``,
    ``memory/*`` in GiB, and ``data/<source>/<key>`` for a key that is per source (``loss/<source>``, or a mapping
    such as ``epoch``). Evaluation rows: ``eval/loss``, ``eval/<source>/loss``. Other events have no curve
    (a checkpoint's seconds are in the next training row). A numeric key that nobody placed goes to ``train/<key>``,
    so that a new metric is never lost. NaN and infinities are kept: TensorBoard marks them.
    """
    event = row.get("event")
    if event is not None and event != "eval":
        return {}
    scalars: dict[str, float] = {}
    for key, value in row.items():
        if key in _NOT_A_CURVE:
            continue
        per_source = value.items() if isinstance(value, Mapping) else None
        name, _, source = key.partition("/")
        for inner, number in per_source or [(source, value)]:
            if not _is_number(number):
                continue
            tag = _eval_tag(name, str(inner)) if event == "eval" else _train_tag(name, str(inner))
            scalars[tag] = float(number) / _GIB if tag.startswith("memory/") else float(number)
    return scalars


class TensorBoardSink:
    """Writes rows as TensorBoard events, one event file per start of the run.

    ``purge_step``: on a resume, the first step that will be run again; TensorBoard then hides what earlier files say
    about it and later steps. ``tell`` gets one sentence if the files can't be written any more; the sink is silent from
    then on and the run goes on.

    tensorboard's own EventFileWriter is not used: it queues for up to 120 s in a thread, which a kill would lose, and
    loads TensorFlow where that is installed; torch's SummaryWriter adds 0.8 s of imports to the same. Here a row
    is one event record and on disk when ``write`` returns.
    """

    def __init__(self, folder: Path, *, purge_step: int | None = None, tell: Callable[[str], None] = print) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        self._summary: Any = Summary
        self._text: Any = lambda tag, text: Summary.Value(
            tag=tag,
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        )
        self._tell = tell
        self._writer: Any = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(_event_file(folder).open("xb", buffering=0))
        except OSError as error:
            self._give_up(error)
        self._record(file_version="brain.Event:2")
        if purge_step is not None:
            self._record(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, row: Mapping[str, object]) -> None:
        """Record the row's scalars at its ``step``; the row is one that ``MetricsFile.write`` takes."""
        scalars = tensorboard_scalars(row)
        step = row.get("step")
        if scalars and isinstance(step, int):
            values = [self._summary.Value(tag=tag, simple_value=number) for tag, number in scalars.items()]
            self._record(step=step, summary=self._summary(value=values))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Record texts, as Markdown, under their tags."""
        self._record(step=step, summary=self._summary(value=[self._text(*one) for one in texts.items()]))

    def close(self) -> None:
        """Close the event file; closing twice is allowed."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, **fields: object) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._tell(f"TensorBoard files are no longer written ({error}); metrics.jsonl goes on")


def _event_file(folder: Path) -> Path:
    """A name that sorts after every event file in the folder: TensorBoard reads them in the order of their names."""
    prefix = "events.out.tfevents."
    started_s = int(time.time())
    numbers = [path.name.removeprefix(prefix).split(".")[0] for path in folder.glob(f"{prefix}*")]
    # Two starts within a second, or a clock that was set back, must not put the newer file first.
    newest_s = max((int(number) for number in numbers if number.isdigit()), default=0)
    return folder / f"{prefix}{max(started_s, newest_s + 1):010d}.{socket.gethostname()}.{os.getpid()}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real)


def _eval_tag(name: str, source: str) -> str:
    metric = name.removeprefix("eval_")
    return f"eval/{source}/{metric}" if source else f"eval/{metric}"


def _train_tag(name: str, source: str) -> str:
    return f"data/{source}/{name}" if source else _TAG_OF_KEY.get(name, f"train/{name}")
