from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from arriero.monitor import heartbeat
from arriero.monitor.heartbeat import Beat, Heartbeat, diverged, explanation, read_beats, unreachable


def beat(rank: int, *, step: int = 12, phase: str = "training", since: float = 940.0, when: float = 999.0) -> Beat:
    return Beat(rank, f"host{rank}", 100 + rank, step, phase, since, when)


def test_the_rank_that_is_not_heard_of_is_the_one() -> None:
    beats = [beat(0), beat(1, when=930.0), beat(2)]
    assert diverged(beats, 4, 1000.0) == [1, 3]
    text = explanation(beats, 4, 1000.0, "")
    assert "rank 1 on host1 (pid 101) has not been heard of for 70 s; it was in step 12, training" in text
    assert "rank 3 has left no heartbeat" in text
    assert "the other 2 of 4 ranks wait in step 12, training" in text


def test_the_rank_in_an_earlier_step_is_the_one() -> None:
    beats = [beat(0), beat(1, step=11, since=900.0), beat(2)]
    assert diverged(beats, 3, 1000.0) == [1]
    assert "rank 1 on host1 (pid 101) has been in step 11, training, for 100 s" in explanation(beats, 3, 1000.0, "")


def test_the_rank_in_another_phase_is_the_one() -> None:
    beats = [beat(0), beat(1), beat(2, phase="reading rows", since=935.0)]
    assert diverged(beats, 3, 1000.0) == [2]
    assert diverged([beat(0), beat(1)], 2, 1000.0) == []


def test_a_host_that_can_not_be_reached_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first door answers, the second is closed on a host that is there, the third doesn't answer: its queue is full."""
    monkeypatch.setattr(heartbeat, "_REACH_S", 0.3)
    with ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server((f"127.0.0.{n}", 0), backlog=0)) for n in (1, 2, 3)]
        where = [door.getsockname() for door in doors]
        doors[1].close()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(where[2])
        beats = [replace(beat(rank), door=door) for rank, door in enumerate(where)]
        away = unreachable([*beats, replace(beat(3), door=where[2])])
    assert away == {2, 3}, "all ranks of a host"
    assert unreachable([beat(0), beat(1)]) == set(), "one host"
    assert diverged(beats, 3, 1000.0, {2}) == [2]
    text = explanation(beats, 3, 1000.0, "", {2})
    assert "rank 2 on host2 can't be reached at 127.0.0.3; it was last heard of 1 s ago in step 12, training" in text
    assert "the other 2 of 3 ranks wait in step 12, training" in text


def test_a_hang_is_explained_once_with_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LEAST_S", 0.3)
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.05)
    told: list[str] = []
    with Heartbeat(tmp_path, rank=0, size=2, on_hang=told.append) as heart:
        for step in range(1, 6):
            heart.phase(step, "training")
        assert [found.step for found in read_beats(tmp_path)] == [0]
        deadline = time.time() + 10
        while not told and time.time() < deadline:
            time.sleep(0.02)
    assert len(told) == 1
    assert "rank 1 has left no heartbeat" in told[0]
    assert "test_a_hang_is_explained_once_with_stacks" in (tmp_path / "logs/rank_0.stack").read_text()
    assert not (tmp_path / "heartbeats/rank_0.json").exists(), "a rank that ends well takes its heartbeat with it"


def test_progress_is_no_hang_and_long_phases_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LEAST_S", 0.2)
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.05)
    told: list[str] = []
    with Heartbeat(tmp_path, rank=0, size=1, on_hang=told.append) as heart:
        time.sleep(0.5)  # starting
        for step in range(1, 12):
            heart.phase(step, "training")
            time.sleep(0.05)
        heart.phase(12, "saving", limit_s=30.0)
        time.sleep(0.5)
    assert not told


def test_an_unreadable_heartbeat_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats/rank_0.json").write_text("{")
    (tmp_path / "heartbeats/rank_1.json").write_text(json.dumps(beat(1).__dict__))
    assert [found.rank for found in read_beats(tmp_path)] == [1]
