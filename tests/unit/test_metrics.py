"""metrics.jsonl: whole lines only, nothing non-finite in silence, and curves that survive a resume."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest

from arriero.errors import UserError
from arriero.monitor.metrics import _TAIL_BYTES, MetricsFile, latest_by_step, read_metrics


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    row = {"step": 1, "time": 12.5, "loss": 3.25, "skipped": False, "epoch": {"code": 0.5}, "grad_norm": None}
    with MetricsFile(path) as file:
        file.write(row)
        assert path.read_bytes().endswith(b"\n")  # on disk before close
        file.write({"event": "checkpoint", "step": 1, "time": 13.0, "path": Path("checkpoint-1"), "seconds": 0.5})
    assert read_metrics(path) == [
        row,
        {"event": "checkpoint", "step": 1, "time": 13.0, "path": "checkpoint-1", "seconds": 0.5},
    ]


def test_reopening_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with MetricsFile(tmp_path / "metrics.jsonl") as file:
            assert file.torn_bytes == 0
            file.write({"step": step})
            file.close()  # and once more on leaving
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_non_finite_is_null_and_named(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write({"step": 3, "loss": float("nan"), "grad_norm": np.float32("inf"), "epoch": {"a": -np.inf, "b": 1.0}})
        file.write({"step": 4, "loss": 1.0})
    bad, good = read_metrics(tmp_path / "metrics.jsonl")
    assert bad["non_finite"] == ["loss", "grad_norm", "epoch/a"]
    assert (bad["loss"], bad["grad_norm"], bad["epoch"]) == (None, None, {"a": None, "b": 1.0})
    assert "non_finite" not in good


def test_numpy_scalars_are_numbers_and_other_objects_are_refused(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write({"step": np.int64(7), "loss": np.float32(0.5), "tokens": 2**53 + 1})
        with pytest.raises(TypeError, match="loss is a ndarray"):
            file.write({"step": 8, "loss": np.zeros(2)})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["step"], row["loss"], row["tokens"]) == (7, 0.5, 2**53 + 1)
    assert abs(row["time"] - time.time()) < 60


@pytest.mark.parametrize(
    ("tail", "torn"),
    [
        (b"", 0),
        (b'{"step":2,"lo', 13),
        (b'{"step":2}', 10),
        (b"\0" * (3 * _TAIL_BYTES + 1), 3 * _TAIL_BYTES + 1),
    ],
    ids=["whole", "half a line", "no newline", "zeros after a power cut"],
)
def test_torn_last_line_is_cut_and_reported(tmp_path: Path, tail: bytes, torn: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + tail)
    assert [row["step"] for row in read_metrics(path)] == [1]  # reading never needs the repair
    with MetricsFile(path) as file:
        assert file.torn_bytes == torn
        file.write({"step": 2})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step"')
    assert read_metrics(path) == []
    with MetricsFile(path) as file:
        assert file.torn_bytes == 7
    assert path.read_bytes() == b""


def test_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":\n{"step":3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 isn't JSON"):
        read_metrics(path)
    path.write_bytes(b'{"step":1}\n3\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 isn't a JSON object"):
        read_metrics(path)


def test_sigkill_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = (
        "import sys, pathlib, itertools\n"
        "from arriero.monitor.metrics import MetricsFile\n"
        "file = MetricsFile(pathlib.Path(sys.argv[1]))\n"
        "for step in itertools.count(1): file.write({'step': step, 'text': 'x' * 500})\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(path)])
    deadline = time.monotonic() + 10
    while (not path.exists() or path.stat().st_size < 100_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    with MetricsFile(path) as file:
        file.write({"step": -1})
    steps = [row["step"] for row in read_metrics(path)]
    assert steps[:-1] == list(range(1, len(steps)))
    assert len(steps) > 100


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """A process may not grow a file beyond 200 bytes: the nearest thing to a full disk that needs no root."""
    limit = 200
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_is_said_and_leaves_no_half_line(tmp_path: Path, file_size_limit: int) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 1, "time": 0.0})
        with pytest.raises(UserError, match="can't be written") as caught:
            file.write({"step": 2, "text": "x" * file_size_limit})
        assert caught.value.exit_code == 1
        file.write({"step": 3, "time": 0.0})  # after space was freed
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


def test_unwritable_folder_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be opened"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(UserError, match="can't be read"):
        read_metrics(tmp_path / "missing.jsonl")


def test_latest_by_step_follows_the_resume() -> None:
    first = [{"step": step, "loss": float(step)} for step in (10, 20, 30, 40)]
    rows: list[dict[str, object]] = [
        *first,
        {"event": "eval", "step": 20, "eval_loss": 2.0},
        {"event": "eval", "step": 40, "eval_loss": 4.0},
        {"event": "resume", "step": 20, "checkpoint": "checkpoint-20"},
        {"step": 25, "loss": 0.25},  # another logging_steps after the resume: 30 and 40 must not stay behind
    ]
    assert [(row.get("event", "train"), row["step"]) for row in latest_by_step(rows)] == [
        ("train", 10),
        ("train", 20),
        ("eval", 20),
        ("resume", 20),
        ("train", 25),
    ]


def test_latest_by_step_last_wins_without_a_resume_mark() -> None:
    rows = [{"step": 2, "loss": 1.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 3.0}, {"note": "no step"}]
    assert latest_by_step(rows) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 3.0}]


def test_rows_are_one_line_each_even_with_newlines_in_texts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"event": "stop", "step": 1, "reason": "two\nlines, 中文"})
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 2
    assert orjson.loads(lines[0])["reason"] == "two\nlines, 中文"


def test_descriptor_is_not_inherited(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        assert not os.get_inheritable(file._fd)
