"""``arriero demo``, ``train`` and ``data show``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.cli.ranks import be_rank, count_ranks
from arriero.errors import UserError
from arriero.run_folder import RunFolder

if TYPE_CHECKING:
    from arriero.config.schema import Recipe
    from arriero.engine.parallel import World
    from arriero.launch.local import Hosts, Outcome
    from arriero.resolve import Inputs, Outline

RecipeArgument = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE", show_default=False)]


def demo_command(
    output_dir: Annotated[Path, typer.Option("--output-dir", help="The run folder.")] = Path("runs/demo"),
    nproc: Annotated[int, typer.Option("--nproc", help="Ranks.")] = 2,
) -> None:
    """The whole road on this machine's CPU in about two minutes: text, tokenizer, dataset, training, a model that writes.

    The corpus is the Python standard library's own source files. Everything lies in one folder afterwards.

    Example: arriero demo
    """
    from arriero.demo import demo

    demo(output_dir, nproc)


def train_command(
    context: typer.Context,
    recipe: RecipeArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Values to change, e.g. optim.learning_rate=2e-4.", metavar="[section.key=value …]"),
    ] = None,
    nproc: Annotated[
        str, typer.Option("--nproc", help="Ranks on this host; auto: one per GPU, or on a CPU those of one replica.")
    ] = "auto",
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", min=0, help="Start the ranks again this often when one dies or they hang."),
    ] = 0,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print nothing but errors; metrics.jsonl and logs/ have it all.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
    deepspeed_config: Annotated[
        str | None,
        typer.Option("--deepspeed_config", "--deepspeed-config", help="Raw DeepSpeed JSON, as deepspeed=FILE."),
    ] = None,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
    deepspeed: Annotated[bool, typer.Option("--deepspeed", hidden=True)] = False,
    nnodes: Annotated[
        int | None, typer.Option("--nnodes", min=1, help="Hosts that each run this command.", show_default="this one")
    ] = None,
    node_rank: Annotated[int, typer.Option("--node-rank", min=0, help="This host among them.")] = 0,
    master_addr: Annotated[str | None, typer.Option("--master-addr", help="Where the others find host 0.")] = None,
    master_port: Annotated[int, typer.Option("--master-port", help="A free port there.")] = 29500,
) -> None:
    """Train a recipe, or continue: the same command after a crash goes on from the newest intact checkpoint.

    Starts its own ranks, or is one rank where torchrun, deepspeed, accelerate, srun or mpirun has started it.

    Example: arriero train recipe.yaml optim.learning_rate=2e-4
    """
    from arriero.config.load import load_recipe
    from arriero.launch.environment import adopt_launcher
    from arriero.monitor.sinks import check_trackers

    if nnodes is None:  # with it, this process starts ranks, whatever an operator calls its pod
        adopt_launcher()
    changes = [*(overrides or []), *([f"deepspeed={deepspeed_config}"] if deepspeed_config else [])]
    loaded = load_recipe(recipe, changes)
    check_trackers(loaded.log.report_to)
    if dry_run:
        _dry_run(loaded, count_ranks(nproc, on_cpu=loaded.parallel.replica_ranks), as_json)
    elif nnodes is None and "RANK" in os.environ:
        if quiet:
            _silence()
        _work(loaded, changes)
    else:
        hosts = _hosts(nnodes, node_rank, master_addr, master_port)
        ranks = count_ranks(nproc, on_cpu=loaded.parallel.replica_ranks)
        outcome = _start(recipe, [*changes, *(["--quiet"] if quiet else [])], ranks, max_restarts, hosts)
        if outcome.exit_code:
            if outcome.exit_code != 2:
                _note_failure(loaded, outcome)
            if outcome.exit_code != 75:  # then rank 0 has said it
                typer.echo(f"error: {outcome.message}", err=True)
            raise typer.Exit(outcome.exit_code)


def _hosts(nnodes: int | None, node_rank: int, master_addr: str | None, master_port: int) -> Hosts | None:
    from arriero.launch.local import Hosts

    if nnodes in (None, 1):
        return None
    assert nnodes is not None
    if master_addr is None:
        raise UserError(f"--nnodes {nnodes} needs --master-addr", "Give every host the name or address of host 0.")
    if node_rank >= nnodes:
        raise UserError(f"--node-rank {node_rank}: with --nnodes {nnodes} hosts are 0 to {nnodes - 1}")
    return Hosts(nnodes, node_rank, master_addr, master_port)


def _start(recipe: Path, overrides: list[str], nproc: int, max_restarts: int, hosts: Hosts | None) -> Outcome:
    from arriero.launch.local import run_ranks

    return run_ranks(["train", str(recipe), *overrides], nproc, max_restarts=max_restarts, hosts=hosts)


def _silence() -> None:
    """Send this process's output nowhere, that of libraries included; errors still come."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _note_failure(recipe: Recipe, outcome: Outcome) -> None:
    """A rank that was killed can't write down that it was; the process that started it can."""
    run = RunFolder(Path(recipe.output_dir))
    if outcome.exit_code == 1 and run.state.is_file():
        first, *rest = outcome.message.split("\n")
        # A traceback ends with what was raised; other explanations begin with what matters.
        more = rest[-1:] if "Traceback (most recent call last)" in outcome.message else rest[:1]
        run.write_failure(" ".join([first, *(line.strip() for line in more)]), outcome.exit_code)


def _work(recipe: Recipe, overrides: list[str]) -> None:
    from arriero.launch.signals import note_early_stop

    note_early_stop()
    run = RunFolder(Path(recipe.output_dir))

    def rank(world: World) -> int:
        from arriero.launch.local import leave_outcome
        from arriero.training import PREEMPTED, train  # after joining: DeepSpeed looks for an accelerator when imported

        code = train(recipe, overrides, world)
        if code == PREEMPTED:  # every host's ranks say so to the process that started them
            leave_outcome(code, str(run.read_state()["reason"]))
        return code

    be_rank(rank, run)


def _dry_run(recipe: Recipe, nproc: int, as_json: bool) -> None:
    from arriero.describe import goes_on_from
    from arriero.engine.parallel import choose_accelerator, device_memory_bytes, device_name, world_size
    from arriero.planner.arithmetic import flops_per_token
    from arriero.resolve import deepspeed_config, outline, planned, resolve, shape_of

    checkpoint = goes_on_from(recipe)
    ranks = world_size() if "RANK" in os.environ else nproc
    device_bytes, on_gpu = device_memory_bytes(nproc)
    given: dict[str, Any] = {"memory_bytes": device_bytes, "on_gpu": on_gpu}
    outlined = None if checkpoint is not None else outline(recipe, ranks, **given)
    inputs = outlined or resolve(recipe, ranks, checkpoint, weights=False, **given)
    plan, layout = inputs.plan, inputs.layout
    choose_accelerator()
    ds_config, notes, origins = deepspeed_config(inputs)
    memory, _ = planned(inputs, device_name(), nproc)
    value: dict[str, Any] = {
        "continues_from": checkpoint and checkpoint.name,
        "steps": plan.steps,
        "tokens_per_step": plan.tokens_per_step,
        "global_batch_size": plan.global_batch_size,
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "dp": plan.dp,
        "parameters": plan.parameters,
        "flops_per_token": flops_per_token(shape_of(inputs.config), inputs.config.vocab_size, plan.seq_len),
        "layout": {
            "zero_stage": recipe.parallel.zero_stage,
            "ranks": layout.ranks,
            "precision": recipe.train.precision,
            "tensor_parallel_size": layout.tensor,
            "sequence_parallel_size": layout.sequence,
            "pipeline_parallel_size": layout.pipeline,
        },
        "epochs": plan.epochs,
        "memory_bytes": {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
            "logits": memory.logits,
            "buffers": memory.buffers,
            "total": memory.total,
        },
        "device": "this CPU" if device_name() == "cpu" else device_name(),
        "padding": {
            source.name: source.training.packed.padding(plan.seq_len)
            for source in inputs.sources
            if source.training.packed
        },
        "learning_rates": _learning_rates(recipe, plan.steps),
        "ds_config": ds_config,
        "ds_config_sources": origins,
        "notes": [*inputs.notes, *notes],
        "missing": outlined.missing if outlined is not None else [],
    }
    typer.echo(json.dumps(value, ensure_ascii=False) if as_json else _describe(value, inputs))


def _short(inputs: Inputs | Outline) -> int:
    """Rows that the last step lacks."""
    plan, stand = inputs.plan, inputs.stand
    left: int = plan.end - stand.get("position", 0)
    steps: int = plan.steps - stand.get("step", 0)
    return steps * plan.global_batch_size - left


def _learning_rates(recipe: Recipe, steps: int) -> dict[int, float]:
    """The schedule at its turning points: enough to see its shape."""
    from arriero.engine.schedule import learning_rates, warmup_updates

    rate, warmup = learning_rates(recipe.optim, steps), warmup_updates(recipe.optim, steps)
    shown = {1, min(max(warmup, 1), steps), *(max(1, steps * part // 4) for part in (1, 2, 3)), steps}
    return {update: rate(update) for update in sorted(shown)}


def _describe(value: dict[str, Any], inputs: Inputs | Outline) -> str:
    from arriero.units import format_bytes, format_count

    recipe, short = inputs.recipe, _short(inputs)
    epochs = ", ".join(f"{name} {count:.3g}" for name, count in value["epochs"].items())
    lines = [
        f"model          {format_count(value['parameters'])} parameters, {recipe.train.precision}, "
        f"{format_count(value['flops_per_token'])} operations per token",
        f"steps          {value['steps']:,} of {format_count(value['tokens_per_step'])} tokens"
        + (f", those behind {value['continues_from']} still to do" if value["continues_from"] else ""),
        (
            f"global batch   {value['global_batch_size']} rows = {value['per_device_train_batch_size']} per micro-batch × "
            f"{value['gradient_accumulation_steps']} accumulated × {value['dp']} data-parallel ranks"
        ),
        *([f"               the last step has {short} rows less"] if short else []),
        f"layout         ZeRO-{recipe.parallel.zero_stage} on {inputs.layout.describe()}",
        f"epochs         {epochs or 'unknown, as the data is'}",
        *(f"padding        {share:.2%} of the rows of {name}" for name, share in value["padding"].items()),
        "learning rate  " + ", ".join(f"{rate:.3g} at {update}" for update, rate in value["learning_rates"].items()),
        "memory a rank  "
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in value["memory_bytes"].items())
        + f" (on {value['device']}, from shapes: each part at its largest; the total is the peak)",
        *(f"note           {note}" for note in value["notes"]),
        *_value_lines(value["ds_config"], value["ds_config_sources"]),
        *(f"not there yet  {missing}" for missing in value["missing"]),
        *(["               all above is from shapes alone, and training would not start"] if value["missing"] else []),
    ]
    return "\n".join(lines)


def _value_lines(ds_config: dict[str, Any], sources: dict[str, str]) -> list[str]:
    """Each value of DeepSpeed's dictionary with where it came from."""
    rows = []
    for path, source in sources.items():
        value: Any = ds_config
        for key in path.split("."):
            value = value[key]
        rows.append((path, json.dumps(value), source))
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{path:<{wide[0]}}  {value:<{wide[1]}}  {source}" for path, value, source in rows]
    return [f"{'DeepSpeed' if number == 0 else '':<15}{line}" for number, line in enumerate(lines)]


def data_show(
    what: Annotated[Path, typer.Argument(help="A recipe or a dataset.", metavar="RECIPE_OR_DATASET")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.key=value …]", show_default=False)] = None,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank whose rows are shown.")] = 0,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Ranks of the run.")] = 1,
    start_step: Annotated[int, typer.Option("--start-step", min=1, help="First step shown; the run's first is 1.")] = 1,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps shown.")] = 1,
    seq_len: Annotated[int, typer.Option("--seq-len", min=2, help="Tokens of a row, for a dataset.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
) -> None:
    """The rows that a rank would see: ids, targets, positions, source and documents, without training.

    Of a recipe whose run has begun, behind its newest checkpoint those that the run will take from there.

    Example: arriero data show recipe.yaml --rank 1 --world-size 2 --steps 3 --json
    """
    if rank >= world_size:
        raise UserError(f"--rank {rank}: with --world-size {world_size} ranks are 0 to {world_size - 1}")
    inputs = _inputs_to_show(what, overrides or [], world_size, seq_len)
    plan = inputs.plan
    if start_step > plan.steps:
        raise UserError(f"--start-step {start_step} is behind the run's last step {plan.steps}")
    first = _first_position(inputs, start_step)
    for step in range(start_step, min(start_step + steps, plan.steps + 1)):
        batches = inputs.data.micro_batches(
            first + (step - start_step) * plan.global_batch_size,
            end=plan.end,
            rank=inputs.layout.dp_rank(rank),
            size=inputs.layout.dp,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
        )
        for micro_step, batch in enumerate(batches):
            for place, row in zip(batch.places, batch.rows, strict=True):
                shown = {
                    "step": step,
                    "rank": rank,
                    "micro_step": micro_step,
                    "position": place.position,
                    "source": inputs.sources[place.source].name if place.source >= 0 else None,
                    "row": place.row,
                    "epoch": place.epoch,
                    "documents": row.documents.tolist(),
                    "input_ids": row.input_ids.tolist(),
                    "targets": row.targets.tolist(),
                    "position_ids": row.position_ids.tolist(),
                }
                typer.echo(json.dumps(shown) if as_json else _row_text(shown, inputs.tokenizer))


def data_seen(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN", show_default=False)],
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="After that step; default: the newest checkpoint.")
    ] = None,
    document: Annotated[
        str | None,
        typer.Option(
            "--document", help="FILE:ROW of one document, as documents-*.parquet names it: at which steps it was seen."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How often each source and document has been seen.

    Example: arriero data seen runs/my-run --document code.jsonl:17
    """
    from dataclasses import asdict

    from arriero.history import document_history, open_history

    history = open_history(run, step)
    value: dict[str, Any] = {
        "step": history.step,
        "sources": {name: asdict(seen) for name, seen in history.sources.items()},
        "passed_over": history.passed_over,
    }
    if document is not None:
        value["document"] = document_history(history, document)
    if as_json:
        typer.echo(json.dumps(value))
        return
    typer.echo(f"after step {history.step}")
    for name, seen in history.sources.items():
        typer.echo(
            f"{name}: {seen.rows:,} rows, {seen.epochs:.4g} epochs, {seen.documents_seen:,} of {seen.documents:,} documents "
            f"seen, the most often {seen.max_times}×"
        )
    for start, stop in history.passed_over:
        typer.echo(
            f"of these rows {stop - start:,}, positions {start:,} to {stop - 1:,}, were passed over by a rollback"
        )
    times = dict.fromkeys((one["source"], one["step"], one["epoch"]) for one in value.get("document", []))
    for source, when, epoch in times:
        typer.echo(f"{document} of {source}: step {when}, epoch {epoch}")
    if value.get("document") == []:
        typer.echo(f"{document} has not been seen")


def _inputs_to_show(what: Path, overrides: list[str], world_size: int, seq_len: int) -> Inputs:
    from arriero.config.load import load_recipe
    from arriero.describe import goes_on_from
    from arriero.engine.parallel import device_memory_bytes
    from arriero.resolve import resolve, show_dataset

    if what.suffix not in {".yaml", ".yml"}:
        return show_dataset(what, world_size, seq_len)
    recipe, checkpoint = load_recipe(what, overrides), None
    try:
        checkpoint = goes_on_from(recipe)
    except UserError as error:
        typer.echo(f"{error.problem}\nThese are the rows of a new run by this recipe.", err=True)
    memory, on_gpu = device_memory_bytes(world_size)
    return resolve(recipe, world_size, checkpoint, memory_bytes=memory, on_gpu=on_gpu)


def _first_position(inputs: Inputs, step: int) -> int:
    """Where a step begins; ``UserError`` for one that the run took by another recipe."""
    plan, stand = inputs.plan, inputs.stand
    done, position = stand.get("step", 0), stand.get("position", 0)
    if step > done:
        return int(position + (step - 1 - done) * plan.global_batch_size)
    if inputs.data.mixture.start.position or position != min(done * plan.global_batch_size, plan.end):
        raise UserError(
            f"the run took step {step} by another mixture, seq_len or batch size, or passed rows over; it stands at step {done}",
            f"Ask for --start-step {done + 1} or later, or give another output_dir for the rows of a new run.",
        )
    return (step - 1) * plan.global_batch_size


def _row_text(shown: dict[str, Any], tokenizer: Any) -> str:
    counted = sum(target != -100 for target in shown["targets"])
    head = (
        f"step {shown['step']} rank {shown['rank']} micro-step {shown['micro_step']} position {shown['position']}: "
        f"{shown['source'] or 'padding'} row {shown['row']}, epoch {shown['epoch']}, {len(shown['documents'])} documents, "
        f"{counted} targets"
    )
    if tokenizer is None:
        return f"{head}\n  {shown['input_ids'][:32]} …"
    text = tokenizer.decode(shown["input_ids"]).replace("\n", "⏎")
    return f"{head}\n  {text[:400]}{'…' if len(text) > 400 else ''}"
