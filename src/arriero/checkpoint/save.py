"""Write checkpoints while training goes on: every rank its own slices, aside; the manifest last; then one rename.

A save has three stages. Each rank copies its state into host memory (the only time that training waits) and a thread
of its own writes the copy. Once all ranks have written theirs, rank 0's thread writes the manifest and renames the
folder. The threads never talk to other ranks: what they have done travels in the numbers that all ranks add up at every
step anyway (``signals`` and ``heard``).
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from arriero.__version__ import __version__
from arriero.checkpoint.layout import FORMAT_VERSION, MANIFEST, file_entry, folder_name, manifest_hash, verify
from arriero.checkpoint.saved import random_state
from arriero.disk import sync_folder
from arriero.engine.engine import Engine
from arriero.engine.parallel import World
from arriero.engine.state import StateSlice
from arriero.errors import UserError

# A state file takes no further slice beyond this.
_FILE_BYTES = 4 * 1024**3
# A full or failing disk is given this long to recover.
_RETRY_AFTER_S = (1.0, 2.0, 4.0)
# Some memory must be left for whatever else grows.
_MEMORY_SHARE = 0.8
_WAIT_S = 0.01


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete."""

    path: Path
    step: int
    stall_s: float
    """Time that training waited for it."""
    seconds: float
    """Time from its beginning until it was complete."""
    copied: bool
    """False where the whole of it was written while training waited, on this rank."""


@dataclass(frozen=True)
class _Job:
    """A checkpoint on its way."""

    step: int
    final: Path
    aside: Path
    began: float
    whole: dict[str, Any]
    """JSON files that rank 0 writes: name → value."""
    probe: dict[str, Tensor]


@dataclass(frozen=True)
class _StateFile:
    """One file of slices: tensors by name, and where each slice belongs."""

    name: str
    tensors: dict[str, Tensor]
    slices: list[tuple[str, tuple[int, ...], dict[str, Any]]]


class Saver:
    """Writes the checkpoints of one run, one at a time. Every rank makes the same calls in the same order.

    ``begin`` starts one; between steps, the sums over all ranks of ``signals()`` are given to ``heard``, which returns
    the checkpoint once it is complete and raises ``UserError`` on all ranks where it failed on any; ``wait`` does so
    until it is through. Host memory of one copy of the rank's state is kept for the next save.
    """

    def __init__(self, run: Path, engine: Engine, world: World) -> None:
        self._run, self._engine, self._world = run, engine, world
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None
        self._written = self._published = self._publishing = False
        self._failure: str | None = None
        self._stall_s, self._copied = 0.0, True
        self._copies: dict[str, Tensor] = {}

    def begin(self, *, step: int, trainer: dict[str, Any], data: dict[str, Any], probe: Tensor) -> bool:
        """Copy the state of ``step`` and begin to write ``checkpoint-<step>``; False where it is already there, intact.

        trainer, data: JSON values carried along unread. probe: token ids int64 ``[1, L]`` whose logits are stored with
        the checkpoint, so that an export can be compared with the engine later, without it. Whatever else has the
        checkpoint's name is replaced. One that is still on its way is waited for by the caller (``wait``).
        """
        assert self._job is None, "one checkpoint at a time"
        began = time.perf_counter()
        final = self._run / folder_name(step)
        if self._world.from_first(final.exists() and verify(final).intact):
            return False
        aside = self._run / f"tmp-{folder_name(step)}"
        logits = self._engine.logits(probe)
        _together(self._world, lambda: self._clear(aside) if self._world.rank == 0 else None)
        whole = {"trainer_state.json": trainer, "data_state.json": data}
        self._job = _Job(step, final, aside, began, whole, {"input_ids": probe.cpu(), "logits": logits})
        self._written = self._published = self._publishing = False
        self._failure = None
        randoms = random_state()
        self._copied = not self._engine.swaps and self._fits()
        if not self._copied:
            # Nothing can be held twice here: written file by file while training waits.
            self._guarded(lambda: self._write(_files(self._world.rank, self._engine, _owned_copy), randoms))
        else:
            files = list(_files(self._world.rank, self._engine, self._copy))
            if self._world.device.type == "cuda":
                torch.cuda.synchronize()
            self._start(lambda: self._write(iter(files), randoms))
        self._stall_s = time.perf_counter() - began
        return True

    def signals(self) -> list[float]:
        """What this rank has to say between two steps: whether its part is written, failed, and published."""
        return [float(self._written), float(self._failure is not None), float(self._published)]

    def heard(self, totals: Sequence[float]) -> Saved | None:
        """Go on with what all ranks' ``signals`` add up to."""
        written, failed, published = totals
        if self._job is None:
            return None
        if failed:
            self._fail()
        if published:
            self._join()
            job, self._job = self._job, None
            return Saved(job.final, job.step, self._stall_s, time.perf_counter() - job.began, self._copied)
        # `total` counts the ranks of one replica as one.
        if written == self._world.dp_size and not self._publishing:
            self._join()
            self._written, self._publishing = False, True
            if self._world.rank == 0:
                self._start(self._publish)
        return None

    def wait(self) -> Saved | None:
        """Until the checkpoint on its way is complete; None where there is none."""
        while self._job is not None:
            saved = self.heard(self._world.total(self.signals()).tolist())
            if saved is not None:
                return saved
            time.sleep(_WAIT_S)
        return None

    def _clear(self, aside: Path) -> None:
        for stale in self._run.glob("tmp-checkpoint-*"):
            shutil.rmtree(stale)
        aside.mkdir(parents=True)

    def _fits(self) -> bool:
        """Whether host memory takes a copy of this rank's state, or has it already."""
        wanted = sum(t.nbytes for piece in self._engine.state_slices() for t in (piece.master, *piece.moments.values()))
        held = sum(copy.nbytes for copy in self._copies.values())
        return held >= wanted or wanted - held < _MEMORY_SHARE * psutil.virtual_memory().available

    def _copy(self, name: str, value: Tensor) -> Tensor:
        """The value in host memory, in the place that the last save's copy had."""
        copy = self._copies.get(name)
        if copy is None or copy.shape != value.shape:
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == "cuda")
            self._copies[name] = copy
        return copy.copy_(value, non_blocking=True)

    def _start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._guarded, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised on all ranks at the next step boundary
            self._failure = f"rank {self._world.rank}: {error}"

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, files: Iterator[_StateFile], randoms: dict[str, Tensor]) -> None:
        """This rank's files, and what the manifest must know of them."""
        job, rank = self._job, self._world.rank
        assert job is not None
        entries: dict[str, Any] = {}
        slices: list[Any] = []
        for file in files:
            for parameter, _, _ in file.slices:
                if not file.tensors[f"{parameter}/master"].isfinite().all():
                    raise ValueError(f"{parameter} is not finite, and such weights are never saved as a checkpoint")
            slices += file.slices
            entries[file.name] = _written(job.aside / file.name, partial(save_file, file.tensors))
        name = f"random_state-{rank:05}.safetensors"
        entries[name] = _written(job.aside / name, partial(save_file, randoms))
        if rank == 0:
            for name, value in job.whole.items():
                entries[name] = _written(job.aside / name, partial(_write_json, value))
            name = "probe.safetensors"
            entries[name] = _written(job.aside / name, partial(save_file, job.probe))
        part = {"files": entries, "slices": slices}
        _written(job.aside / f"part-{rank:05}.json", partial(_write_json, part))
        self._written = True

    def _publish(self) -> None:
        """Rank 0, when all ranks' parts are there: the manifest, and the name that makes it a checkpoint."""
        job = self._job
        assert job is not None
        files: dict[str, Any] = {}
        parameters: dict[str, Any] = {}
        for rank in range(self._world.size):
            path = job.aside / f"part-{rank:05}.json"
            part = orjson.loads(path.read_bytes())
            files |= part["files"]
            for name, shape, where in part["slices"]:
                parameters.setdefault(name, {"shape": shape, "slices": []})["slices"].append(where)
            path.unlink()
        body = {
            "format_version": FORMAT_VERSION,
            "arriero": __version__,
            "step": job.step,
            "world_size": self._world.size,
            "parameters": parameters,
            "files": files,
        }
        _written(job.aside / MANIFEST, partial(_write_json, body | {"xxh3": manifest_hash(body)}))
        sync_folder(job.aside)
        if job.final.exists():
            shutil.rmtree(job.final)
        job.aside.rename(job.final)
        sync_folder(self._run)
        self._published = True

    def _fail(self) -> None:
        """Every rank's reason, on all ranks; what was written aside goes."""
        job, self._job = self._job, None
        assert job is not None
        self._join()
        problems = [problem for problem in self._world.gather(self._failure) if problem is not None]
        if self._world.rank == 0:
            shutil.rmtree(job.aside, ignore_errors=True)
        raise UserError(
            f"{job.final.name} could not be written:\n" + "\n".join(f"  {problem}" for problem in problems),
            "The older checkpoints are untouched; the same command continues from them.",
            exit_code=1,
        )


def save_checkpoint(
    run: Path, engine: Engine, world: World, *, step: int, trainer: dict[str, Any], data: dict[str, Any], probe: Tensor
) -> Path:
    """Write ``checkpoint-<step>``, wait for it and return its path; every rank must call it. See ``Saver.begin``."""
    saver = Saver(run, engine, world)
    saver.begin(step=step, trainer=trainer, data=data, probe=probe)
    saver.wait()
    return run / folder_name(step)


def _files(rank: int, engine: Engine, copy: Callable[[str, Tensor], Tensor]) -> Iterator[_StateFile]:
    """The rank's slices, a file's worth at a time: what is offloaded to NVMe needn't fit into memory as a whole."""
    held: list[tuple[StateSlice, dict[str, Tensor]]] = []
    held_bytes, number = 0, 0
    for piece in engine.state_slices():
        if not piece.counted:
            continue
        values = {"master": piece.master, **piece.moments}
        copies = {kind: copy(f"{piece.parameter}/{piece.start}/{kind}", value) for kind, value in values.items()}
        held.append((piece, copies))
        held_bytes += sum(value.nbytes for value in copies.values())
        if held_bytes >= _FILE_BYTES:
            yield _state_file(rank, number, held)
            held, held_bytes, number = [], 0, number + 1
    if held:
        yield _state_file(rank, number, held)


def _state_file(rank: int, number: int, held: Sequence[tuple[StateSlice, dict[str, Tensor]]]) -> _StateFile:
    name = f"state-{rank:05}{f'-{number}' if number else ''}.safetensors"
    slices = []
    for piece, values in held:
        where: dict[str, Any] = {"file": name, "start": piece.start, "stop": piece.start + values["master"].numel()}
        if piece.columns is not None:
            where["columns"] = piece.columns
        slices.append((piece.parameter, piece.shape, where))
    tensors = {f"{piece.parameter}/{kind}": value for piece, values in held for kind, value in values.items()}
    return _StateFile(name, tensors, slices)


def _owned_copy(name: str, value: Tensor) -> Tensor:
    """A slice that was read from NVMe lives only until the next one."""
    return value.cpu().clone()


def _written(path: Path, write: Callable[[Path], None]) -> dict[str, Any]:
    """Write a file, have it on disk, and give its manifest entry; an error of the disk is waited out for a while."""
    for pause_s in (*_RETRY_AFTER_S, None):
        try:
            write(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            return file_entry(path)
        except (OSError, SafetensorError):
            if pause_s is None:
                raise
            time.sleep(pause_s)
    raise AssertionError("unreachable")


def _write_json(value: Any, path: Path) -> None:
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))


def _together(world: World, work: Callable[[], Any]) -> None:
    """Do the work on this rank and wait for the others; if it failed on any rank, raise on all of them."""
    problem = None
    try:
        work()
    except OSError as error:
        problem = f"rank {world.rank}: {error}"
    problems = [found for found in world.gather(problem) if found is not None]
    if problems:
        raise UserError(
            "the checkpoint could not be written:\n" + "\n".join(f"  {found}" for found in problems),
            "The older checkpoints are untouched; the same command continues from them.",
            exit_code=1,
        )
