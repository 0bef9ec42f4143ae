"""TensorBoard: Hugging Face's tags, on disk at once, and no step twice after a resume."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arriero.monitor.sinks import TensorBoardSink, tensorboard_scalars

TRAIN_ROW: dict[str, object] = {
    "step": 10,
    "time": 1.7e9,
    "loss": 3.5,
    "learning_rate": 1e-3,
    "grad_norm": None,
    "skipped": False,
    "loss_scale": 1.0,
    "target_tokens": 4090,
    "tokens": 40_960,
    "position": 640,
    "epoch": {"code": 0.5, "prose": 0.25},
    "tokens_per_second": 9800.0,
    "step_time_s": 0.4,
    "data_time_s": 0.001,
    "checkpoint_time_s": 0.0,
    "mfu": 0.3,
    "memory_bytes": 3 * 1024**3,
    "loss/code": 3.0,
    "loss/prose": 4.0,
}


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(item.step, item.value) for item in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_training_tags() -> None:
    assert tensorboard_scalars(TRAIN_ROW) == {
        "train/loss": 3.5,
        "train/learning_rate": 1e-3,
        "train/skipped": 0.0,
        "train/loss_scale": 1.0,
        "train/target_tokens": 4090.0,
        "train/num_input_tokens_seen": 40_960.0,
        "data/position": 640.0,
        "data/code/epoch": 0.5,
        "data/prose/epoch": 0.25,
        "perf/tokens_per_second": 9800.0,
        "perf/step_time_s": 0.4,
        "perf/data_time_s": 0.001,
        "perf/checkpoint_time_s": 0.0,
        "perf/mfu": 0.3,
        "memory/used_gib": 3.0,
        "data/code/loss": 3.0,
        "data/prose/loss": 4.0,
    }


def test_evaluation_checkpoint_and_other_events() -> None:
    row = {"event": "eval", "step": 10, "eval_loss": 2.0, "eval_bits_per_byte": 1.5, "eval_loss/code": 1.0}
    assert tensorboard_scalars(row) == {"eval/loss": 2.0, "eval/bits_per_byte": 1.5, "eval/code/loss": 1.0}
    # Its seconds are in the next training row.
    assert tensorboard_scalars({"event": "checkpoint", "step": 10, "seconds": 0.5, "path": "checkpoint-10"}) == {}
    assert tensorboard_scalars({"event": "resume", "step": 10, "checkpoint": "checkpoint-10"}) == {}


def test_an_unknown_number_is_not_lost() -> None:
    assert tensorboard_scalars({"step": 1, "router_entropy": 0.5, "host": "n0"}) == {"train/router_entropy": 0.5}


def test_files_are_readable_before_close_and_nan_stays_nan(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path / "tb") as sink:
        sink.write(TRAIN_ROW)
        sink.write({"step": 20, "loss": math.nan})
        read = curves(tmp_path / "tb")
        assert read["data/prose/epoch"] == [(10, 0.25)]
        assert [step for step, _ in read["train/loss"]] == [10, 20]
        assert math.isnan(read["train/loss"][1][1])


def test_resume_hides_the_replayed_steps(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        for step in (10, 20, 30):
            sink.write({"step": step, "loss": 1.0})
        sink.write({"event": "eval", "step": 20, "eval_loss": 1.0})
        sink.write({"event": "eval", "step": 30, "eval_loss": 1.0})
    with TensorBoardSink(tmp_path, purge_step=21) as sink:  # continues from checkpoint-20, in the same second
        for step in (25, 30):
            sink.write({"step": step, "loss": 2.0})
    assert curves(tmp_path) == {
        "train/loss": [(10, 1.0), (20, 1.0), (25, 2.0), (30, 2.0)],
        "eval/loss": [(20, 1.0)],
    }


def test_a_clock_that_was_set_back_does_not_reorder_the_files(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        sink.write({"step": 10, "loss": 1.0})
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / "events.out.tfevents.4000000000.host.1")
    with TensorBoardSink(tmp_path, purge_step=6) as sink:
        sink.write({"step": 10, "loss": 2.0})
    assert curves(tmp_path) == {"train/loss": [(10, 2.0)]}


def test_unwritable_folder_is_said_once_and_does_not_raise(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("in the way")
    said: list[str] = []
    sink = TensorBoardSink(tmp_path / "tb", purge_step=3, tell=said.append)
    sink.write(TRAIN_ROW)
    sink.close()
    assert len(said) == 1
    assert "metrics.jsonl goes on" in said[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_said_once_and_does_not_raise(tmp_path: Path) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    said: list[str] = []
    sink = TensorBoardSink(tmp_path, tell=said.append)
    with Path("/dev/full").open("wb", buffering=0) as full:
        sink._writer = RecordWriter(full)
        sink.write(TRAIN_ROW)
        sink.write(TRAIN_ROW)
    assert len(said) == 1
    assert "No space left" in said[0]


def test_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys\n"
        "from arriero.monitor.sinks import TensorBoardSink\n"
        "assert 'tensorboard' not in sys.modules\n"
        "TensorBoardSink(pathlib.Path(sys.argv[1])).write({'step': 1, 'loss': 1.0})\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
