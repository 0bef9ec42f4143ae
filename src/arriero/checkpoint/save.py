"""Write a checkpoint: every rank its own slices of the state, aside; the manifest last; then one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
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


def save_checkpoint(
    run: Path, engine: Engine, world: World, *, step: int, trainer: dict[str, Any], data: dict[str, Any], probe: Tensor
) -> Path:
    """Write ``checkpoint-<step>`` and return its path; every rank must call it.

    trainer, data: JSON values carried along unread. probe: token ids int64 ``[1, L]`` whose logits are stored with the
    checkpoint, so that an export can be compared with the engine later, without it.
    A whole checkpoint of that step is left as it is; whatever else has its name is replaced. A failure on one rank is
    raised on all of them.
    """
    final = run / folder_name(step)
    if world.from_first(final.exists() and verify(final).intact):
        return final
    aside = run / f"tmp-{folder_name(step)}"
    logits = engine.logits(probe)

    def clear() -> None:
        for stale in run.glob("tmp-checkpoint-*"):
            shutil.rmtree(stale)
        aside.mkdir(parents=True)

    _together(world, clear if world.rank == 0 else _nothing)
    mine = _together(world, lambda: _write_rank(aside, engine, world))
    files = {name: entry for part in mine for name, entry in part["files"].items()}
    parameters: dict[str, Any] = {}
    for part in mine:
        for name, shape, where in part["slices"]:
            parameters.setdefault(name, {"shape": shape, "slices": []})["slices"].append(where)

    def publish() -> None:
        whole = {"trainer_state.json": trainer, "data_state.json": data}
        for name, value in whole.items():
            (aside / name).write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))
            files[name] = _synced_entry(aside / name)
        save_file({"input_ids": probe.cpu(), "logits": logits}, aside / "probe.safetensors")
        files["probe.safetensors"] = _synced_entry(aside / "probe.safetensors")
        body = {
            "format_version": FORMAT_VERSION,
            "arriero": __version__,
            "step": step,
            "world_size": world.size,
            "parameters": parameters,
            "files": files,
        }
        (aside / MANIFEST).write_bytes(orjson.dumps(body | {"xxh3": manifest_hash(body)}, option=orjson.OPT_INDENT_2))
        _synced_entry(aside / MANIFEST)
        sync_folder(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        sync_folder(run)

    _together(world, publish if world.rank == 0 else _nothing)
    return final


def _write_rank(aside: Path, engine: Engine, world: World) -> dict[str, Any]:
    """Write this rank's files; returns their manifest entries and the slices in them."""
    files: dict[str, Any] = {}
    slices: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []
    for part, pieces in enumerate(_parts(engine)):
        name = f"state-{world.rank:05}{f'-{part}' if part else ''}.safetensors"
        tensors: dict[str, Tensor] = {}
        for piece, values in pieces:
            where = {"file": name, "start": piece.start, "stop": piece.start + values["master"].numel()}
            if piece.columns is not None:
                where["columns"] = piece.columns
            slices.append((piece.parameter, piece.shape, where))
            tensors |= {f"{piece.parameter}/{kind}": value for kind, value in values.items()}
        save_file(tensors, aside / name)
        files[name] = _synced_entry(aside / name)
    random_file = f"random_state-{world.rank:05}.safetensors"
    save_file(random_state(), aside / random_file)
    files[random_file] = _synced_entry(aside / random_file)
    return {"files": files, "slices": slices}


_Piece = tuple[StateSlice, dict[str, Tensor]]


def _parts(engine: Engine) -> Iterator[list[_Piece]]:
    """The rank's slices, a file's worth at a time: what is offloaded to NVMe needn't fit into memory as a whole."""
    pieces: list[_Piece] = []
    held_bytes = 0
    for piece in engine.state_slices():
        if not piece.counted:
            continue
        if not piece.master.isfinite().all():
            raise OSError(f"{piece.parameter} is not finite, and such weights are never saved as a checkpoint")
        values = {"master": piece.master, **piece.moments}
        # A slice that was read from NVMe lives only until the next one.
        values = {kind: v.clone() if engine.swaps else v.cpu().contiguous() for kind, v in values.items()}
        pieces.append((piece, values))
        held_bytes += sum(value.nbytes for value in values.values())
        if held_bytes >= _FILE_BYTES:
            yield pieces
            pieces, held_bytes = [], 0
    if pieces:
        yield pieces


def _synced_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_entry(path)


def _nothing() -> None:
    return None


def _together(world: World, work: Callable[[], Any]) -> list[Any]:
    """Do the work on this rank and wait for the others; if it failed on any rank, raise on all of them."""
    value, problem = None, None
    try:
        value = work()
    except (OSError, SafetensorError) as error:
        problem = f"rank {world.rank}: {error}"
    outcomes = world.gather((value, problem))
    problems = [problem for _, problem in outcomes if problem is not None]
    if problems:
        raise UserError(
            "the checkpoint could not be written:\n" + "\n".join(f"  {problem}" for problem in problems),
            "The older checkpoints are untouched; the same command continues from them.",
            exit_code=1,
        )
    return [value for value, _ in outcomes]
