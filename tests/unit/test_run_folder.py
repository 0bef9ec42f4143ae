"""The run folder: one live process writes into it, and its files appear whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arriero.disk import sync_folder
from arriero.errors import UserError
from arriero.run_folder import RunFolder, replace_text

HOLD = """
import sys
from pathlib import Path
from arriero.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).held():
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that has the folder; it is there when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_live_process_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs/x")
    process = hold(run.path)
    try:
        with pytest.raises(UserError) as caught, run.held():
            pass
        assert caught.value.problem.startswith(f"{run.path} is in use by a live process (pid {process.pid} on ")
        assert "output_dir" in caught.value.remedy
        assert caught.value.exit_code == 2
    finally:
        process.communicate("")
    assert process.returncode == 0
    with run.held():
        pass


def test_a_killed_process_leaves_the_folder_free(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "x")
    process = hold(run.path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert (run.path / "run.lock").read_text(encoding="utf-8").startswith(f"pid {process.pid} ")
    with run.held():
        assert (run.path / "run.lock").read_text(encoding="utf-8").startswith(f"pid {os.getpid()} ")
        with pytest.raises(UserError), RunFolder(run.path).held():
            pass
    with run.held():
        pass


def test_state(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "new")
    assert run.read_state() == {}
    run.write_state(status="running", step=3, last_checkpoint="checkpoint-2", exit_code=None)
    assert run.read_state() == {"status": "running", "step": 3, "last_checkpoint": "checkpoint-2", "exit_code": None}
    run.write_failure("it broke", 1)
    assert run.read_state() == {
        "status": "failed",
        "step": 3,
        "last_checkpoint": "checkpoint-2",
        "exit_code": 1,
        "reason": "it broke",
    }
    assert json.loads(run.state.read_text(encoding="utf-8")) == run.read_state()


def test_names() -> None:
    run = RunFolder(Path("runs/x"))
    assert [run.metrics.name, run.state.name, run.config.name] == ["metrics.jsonl", "run_state.json", "config.yaml"]
    assert [run.tensorboard.name, run.model.name, run.final.name] == ["tb", "model", "final"]
    assert run.log(3) == Path("runs/x/logs/rank_3.log")


def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder/state.json"
    replace_text(path, "old")
    reader = path.open(encoding="utf-8")
    replace_text(path, "new text, longer")
    assert path.read_text(encoding="utf-8") == "new text, longer"
    with reader:
        assert reader.read() == "old", "the old file was replaced, not written into"
    assert [file.name for file in path.parent.iterdir()] == ["state.json"]

    # A crash at any point before the rename leaves the old text.
    def crash(*arguments: object) -> None:
        raise OSError("the disk is gone")

    for target, name in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, crash)
            with pytest.raises(OSError, match="the disk is gone"):
                replace_text(path, "half")
        assert path.read_text(encoding="utf-8") == "new text, longer"
    replace_text(path, "赶骡人")
    assert path.read_bytes() == "赶骡人".encode()


def test_the_text_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    sync, rename = os.fsync, Path.replace

    def fsync(handle: int) -> None:
        events.append(f"sync of {os.fstat(handle).st_size} bytes")
        sync(handle)

    def replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    replace_text(tmp_path / "x", "12345")
    assert events == ["sync of 5 bytes", "rename"]


def test_sync_folder_closes_what_it_opens(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        sync_folder(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "nowhere")
