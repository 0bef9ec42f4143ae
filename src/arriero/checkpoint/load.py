"""Read a checkpoint into an engine of any layout: each rank takes the slices that it holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from arriero.checkpoint.layout import list_checkpoints, newest_intact, read_manifest, verify
from arriero.checkpoint.saved import SavedState, set_random_state
from arriero.engine.engine import Engine
from arriero.engine.parallel import World
from arriero.errors import UserError


def choose_checkpoint(run: Path, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to continue from, or None for a new run, and what a person should be told.

    resume: ``auto``, ``never`` or the path of a checkpoint. Raises ``UserError`` where a named one is broken, where
    there are checkpoints but none is intact, and where ``never`` meets an existing run.
    """
    existing = list_checkpoints(run)
    if resume == "never":
        if existing:
            raise UserError(
                f"{run} holds {len(existing)} checkpoints, and checkpoint.resume_from_checkpoint is never",
                "Give this run another output_dir, or let it continue (auto).",
            )
        return None, []
    if resume != "auto":
        verdict = verify(Path(resume))
        if not verdict.intact:
            raise UserError(f"{resume} can't be continued from: {verdict.reason}")
        return Path(resume), []
    found, passed_over = newest_intact(run)
    notes = [f"passed over {verdict.path.name}: {verdict.reason}" for verdict in passed_over]
    if found is None and existing:
        listed = "\n".join(f"  {verdict.path.name}: {verdict.reason}" for verdict in passed_over)
        raise UserError(
            f"{run} holds checkpoints, but none is intact:\n{listed}",
            "A run is never begun anew in silence: remove them or give another output_dir to start from the beginning.",
        )
    return found, notes


def load_state(checkpoint: Path, engine: Engine, *, updates: int) -> None:
    """Set masters, moments and Adam's count of updates, then the weights that forward passes use."""
    engine.begin_optimizer_state(updates)
    with SavedState(checkpoint) as saved, torch.no_grad():
        for piece in engine.state_slices(writes=True):
            saved.expect({piece.parameter: piece.shape})
            for kind, target in {"master": piece.master, **piece.moments}.items():
                saved.read_into(target, piece.parameter, kind, piece.start, piece.columns)
    engine.publish_masters()


def load_random_state(checkpoint: Path, world: World, *, seed: int) -> str | None:
    """Put this rank's random generators back; a rank that the saved run didn't have gets a seed of its own.

    Returns a note where the number of ranks has changed. A missing file of a rank that was there is an error.
    """
    saved_size = read_manifest(checkpoint)["world_size"]
    if world.rank < saved_size:
        set_random_state(load_file(checkpoint / f"random_state-{world.rank:05}.safetensors"))
    else:
        torch.manual_seed(seed + world.rank)
        np.random.seed((seed + world.rank) % 2**32)
    if world.size == saved_size:
        return None
    return f"ranks: {saved_size} saved, {world.size} continue"
