"""The run's checkpoints, begun and finished, and its export."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from torch import Tensor

from arriero.checkpoint.export import export_checkpoint
from arriero.checkpoint.layout import folder_name, prune
from arriero.checkpoint.save import Saved
from arriero.config.load import recipe_yaml
from arriero.monitor.heartbeat import LONG_S
from arriero.run import Parts, State, tell_status
from arriero.units import format_count

_PROBE_TOKENS = 16


def save(parts: Parts, state: State, *, wait: bool) -> None:
    """Begin a checkpoint, which is written while training goes on; or, with ``wait``, have it complete on return."""
    finish_saving(parts, state)
    epochs = parts.data.mixture.epochs_at(state.position)
    parts.saver.begin(
        step=state.step,
        trainer={
            **asdict(replace(state, rollbacks=0)),
            "precision": parts.recipe.train.precision,
            "compiled": parts.engine.compiled,
            "steps": parts.plan.steps,
            "loss_scale_state": parts.engine.loss_scale_state(),
            "recipe": recipe_yaml(parts.recipe),
            "sources": [{"name": name, "epochs": count} for name, count in epochs.items()],
        },
        data=parts.data.record(state.position),
        probe=_probe(parts),
    )
    if wait:
        finish_saving(parts, state)


def finish_saving(parts: Parts, state: State) -> None:
    """Have the checkpoint that is on its way complete."""
    parts.heart.phase(state.step, "saving", limit_s=LONG_S)
    saved = parts.saver.wait()
    if saved is not None:
        note_saved(parts, state, saved)


def note_saved(parts: Parts, state: State, saved: Saved) -> None:
    """A checkpoint is complete: drop the oldest beyond the limit, and say so."""
    if parts.world.rank == 0:
        try:
            settings = parts.recipe.checkpoint
            prune(parts.folder.path, settings.save_total_limit, keep_best=settings.keep_best)
        except OSError as error:
            parts.monitor.note(f"an old checkpoint could not be removed: {error}")
    if not saved.copied:
        parts.monitor.note(
            f"training waited {saved.stall_s:.1f} s while {saved.path.name} was written: host memory has no room for a copy "
            "of the state, or it lies on NVMe"
        )
    parts.monitor.checkpoint(saved.step, saved.path.name, saved.seconds, saved.stall_s)
    tell_status(parts, state, "running", "", None)


def _probe(parts: Parts) -> Tensor:
    """The first tokens of the training data, int64 ``[1, L]``: their logits tell an export from the trained model."""
    ids = parts.inputs.sources[0].training[0].input_ids[:_PROBE_TOKENS]
    return torch.from_numpy(ids)[None].to(parts.world.device)


def export(parts: Parts, state: State) -> None:
    """Write ``final/`` from the last checkpoint, on rank 0."""
    parts.heart.phase(state.step, "exporting", limit_s=LONG_S)

    def write() -> None:
        done = export_checkpoint(parts.folder.path / folder_name(state.step), parts.folder, parts.folder.final)
        parts.monitor.note(
            f"exported {format_count(done.parameters)} parameters to {done.path}; its logits match the trained model's "
            + (f"within {done.max_logit_difference:.2g}" if done.max_logit_difference else "exactly")
        )

    parts.world.on_first(write)
