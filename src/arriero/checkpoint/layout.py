"""What a checkpoint is on disk: names, the manifest, which one is newest and intact, which may go. No tensors here."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import orjson
import xxhash

from arriero.disk import hash_file
from arriero.errors import UserError
from arriero.units import format_bytes

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is whole, and why not."""

    path: Path
    step: int
    reason: str | None

    @property
    def intact(self) -> bool:
        return self.reason is None


def folder_name(step: int) -> str:
    return f"checkpoint-{step}"


def list_checkpoints(run: Path) -> list[Path]:
    """The folders that are named as checkpoints, oldest first, whole or not."""
    found = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UserError(f"{path} is not named as a checkpoint is (checkpoint-<step>)")
    return int(match[1])


def file_entry(path: Path) -> dict[str, Any]:
    """What the manifest says of a file: size in bytes and xxh3-128."""
    return {"size": path.stat().st_size, "xxh3": hash_file(path)}


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest; ``ValueError`` with the reason where there is none or it can't be read."""
    try:
        manifest = orjson.loads((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ValueError("it has no manifest.json: it was never completed") from None
    except orjson.JSONDecodeError as error:
        raise ValueError(f"manifest.json is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"manifest.json is not of format {FORMAT_VERSION}")
    return manifest


def verify(checkpoint: Path, *, content: bool = True) -> Verdict:
    """Compare every file with the manifest, by size and content hash; without ``content`` by size alone."""
    step = step_of(checkpoint)
    if not checkpoint.is_dir():
        return Verdict(checkpoint, step, "there is no such folder")
    try:
        manifest = read_manifest(checkpoint)
    except ValueError as error:
        return Verdict(checkpoint, step, str(error))
    body = {key: value for key, value in manifest.items() if key != "xxh3"}
    if manifest.get("xxh3") != manifest_hash(body):
        return Verdict(checkpoint, step, "manifest.json doesn't match its own hash")
    for name, entry in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return Verdict(checkpoint, step, f"{name} is missing")
        if path.stat().st_size != entry["size"]:
            return Verdict(checkpoint, step, f"{name} has {path.stat().st_size} bytes, expected {entry['size']}")
        if content and hash_file(path) != entry["xxh3"]:
            return Verdict(checkpoint, step, f"{name} doesn't match its hash")
    return Verdict(checkpoint, step, None)


def manifest_hash(body: dict[str, Any]) -> str:
    """Hash of the manifest's other keys, kept inside it."""
    return xxhash.xxh3_128(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


def newest_intact(run: Path) -> tuple[Path | None, list[Verdict]]:
    """The newest whole checkpoint, and the verdicts on the newer ones that were passed over."""
    passed_over: list[Verdict] = []
    for path in reversed(list_checkpoints(run)):
        verdict = verify(path)
        if verdict.intact:
            return path, passed_over
        passed_over.append(verdict)
    return None, passed_over


def set_aside_later(run: Path, checkpoint: Path) -> list[str]:
    """Rename the run's checkpoints behind the one that is continued from: their steps will be done again.

    Returns a note for each.
    """
    notes = []
    for path in list_checkpoints(run):
        if step_of(path) > step_of(checkpoint):
            aside = path.with_name(f"abandoned-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            notes.append(f"{path.name} is behind the checkpoint that is continued from; it is now {aside.name}")
    return notes


def check_space(run: Path, parameters: int) -> None:
    """``UserError`` where the run's disk has no room for one checkpoint: better now than at the first save.

    A checkpoint holds 12 bytes a parameter: an fp32 master and two moments.
    """
    wanted = 12 * parameters
    free = shutil.disk_usage(run).free
    if free < wanted:
        raise UserError(
            f"{run}: its disk has {format_bytes(free)} free, and one checkpoint takes {format_bytes(wanted)} "
            f"(12 bytes for each of {parameters:,} parameters)",
            "Free some space (arriero checkpoints prune), or give an output_dir on a larger disk.",
        )


def own_eval_loss(checkpoint: Path) -> float | None:
    """The loss of the evaluation that was made at the checkpoint's own step; None where there was none."""
    try:
        state = orjson.loads((checkpoint / "trainer_state.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    evaluation = state.get("evaluation", {})
    loss = evaluation.get("eval_loss") if evaluation.get("eval_step") == state.get("step") else None
    return loss if loss is not None and isfinite(loss) else None


def best_checkpoint(run: Path) -> Path | None:
    """The complete checkpoint with the lowest evaluation loss of its own step, the newest among equals."""
    complete = [path for path in list_checkpoints(run) if verify(path, content=False).intact]
    scored = [(loss, -step_of(path), path) for path in complete if (loss := own_eval_loss(path)) is not None]
    return min(scored)[2] if scored else None


def prune(run: Path, keep: int | None, *, keep_best: bool = False) -> list[Path]:
    """Remove the oldest complete checkpoints beyond ``keep``; those with files missing or cut neither count nor go.

    keep_best: the best one stays too, beyond those.
    """
    if keep is None:
        return []
    complete = [path for path in list_checkpoints(run) if verify(path, content=False).intact]
    best = best_checkpoint(run) if keep_best else None
    gone = [path for path in complete[: max(0, len(complete) - keep)] if path != best]
    for path in gone:
        # By one rename it is no checkpoint any more; what a crash leaves of it is cleared by the next save.
        aside = path.rename(path.with_name(f"tmp-{path.name}"))
        shutil.rmtree(aside)
    return gone
