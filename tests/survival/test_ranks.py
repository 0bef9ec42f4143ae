"""Ranks that die or stop: the job ends with a reason, or begins again by itself from its newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from workshop import Workshop, metrics


def begin(recipe: Path, *options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "arriero", "train", str(recipe), *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def steps(run: Path) -> list[int]:
    return [row["step"] for row in metrics(run) if "loss" in row] if (run / "metrics.jsonl").exists() else []


def pid_of(run: Path, rank: int) -> int:
    return int(json.loads((run / f"heartbeats/rank_{rank}.json").read_text())["pid"])


@pytest.mark.timeout(900)
def test_a_stopped_rank_is_named_within_a_minute(workshop: Workshop) -> None:
    recipe = workshop.recipe(
        "hung", train={"max_steps": 100_000}, checkpoint={"save_steps": 10**6}, eval={"eval_steps": None}
    )
    run = workshop.run("hung")
    process = begin(recipe, "--nproc", 2)
    stopped = 0
    try:
        wait_for(lambda: len(steps(run)) > 8, process)
        stopped = pid_of(run, 1)
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        _, errors = process.communicate(timeout=300)
        took_s = time.monotonic() - began
    finally:
        with suppress(ProcessLookupError):  # ended with the others, as it should be
            os.kill(stopped or process.pid, signal.SIGCONT)
        process.kill()
    assert process.returncode == 1
    assert "rank 1 on" in errors
    assert f"(pid {stopped}) has not been heard of for" in errors
    assert "the other 1 of 2 ranks wait in step" in errors
    # 45 s of patience, two beats for the others' stacks, and the agent's 30 s for the rank that doesn't listen.
    assert took_s < 120
    state = json.loads((run / "run_state.json").read_text())
    assert state["status"] == "failed"
    assert "rank 1" in state["reason"]
    # Where the waiting rank stood when it was noticed.
    assert "all_reduce" in (run / "logs/rank_0.stack").read_text()


@pytest.mark.timeout(900)
def test_a_killed_rank_begins_again_by_itself(workshop: Workshop) -> None:
    recipe = workshop.recipe(
        "restarted", train={"max_steps": 40}, checkpoint={"save_steps": 5}, eval={"eval_steps": None}
    )
    run = workshop.run("restarted")
    process = begin(recipe, "--nproc", 2, "--max-restarts", 1)
    try:
        wait_for(lambda: (run / "checkpoint-10/manifest.json").exists(), process)
        os.kill(pid_of(run, 1), signal.SIGKILL)
        _, errors = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    rows = metrics(run)
    resumes = [row for row in rows if row.get("event") == "resume"]
    assert len(resumes) == 1
    assert resumes[0]["step"] >= 10
    assert json.loads((run / "run_state.json").read_text())["status"] == "completed"
    again = [row["step"] for row in rows[rows.index(resumes[0]) :] if "loss" in row]
    assert again == list(range(resumes[0]["step"] + 1, 41))


@pytest.mark.timeout(900)
def test_what_trying_again_can_not_help_is_not_tried_again(workshop: Workshop) -> None:
    recipe = workshop.recipe("refused", train={"global_batch_size": 7})
    process = begin(recipe, "--nproc", 2, "--max-restarts", 3)
    began = time.monotonic()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2, errors
    assert "has no whole accumulation" in errors
    assert errors.count("has no whole accumulation") == 1
    assert time.monotonic() - began < 200
