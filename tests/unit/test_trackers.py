"""Trackers with their real clients, offline: our tags arrive, a later start goes on with the same run, nothing stops ours.

Where a client isn't installed its tests skip; CI has those of the ``dev`` extra.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from arriero.errors import UserError
from arriero.monitor import sinks
from arriero.monitor.sinks import TrackerSink, check_trackers
from arriero.run_folder import RunFolder

CONFIG = {"optim": {"learning_rate": 6e-4}, "train": {"seed": 42}}
EVAL = {"event": "eval", "step": 2, "eval_loss": 2.0}
Points = dict[str, list[tuple[int, float]]]

needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} isn't installed (pip install 'arriero[{name}]')")
    for name in ("wandb", "swanlab", "mlflow", "trackio")
}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client's own settings for a machine without a network, and nobody's credentials."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


SCRIPT = """
import json, math, sys
from pathlib import Path
from arriero.monitor.sinks import TrackerSink
from arriero.run_folder import RunFolder
name, folder, first, last = sys.argv[1:]
said = []
with TrackerSink(name, RunFolder(Path(folder)), {config}, tell=said.append) as sink:
    for step in range(int(first), int(last) + 1):
        sink.write({{"step": step, "loss": math.nan if step == 2 else 1 / step, "tokens_per_second": 100.0 * step, "loss/代码": 3.0}})
    sink.write({eval})
    sink.write({{"event": "checkpoint", "step": 2, "seconds": 1.0}})
print("SAID", json.dumps(said))
"""


def track(name: str, folder: Path, first: int, last: int) -> None:
    """A start of a run, in a process of its own as it is in truth: clients keep state in their modules."""
    script = SCRIPT.format(config=CONFIG, eval=EVAL)
    done = subprocess.run(
        [sys.executable, "-c", script, name, str(folder), str(first), str(last)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "SAID []" in done.stdout, done.stdout


def expected(*starts: tuple[int, int]) -> Points:
    steps = [step for first, last in starts for step in range(first, last + 1)]
    return {
        "train/loss": [(step, math.nan if step == 2 else 1 / step) for step in steps],
        "perf/tokens_per_second": [(step, 100.0 * step) for step in steps],
        "data/代码/loss": [(step, 3.0) for step in steps],
        "eval/loss": [(2, 2.0)] * len(starts),
    }


def same(found: Points, wanted: Points) -> None:
    """NaN is NaN, or left out by a tracker that can't hold it."""
    assert set(found) == set(wanted)
    for tag, points in wanted.items():
        finite = [point for point in points if math.isfinite(point[1])]
        assert [point for point in found[tag] if math.isfinite(point[1])] == finite, tag


def leveldb_records(path: Path) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which wandb and swanlab use, behind its seven bytes of head."""
    data = path.read_bytes()
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield record
            record = b""


@needs["wandb"]
def test_wandb(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    folder = tmp_path / "demo"
    track("wandb", folder, 1, 3)
    track("wandb", folder, 3, 4)
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    found: Points = {}
    ids, settings = set(), []
    for path in files:
        for payload in leveldb_records(path):
            record = wandb_internal_pb2.Record.FromString(payload)
            if record.HasField("run"):
                ids.add((record.run.project, record.run.display_name, record.run.run_id))
                settings += [(item.key, item.value_json) for item in record.run.config.update]
            if record.HasField("history"):
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                step = row["train/global_step"]
                for tag, value in row.items():
                    if tag.startswith(("train/l", "perf", "data", "eval")):
                        found.setdefault(tag, []).append((step, float(value)))
    same(found, expected((1, 3), (3, 4)))
    ((project, name, id),) = ids
    assert (project, name) == ("arriero", "demo")
    assert (folder / "trackers" / "wandb.txt").read_text() == f"{id}\n"
    assert json.loads(dict(settings)["optim"]) == {"learning_rate": 6e-4}


@needs["swanlab"]
def test_swanlab(tmp_path: Path) -> None:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    folder = tmp_path / "demo"
    track("swanlab", folder, 1, 3)
    track("swanlab", folder, 3, 4)
    files = sorted((folder / "swanlog").glob("run-*/*.swanlab"))
    assert len(files) == 2
    found: Points = {}
    for path in files:
        for payload in leveldb_records(path):
            scalar = Record.FromString(payload).scalar
            if scalar.key:
                found.setdefault(scalar.key, []).append((scalar.step, float(scalar.value.number)))
    same(found, expected((1, 3), (3, 4)))
    id = (folder / "trackers" / "swanlab.txt").read_text().strip()
    assert all(path.name == f"run-{id}.swanlab" for path in files)


@needs["mlflow"]
def test_mlflow(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    track("mlflow", folder, 1, 3)
    track("mlflow", folder, 3, 4)
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("arriero").experiment_id])
    assert run.info.run_id == (folder / "trackers" / "mlflow.txt").read_text().strip()
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    assert run.data.params == {"optim.learning_rate": "0.0006", "train.seed": "42"}
    found = {
        tag: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, tag)]
        for tag in run.data.metrics
    }
    same(found, expected((1, 3), (3, 4)))


@needs["trackio"]
def test_trackio(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    track("trackio", folder, 1, 3)
    track("trackio", folder, 3, 4)
    track("trackio", tmp_path / "elsewhere" / "demo", 9, 9)
    id = (folder / "trackers" / "trackio.txt").read_text().strip()
    assert id.startswith("demo-")
    with sqlite3.connect(tmp_path / "trackio" / "arriero.db") as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (id,)).fetchall()
        names = database.execute("SELECT DISTINCT run_name FROM metrics").fetchall()
    assert len(names) == 2, "another folder of the same name is another run"
    found: Points = {}
    for step, text in rows:
        for tag, value in json.loads(text).items():
            found.setdefault(tag, []).append((step, float(value)))
    same(found, expected((1, 3), (3, 4)))


@needs["wandb"]
def test_nobody_has_logged_in_is_said_once_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    said: list[str] = []
    with TrackerSink("wandb", RunFolder(tmp_path / "demo"), CONFIG, tell=said.append) as sink:
        for step in range(1, 60):
            sink.write({"step": step, "loss": 1.0})
            time.sleep(0.02)
    assert len(said) == 1
    assert said[0].startswith("wandb gets no more rows (UsageError No API key configured")
    assert said[0].endswith("metrics.jsonl goes on")


@needs["mlflow"]
def test_a_server_that_never_answers_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_SENDING_S", 0.3)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began_s = time.monotonic()
        with TrackerSink("mlflow", RunFolder(tmp_path / "demo"), CONFIG, tell=said.append) as sink:
            for step in range(1, 1000):
                sink.write({"step": step, "loss": 1.0})
            assert time.monotonic() - began_s < 1
        assert time.monotonic() - began_s < 5
    assert said == ["mlflow gets no more rows (it has not taken the last rows within 0 s); metrics.jsonl goes on"]


def test_a_missing_package_is_refused_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None if name in {"swanlab", "trackio"} else os)
    check_trackers(("tensorboard", "wandb"))
    with pytest.raises(UserError, match="swanlab and trackio are not installed") as refused:
        check_trackers(("tensorboard", "swanlab", "wandb", "trackio"))
    assert "pip install 'arriero[swanlab,trackio]'" in str(refused.value)
