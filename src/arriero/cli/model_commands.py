"""``arriero eval``, ``export`` and ``checkpoints …``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.cli import options
from arriero.cli.folders import model_folder
from arriero.errors import UserError

if TYPE_CHECKING:
    from arriero.run_folder import RunFolder

RunArgument = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN", show_default=False)]
StepOption = Annotated[int | None, typer.Option("--step", help="Checkpoint of that step; default: the newest intact.")]


def export_command(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", help="Where the folder goes.")],
    step: StepOption = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="hf: a Hugging Face folder; gguf: for llama.cpp; universal: DeepSpeed's universal checkpoint.",
        ),
    ] = "hf",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bf16, fp16 or fp32; default: as it was trained.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Of a file of weights, such as 500MB; default: 5GB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a checkpoint as a model that others read; kept only if its logits match the trained model's.

    Example: arriero export runs/my-run --out my-model
    """
    from arriero.checkpoint.export import export_checkpoint

    folder = _run_folder(run)
    done = export_checkpoint(
        _checkpoint(folder, step), folder, out, form=form, dtype=dtype, max_shard_size=max_shard_size
    )
    if as_json:
        typer.echo(json.dumps({**asdict(done), "path": str(done.path)}))
    else:
        typer.echo(
            f"{done.path}: {done.parameters:,} parameters in {len(done.files)} files; logits match the trained model's "
            f"within {done.max_logit_difference:.2g}"
        )


def eval_command(
    model: options.Model,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="A prepared dataset; may be given several times.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="Tasks of lm-eval, separated by commas (extra: eval).")
    ] = None,
    task_folder: Annotated[
        Path | None,
        typer.Option("--task-folder", help="Your own tasks: a folder of lm-eval's YAML files and their data."),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", min=2, help="Tokens of a row; default: the model's context, at most 2048."),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="validation or train.")] = "validation",
    max_rows: Annotated[
        int | None, typer.Option("--max-rows", min=1, help="At most this many rows per dataset, or questions per task.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows at once.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Loss, perplexity and bits per byte on a dataset's held-out documents, every row exactly once; or tasks of lm-eval.

    Example: arriero eval runs/my-run --data data/code --tasks mules --task-folder my-tasks
    """
    folder = model_folder(model)
    if not data and not tasks:
        raise UserError("eval: on what? Neither --data nor --tasks is given", "Give --data DATASET, or --tasks NAME.")
    result: dict[str, Any] = {}
    if data:
        from arriero.evaluate.model import evaluate_folder

        result |= evaluate_folder(folder, data, seq_len=seq_len, split=split, max_rows=max_rows, batch_size=batch_size)
    if tasks:
        from arriero.evaluate.harness import run_tasks

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        result["tasks"] = run_tasks(folder, names, task_folder=task_folder, max_rows=max_rows, batch_size=batch_size)
    if as_json:
        typer.echo(json.dumps(result))
        return
    if data:
        _show_scores(result, many=len(data) > 1)
    for name, metrics in result.get("tasks", {}).items():
        typer.echo(f"{name}: " + ", ".join(f"{metric} {value:.4g}" for metric, value in metrics.items()))


def _show_scores(result: dict[str, Any], *, many: bool) -> None:
    together = [("together", result)] if many else []
    for name, one in [*result["sources"].items(), *together]:
        bits = f"{one['bits_per_byte']:.4f} bits per byte, " if one["bits_per_byte"] is not None else ""
        typer.echo(
            f"{name}: loss {one['loss']:.4f}, perplexity {one['perplexity']:.2f}, {bits}{one['target_tokens']:,} targets"
        )


def checkpoints_list(run: RunArgument) -> None:
    """The checkpoints of a run, oldest first, with their sizes and evaluation losses; the best is marked.

    Example: arriero checkpoints list runs/my-run
    """
    from arriero.checkpoint.layout import best_checkpoint, list_checkpoints, own_eval_loss
    from arriero.units import format_bytes

    folder = _run_folder(run).path
    best = best_checkpoint(folder)
    for path in list_checkpoints(folder):
        loss = own_eval_loss(path)
        words = [path.name, format_bytes(sum(file.stat().st_size for file in path.iterdir()))]
        words += [] if loss is None else [f"eval_loss {loss:.4f}"]
        typer.echo("  ".join([*words, *(["best"] if path == best else [])]))


def checkpoints_verify(
    run: RunArgument, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False
) -> None:
    """Compare every file of every checkpoint with its hash; exit code 1 if one is damaged.

    Example: arriero checkpoints verify runs/my-run
    """
    from arriero.checkpoint.layout import list_checkpoints, verify

    verdicts = [verify(path) for path in list_checkpoints(_run_folder(run).path)]
    for verdict in verdicts:
        if as_json:
            typer.echo(json.dumps({"step": verdict.step, "intact": verdict.intact, "reason": verdict.reason}))
        else:
            typer.echo(f"{verdict.path.name}  {'intact' if verdict.intact else verdict.reason}")
    if not all(verdict.intact for verdict in verdicts):
        raise typer.Exit(1)


def checkpoints_prune(
    run: RunArgument, keep: Annotated[int, typer.Option("--keep", min=1, help="Whole checkpoints to keep, the newest.")]
) -> None:
    """Remove the oldest whole checkpoints, but for the best one where the run's recipe keeps it (checkpoint.keep_best).

    Example: arriero checkpoints prune runs/my-run --keep 1
    """
    from arriero.checkpoint.layout import prune
    from arriero.config.load import load_recipe

    folder = _run_folder(run)
    with folder.held():
        for path in prune(folder.path, keep, keep_best=load_recipe(folder.config).checkpoint.keep_best):
            typer.echo(f"removed {path.name}")


def _run_folder(path: Path) -> RunFolder:
    from arriero.run_folder import RunFolder

    run = RunFolder(path)
    if not run.config.is_file():
        raise UserError(f"{path} is no run folder: it has no config.yaml")
    return run


def _checkpoint(run: RunFolder, step: int | None) -> Path:
    from arriero.checkpoint.layout import folder_name, list_checkpoints, newest_intact, verify

    if step is None:
        found, passed_over = newest_intact(run.path)
        for verdict in passed_over:
            typer.echo(f"passed over {verdict.path.name}: {verdict.reason}", err=True)
        if found is None:
            raise UserError(f"{run.path} holds no intact checkpoint")
        return found
    verdict = verify(run.path / folder_name(step))
    if not verdict.intact:
        known = ", ".join(path.name for path in list_checkpoints(run.path)) or "none"
        raise UserError(f"{verdict.path}: {verdict.reason}", f"Checkpoints there: {known}.")
    return verdict.path
