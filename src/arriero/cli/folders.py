"""Which Hugging Face folders a path stands for: itself, a run's final model, or a checkpoint that is exported first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from arriero.errors import UserError

if TYPE_CHECKING:
    from arriero.run_folder import RunFolder


def model_folder(path: Path) -> Path:
    """The Hugging Face folder that a path stands for; a run folder's is its ``final``."""
    if (path / "final" / "config.json").is_file():
        return path / "final"
    if (path / "config.yaml").is_file():
        raise UserError(
            f"{path} is a run that has not finished, so it has no exported model yet",
            f"Export a checkpoint first: arriero export {path} --out {path}-model",
        )
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is neither a run folder nor a Hugging Face model folder")
    return path


def loadable(model: Path, aside: Path, name: str | None = None) -> dict[str, Callable[[], Path]]:
    """What can be loaded from a path, by name, the best first: a folder itself, or a checkpoint; a run's final model and
    its checkpoints.

    A checkpoint is exported under ``aside`` when it is first asked for.
    """
    from arriero.checkpoint.layout import list_checkpoints, newest_intact
    from arriero.run_folder import RunFolder

    name = name or model.resolve().name
    run = RunFolder(model)
    if not run.config.is_file():
        if (model / "manifest.json").is_file() and RunFolder(model.parent).config.is_file():
            return {name: partial(exported, model, RunFolder(model.parent), aside)}
        if not (model / "config.json").is_file():
            raise UserError(f"{model} is neither a run folder nor a Hugging Face model folder")
        return {name: lambda: model}
    steps: dict[str, Callable[[], Path]] = {
        f"{name}@{path.name.rpartition('-')[2]}": partial(exported, path, run, aside)
        for path in reversed(list_checkpoints(model))
    }
    if (run.final / "config.json").is_file():
        return {name: lambda: run.final, **steps}
    found, passed_over = newest_intact(model)
    for verdict in passed_over:
        typer.echo(f"passed over {verdict.path.name}: {verdict.reason}", err=True)
        steps.pop(f"{name}@{verdict.step}", None)
    if found is None:
        raise UserError(f"{model} is a run without a whole checkpoint yet", "Wait for its first one.")
    typer.echo(f"{model} has not finished: this is {found.name}", err=True)
    return {name: partial(exported, found, run, aside), **steps}


def exported(checkpoint: Path, run: RunFolder, aside: Path) -> Path:
    """A checkpoint as a Hugging Face folder, written once, if its files are whole and its logits the trained model's."""
    from arriero.checkpoint.export import export_checkpoint
    from arriero.checkpoint.layout import verify

    out = aside / checkpoint.name
    if not out.exists():
        verdict = verify(checkpoint)
        if not verdict.intact:
            raise UserError(f"{checkpoint.name}: {verdict.reason}")
        export_checkpoint(checkpoint, run, out)
    return out
