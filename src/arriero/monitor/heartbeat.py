"""A sign of life from each rank, and what to say when they stop: which rank hangs, where, and every rank's stack.

A thread of each rank writes ``heartbeats/rank_<n>.json`` every few seconds and watches its own rank's progress; so it
works under any launcher, on any number of hosts that share the run folder, and costs a step nothing but an assignment.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

# A rank that doesn't get on is looked at after this long, or five times its slowest step, whichever is longer.
LEAST_S = 45.0
_PATIENCE = 5.0
# Before the first step (opening data, compiling) and while files are written a rank may well be silent for minutes.
LONG_S = 1800.0
_BEAT_S = 2.0
# A heartbeat older than this comes from a process that is gone, stopped or cut off.
_SILENT_S = 10.0
# Another host's kernel answers a connection in milliseconds, whatever its processes do.
_REACH_S = 3.0


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself; times are Unix seconds."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    since: float
    time: float
    door: tuple[str, int] | None = None
    """Address and port where its host answers the others; None where all ranks are on one host."""


class Heartbeat:
    """Writes this rank's heartbeat and calls ``on_hang`` with an explanation when its main thread gets nowhere.

    folder: the run folder. on_hang is called once, from the thread, and is expected to end the process. Every rank
    dumps its stacks to ``logs/rank_<n>.stack`` before. address: where other hosts reach this one, if there are any; a
    socket listens there whose only purpose is that connecting to it tells a dead network from a rank that is behind.
    """

    def __init__(
        self, folder: Path, *, rank: int, size: int, on_hang: Callable[[str], None], address: str | None = None
    ) -> None:
        self._folder, self._rank, self._size, self._on_hang = folder, rank, size, on_hang
        self._door = socket.create_server((address, 0), backlog=4096) if address else None
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._slowest_s = 0.0
        self._steps = 0
        self._now = (0, "starting", time.time(), LONG_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._folder.joinpath("heartbeats").mkdir(parents=True, exist_ok=True)
        self._folder.joinpath("logs").mkdir(exist_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._door is not None:
            self._door.close()
        if kind is None:
            self._path(self._rank).unlink(missing_ok=True)

    def phase(self, step: int, name: str, *, limit_s: float | None = None) -> None:
        """This rank begins something of a step. limit_s: how long it may take; None: as steps usually do."""
        now = time.time()
        before, phase, since, _ = self._now
        if step != before and phase != "starting":
            self._steps += 1
            # The first steps of a start compile and warm up; they say nothing of the others.
            if self._steps > 2:
                self._slowest_s = max(self._slowest_s, now - since)
        usual_s = max(LEAST_S, _PATIENCE * self._slowest_s) if self._steps > 2 else LONG_S
        self._now = (step, name, now, usual_s if limit_s is None else limit_s)

    def _watch(self) -> None:
        woken = time.time()
        while not self._ended.wait(_BEAT_S):
            step, phase, since, limit_s = self._now
            slept_s, woken = time.time() - woken, time.time()
            if slept_s > _SILENT_S:
                # The whole process was stopped (Ctrl-Z, a suspended machine): that time isn't its own.
                self._now = (step, phase, since + slept_s, limit_s)
                continue
            self._write()
            if woken - since > limit_s:
                self._explain()
                return

    def _write(self) -> None:
        step, phase, since, _ = self._now
        door = None if self._door is None else self._door.getsockname()[:2]
        beat = Beat(self._rank, self._host, self._pid, step, phase, since, time.time(), door)
        aside = self._path(self._rank).with_suffix(".tmp")
        try:
            aside.write_text(json.dumps(asdict(beat)), encoding="utf-8")
            aside.replace(self._path(self._rank))
        except OSError:
            return  # a full disk must not end the thread that explains things

    def _explain(self) -> None:
        try:
            with (self._folder / "logs" / f"rank_{self._rank}.stack").open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            pass
        # The others notice within a beat or two; their stacks are wanted as well.
        time.sleep(2 * _BEAT_S)
        beats = read_beats(self._folder)
        away = unreachable(beats)
        if 0 in away and 2 * len(away) >= self._size:
            time.sleep(2 * _BEAT_S)  # this is the smaller part of a divided network: the other speaks for the run
        late = diverged(beats, self._size, time.time(), away)
        self._on_hang(explanation(beats, self._size, time.time(), self._stacks(late), away))

    def _stacks(self, ranks: Sequence[int]) -> str:
        found = []
        for rank in ranks[:1]:
            path = self._folder / "logs" / f"rank_{rank}.stack"
            if path.is_file():
                found.append(
                    f"Python stacks of rank {rank} (all ranks: logs/rank_*.stack):\n{path.read_text().strip()}"
                )
        return "\n".join(found)

    def _path(self, rank: int) -> Path:
        return self._folder / "heartbeats" / f"rank_{rank}.json"


def read_beats(folder: Path) -> list[Beat]:
    """The heartbeats in a run folder, by rank; an unreadable one is left out."""
    beats = []
    for path in folder.glob("heartbeats/rank_*.json"):
        try:
            beats.append(Beat(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(beats, key=lambda beat: beat.rank)


def unreachable(beats: Sequence[Beat]) -> set[int]:
    """The ranks on hosts that don't answer from here."""

    def answers(door: tuple[str, int]) -> bool:
        try:
            socket.create_connection(door, timeout=_REACH_S).close()
        except ConnectionRefusedError:
            return True  # the process is gone, the host is there
        except OSError:
            return False
        return True

    # One rank of a host speaks for all of them.
    doors = {beat.door[0]: (beat.door[0], beat.door[1]) for beat in beats if beat.door is not None}
    if not doors:
        return set()
    with ThreadPoolExecutor(max_workers=min(32, len(doors))) as pool:
        reached = dict(zip(doors, pool.map(answers, doors.values()), strict=True))
    return {beat.rank for beat in beats if beat.door is not None and not reached[beat.door[0]]}


def diverged(beats: Sequence[Beat], size: int, now: float, away: Collection[int] = ()) -> list[int]:
    """The ranks that the others wait for: those not heard of, or that can't be reached, or else those that are behind.

    Steps do their collectives in one order, so of ranks that all wait the one in an earlier step, or longest in
    another phase than most, is the one that never came.
    """
    silent = set(range(size)) - {beat.rank for beat in beats if now - beat.time <= _SILENT_S}
    if silent or away or not beats:
        return sorted(silent.union(away))
    behind = [beat for beat in beats if beat.step < max(other.step for other in beats)]
    if behind:
        return [beat.rank for beat in sorted(behind, key=lambda beat: (beat.step, beat.since))]
    phases = [beat.phase for beat in beats]
    usual = max(set(phases), key=phases.count)
    return [beat.rank for beat in sorted(beats, key=lambda beat: beat.since) if beat.phase != usual]


def explanation(beats: Sequence[Beat], size: int, now: float, stacks: str, away: Collection[int] = ()) -> str:
    """A few sentences for a person: who diverged, where everyone is, and the stacks. away: ranks that can't be reached
    from here."""
    heard = {beat.rank: beat for beat in beats}
    late = diverged(beats, size, now, away)
    lines = ["the ranks hang: nothing has moved for longer than a step takes"]
    for rank in late[:8]:
        beat = heard.get(rank)
        if beat is None:
            lines.append(f"  rank {rank} has left no heartbeat")
        elif rank in away:
            assert beat.door is not None
            lines.append(
                f"  rank {rank} on {beat.host} can't be reached at {beat.door[0]}; it was last heard of {now - beat.time:.0f} s "
                f"ago in step {beat.step}, {beat.phase}: its host or the network between is down"
            )
        elif now - beat.time > _SILENT_S:
            lines.append(
                f"  rank {rank} on {beat.host} (pid {beat.pid}) has not been heard of for {now - beat.time:.0f} s; it was "
                f"in step {beat.step}, {beat.phase}: it is gone, stopped or cut off"
            )
        else:
            lines.append(
                f"  rank {rank} on {beat.host} (pid {beat.pid}) has been in step {beat.step}, {beat.phase}, for "
                f"{now - beat.since:.0f} s while the others went on"
            )
    others = [beat for beat in beats if beat.rank not in late]
    if others:
        where = sorted({(beat.step, beat.phase) for beat in others})
        listed = "; ".join(f"step {step}, {phase}" for step, phase in where)
        lines.append(f"  the other {len(others)} of {size} ranks wait in {listed}")
    return "\n".join([*lines, *([stacks] if stacks else [])])
