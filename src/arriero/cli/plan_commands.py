"""``arriero plan``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.errors import UserError

if TYPE_CHECKING:
    from arriero.config.schema import Recipe
    from arriero.engine.parallel import World
    from arriero.planner.plan import Forecast, Planner

# Of the cores that a probe could have had; on a machine that does nothing else it got 0.98 to 0.99 of two.
_QUIET = 0.85


def plan_command(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Values to change, e.g. data.seq_len=8192.", metavar="[section.key=value …]"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs (or ranks on a CPU); default: this machine's.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="Which, e.g. H100-SXM, A100-80GB, RTX-4090, cpu; default: this machine's."),
    ] = None,
    per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, help="GPUs that share a node's fast links; default 8.")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option("--network", help="Between nodes: infiniband, roce or ethernet, and Gb/s of a node: roce-1600."),
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", min=0, help="Of one GPU for an hour; default: a table's list price.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First measure what this machine's devices reach: some seconds.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="Layouts shown as text; --json gives all.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a run will need and take: memory of a rank, step time, days, cost; layouts, best first. Needs no GPU.

    Predicted from shapes and data sheets, or from what --calibrate has measured; docs/planner.md says how well.

    Example: arriero plan recipe.yaml --gpus 64 --gpu H100-SXM
    """
    if calibrate:
        rates = _calibrate(gpus)
        if not as_json:
            typer.echo("measured  " + ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items()))
        if rates.get("got_share", 1.0) < _QUIET:
            typer.echo(
                f"note: this measurement got {rates['got_share']:.0%} of its cores; other programs or a limit had the rest, so "
                "the rates are too low for a machine that does nothing else: measure again when nothing else runs",
                err=True,
            )
        if recipe is None:
            if as_json:
                typer.echo(json.dumps(rates))
            return
    if recipe is None:
        raise UserError("plan: which RECIPE?", "For example: arriero plan recipe.yaml --gpus 8 --gpu H100-SXM")
    from arriero.config.load import load_recipe
    from arriero.planner.plan import plan

    loaded = load_recipe(recipe, overrides or [])
    planner = plan(
        loaded,
        gpus=gpus,
        gpu=gpu,
        per_node=per_node,
        network=network,
        price=price,
        tokens=_tokens_of_epochs(loaded),
    )
    layouts = planner.ranked()
    typer.echo(json.dumps(_record(planner, layouts)) if as_json else _describe(planner, layouts, top))


def _calibrate(ranks: int | None) -> dict[str, float]:
    """Probe this machine, on a CPU with several ranks at once where asked for; what was measured, per rank."""
    from arriero.engine.parallel import device_name
    from arriero.planner.calibration import measured_rates

    if "RANK" in os.environ:
        from arriero.cli.ranks import be_rank

        be_rank(_probe, None)
    if ranks is not None and ranks > 1 and device_name() == "cpu":
        from arriero.launch.local import run_ranks

        outcome = run_ranks(["plan", "--calibrate"], ranks)
        if outcome.exit_code:
            raise UserError(outcome.message, exit_code=1)
    else:
        _probe(None)
    return measured_rates(_device_name())


def _probe(world: World | None) -> int:
    """Be one of the ranks that measure at the same time; the first one writes what it found."""
    from arriero.calibrate import measure_rates
    from arriero.planner.calibration import save_calibration

    rates = measure_rates(world)
    if world is None or world.rank == 0:
        save_calibration(_device_name(), rates, ranks=world.size if world is not None else 1)
    return 0


def _device_name() -> str:
    """This rank's device as the table has it, or else as its driver does."""
    from arriero.engine.parallel import device_name
    from arriero.planner.hardware import find_device

    try:
        return find_device(device_name()).name
    except UserError:
        return device_name()


def _tokens_of_epochs(recipe: Recipe) -> int | None:
    """Tokens of a run that counts in passes; None where a dataset isn't there yet."""
    if recipe.train.num_train_epochs is None:
        return None
    from arriero.data.shards import open_dataset

    try:
        held = sum(open_dataset(Path(source.path)).splits["train"].tokens for source in recipe.data.sources)
    except UserError:
        return None
    return round(recipe.train.num_train_epochs * held)


def _record(planner: Planner, layouts: Sequence[Forecast]) -> dict[str, Any]:
    machine = planner.machine
    return {
        "gpu": machine.device.name,
        "gpus": machine.ranks,
        "network": machine.network.name,
        "price_per_gpu_hour": machine.price_per_hour,
        "parameters": planner.parameters,
        "tokens": planner.tokens,
        "layouts": [one.record() for one in layouts],
    }


def _describe(planner: Planner, layouts: Sequence[Forecast], top: int) -> str:
    from arriero.planner.hardware import PRICES_FROM
    from arriero.planner.plan import recipe_lines
    from arriero.units import format_bytes, format_count

    machine, device = planner.machine, planner.machine.rank_device
    price = machine.price_per_hour
    length = "an unknown number of" if planner.tokens is None else format_count(planner.tokens)
    lines = [
        f"{format_count(planner.parameters)} parameters, {length} tokens, {planner.recipe.train.precision}, rows of "
        f"{planner.recipe.data.seq_len:,}",
        f"{machine.ranks} × {machine.device.name} with {format_bytes(device.memory_bytes)}"
        + (f", {machine.network.name} between nodes" if machine.ranks > device.per_node else "")
        + (f", {price:g} per GPU-hour (list prices of {PRICES_FROM}; --price)" if price is not None else ""),
        "",
    ]
    own = next((one for one in layouts if one.own), None)
    if own is None:
        try:
            planner.own_layout()
        except UserError as error:
            lines += [f"the recipe as it stands doesn't come out: {error.problem}", error.remedy, ""]
    lines.append(f"     {'layout':<50} memory a rank        step  tokens/s   MFU  time     cost")
    shown = [*layouts[:top], *([own] if own is not None and own not in layouts[:top] else [])]
    lines += [_row(one, layouts.index(one) + 1) for one in shown]
    if own is not None:
        lines += ["", "the recipe's layout (*):", *_parts(own)]
    best = layouts[0] if layouts else None
    if best is not None and best.fits and not best.own:
        lines += ["", "lines for the best:", recipe_lines(best)]
    if best is not None and not best.fits:
        lines += ["", "nothing fits: more GPUs, larger ones, shorter rows or a smaller model"]
    return "\n".join(lines)


def _row(one: Forecast, place: int) -> str:
    from arriero.units import format_bytes, format_count, format_time

    length = "" if one.days is None else format_time(one.days * 86_400)
    return (
        f"{'*' if one.own else ' '}{place:>3} {_layout_words(one):<54} {format_bytes(one.memory.total):>10}"
        f"{'' if one.fits else ' !':<3} {one.time.total:>7.3g} s {format_count(one.tokens_per_second):>9} "
        f"{one.mfu:>5.0%}  {length:<8} {'' if one.cost is None else f'{one.cost:,.0f}'}"
    )


def _layout_words(one: Forecast) -> str:
    layout = one.layout
    words = [f"ZeRO-{layout.zero_stage}"]
    sizes = (("TP", layout.tensor), ("SP", layout.sequence), ("PP", layout.pipeline), ("DP", layout.dp))
    words += [f"{name} {size}" for name, size in sizes if size > 1]
    words += [f"{layout.micro_batch} × {layout.accumulation} rows"]
    words += ["checkpointing"] if layout.checkpoint_every else []
    if layout.offload_param != "none":
        words.append("all offloaded")
    elif layout.offload_optimizer != "none":
        words.append("Adam offloaded")
    return ", ".join(words)


def _parts(one: Forecast) -> list[str]:
    from arriero.units import format_bytes, format_time

    memory, time = one.memory, one.time
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    return [
        "  memory      " + ", ".join(f"{name} {format_bytes(getattr(memory, name))}" for name in names),
        f"              peak {format_bytes(memory.total)}, of it tensors {format_bytes(memory.allocated)}"
        + (f"; host {format_bytes(memory.host)}" if memory.host else ""),
        "  step        " + ", ".join(f"{name.replace('_', ' ')} {part:.3g} s" for name, part in time.__dict__.items()),
        f"  checkpoint  {format_bytes(one.checkpoint_bytes)}, about {format_time(one.checkpoint_s)} at 2 GB/s",
    ]
