"""The rows of ``metrics.jsonl`` as TensorBoard files and at trackers; the only file that imports a tracker.

``metrics.jsonl`` is the record of a run. What is here shows the same rows elsewhere, and may fail without stopping one.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard

from arriero.errors import UserError
from arriero.run_folder import RunFolder, replace_text

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
# Rows that wait for a tracker: hours of them at a line a second. More means that it takes none.
_WAITING = 20_000
# How long the end of a run waits for what has not been sent yet.
_SENDING_S = 20.0
_PROJECT = "arriero"


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


def check_trackers(names: Sequence[str]) -> None:
    """``UserError`` where the package of a tracker that a recipe's ``log.report_to`` names isn't installed."""
    missing = [name for name in names if name in _OPEN and find_spec(name) is None]
    if missing:
        raise UserError(
            f"log.report_to: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            f"pip install 'arriero[{','.join(missing)}]', or leave it out of log.report_to.",
        )


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


@dataclass(frozen=True)
class _Opened:
    """A run at a tracker."""

    id: str
    """By which a later start of the run goes on with it."""
    log: Callable[[dict[str, float], int], object]
    """Takes scalars by tag, and the step."""
    finish: Callable[[bool], object]
    """Sends what is left; whether the run failed."""


class TrackerSink:
    """Sends rows to one of ``wandb``, ``swanlab``, ``mlflow``, ``trackio``, under the tags of TensorBoard.

    The client runs in a thread of its own, so that a server that doesn't answer can't hold training up. A later start
    of the same run folder goes on with the same run there. If anything fails, ``tell`` gets one sentence, and the sink
    is silent from then on. config: the recipe, shown by the tracker.
    """

    def __init__(
        self, name: str, run: RunFolder, config: Mapping[str, Any], *, tell: Callable[[str], None] = print
    ) -> None:
        self._name, self._run, self._config, self._tell = name, run, config, tell
        self._rows: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(_WAITING)
        self._problem: str | None = None
        self._failed = self._silent = False
        self._thread = threading.Thread(target=self._send, name=name, daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, object]) -> None:
        """Send the row's scalars at its ``step``; returns at once."""
        scalars, step = tensorboard_scalars(row), row.get("step")
        if self._silent or not scalars or not isinstance(step, int):
            return
        try:
            self._rows.put_nowait((scalars, step))
        except queue.Full:
            self._problem = f"it has not taken the last {_WAITING} rows"
        self._say_once()

    def close(self, *, failed: bool = False) -> None:
        """Send what is left, for at most 20 seconds; closing twice is allowed."""
        self._failed = failed
        with suppress(queue.Full):
            self._rows.put_nowait(None)
        self._thread.join(_SENDING_S)
        if self._thread.is_alive():
            self._problem = f"it has not taken the last rows within {_SENDING_S:.0f} s"
        self._say_once()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def _say_once(self) -> None:
        """In the run's own thread: a progress display takes lines from no other."""
        if self._problem is not None and not self._silent:
            self._silent = True
            self._tell(f"{self._name} gets no more rows ({self._problem}); metrics.jsonl goes on")

    def _send(self) -> None:
        try:
            opened = self._open()
            while (item := self._rows.get()) is not None:
                opened.log(*item)
            opened.finish(self._failed)
        except BaseException as error:  # noqa: BLE001 - some clients raise SystemExit; none must end a run
            self._problem = " ".join([type(error).__name__, *str(error).splitlines()[:1]])

    def _open(self) -> _Opened:
        noted = self._run.tracker(self._name)
        known = noted.read_text(encoding="utf-8").strip() if noted.is_file() else None
        opened = _OPEN[self._name](self._run, self._config, known)
        if opened.id != known:
            replace_text(noted, f"{opened.id}\n")
        return opened


def _open_wandb(run: RunFolder, config: Mapping[str, Any], known: str | None) -> _Opened:
    import wandb

    id = known or secrets.token_hex(4)
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=run.path.name,
        id=id,
        resume="allow",
        dir=run.path,
        config=dict(config),
        # The terminal is the progress view's; a question whether to log in would wait for ever in a batch job.
        settings=wandb.Settings(console="off", login_timeout=20),
    )
    if opened.disabled:
        raise RuntimeError("W&B is disabled here: WANDB_MODE says so, or nobody has run `wandb login`")
    # Not W&B's own step: that one takes no smaller number again, and a run that goes on does its last steps anew.
    opened.define_metric("*", step_metric="train/global_step", step_sync=True)
    return _Opened(
        id,
        lambda scalars, step: opened.log({**scalars, "train/global_step": step}),
        lambda failed: opened.finish(exit_code=int(failed)),
    )


def _open_swanlab(run: RunFolder, config: Mapping[str, Any], known: str | None) -> _Opened:
    import swanlab

    id = known or secrets.token_hex(4)
    opened = swanlab.init(
        project=os.environ.get("SWANLAB_PROJECT_NAME", _PROJECT),
        name=run.path.name,
        id=id,
        resume="allow",
        log_dir=str(run.path / "swanlog"),
        config=dict(config),
        settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
    )
    return _Opened(
        id,
        lambda scalars, step: opened.log(scalars, step=step),
        lambda failed: opened.finish("crashed" if failed else "success", "training failed" if failed else None),
    )


def _open_mlflow(run: RunFolder, config: Mapping[str, Any], known: str | None) -> _Opened:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient()
    if known is None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
        id = client.create_run(experiment_id, run_name=run.path.name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in _leaves(config)]
        for start in range(0, len(params), 100):  # the most that a server takes at once
            client.log_batch(id, params=params[start : start + 100])
    else:
        id = known
        client.update_run(id, status="RUNNING")

    def log(scalars: dict[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        client.log_batch(id, metrics=[Metric(tag, number, now_ms, step) for tag, number in scalars.items()])

    return _Opened(id, log, lambda failed: client.set_terminated(id, "FAILED" if failed else "FINISHED"))


def _open_trackio(run: RunFolder, config: Mapping[str, Any], known: str | None) -> _Opened:
    import trackio

    # trackio knows a run by its name alone, and two folders may have one.
    id = known or f"{run.path.name}-{secrets.token_hex(2)}"
    opened = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
        name=id,
        resume="allow",
        config=dict(_leaves(config)),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return _Opened(id, lambda scalars, step: opened.log(scalars, step=step), lambda failed: opened.finish())


_OPEN = {"wandb": _open_wandb, "swanlab": _open_swanlab, "mlflow": _open_mlflow, "trackio": _open_trackio}


def _leaves(config: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """``section.key`` and value of everything in a recipe."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        found += _leaves(value, f"{path}{key}.") if isinstance(value, Mapping) else [(f"{path}{key}", value)]
    return found


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
