"""``arriero check``."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.cli.ranks import be_rank, count_ranks
from arriero.errors import UserError

if TYPE_CHECKING:
    from arriero.config.schema import Recipe
    from arriero.engine.parallel import World

_ROWS = 8
_MEASURES = ("loss", "grad_norm", "weights", "leak")


def check_command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.key=value …]", show_default=False)] = None,
    nproc: Annotated[
        str, typer.Option("--nproc", help="Most ranks that are tried; auto: one per GPU, or two on a CPU.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[Path | None, typer.Option("--out", hidden=True)] = None,
    rows: Annotated[int | None, typer.Option("--rows", hidden=True)] = None,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """The self-test: an update of this recipe is the same in every layout the machine can run, and documents don't leak.

    Three steps of the recipe's own rows, with its architecture made small, against a plain PyTorch loop: every ZeRO
    stage, one rank and several, whole and split micro-batches, fp32 and the recipe's precision.

    Example: arriero check recipe.yaml
    """
    from arriero.config.load import load_recipe
    from arriero.launch.environment import adopt_launcher

    adopt_launcher()
    loaded = load_recipe(recipe, overrides or [])
    if "RANK" in os.environ:
        be_rank(lambda world: _rank(loaded, world, rows or _step_rows(world.size), out, as_json), None)
    most = count_ranks(nproc, on_cpu=max(min(2, len(os.sched_getaffinity(0))), loaded.parallel.replica_ranks))
    checks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="arriero-check-") as scratch:
        for ranks in _worlds(most):
            checks += _launch([str(recipe), *(overrides or [])], ranks, _step_rows(most), Path(scratch))
    raise typer.Exit(_tell(checks, as_json))


def _worlds(most: int) -> list[int]:
    """The numbers of ranks that are tried: powers of two up to ``most``, and ``most``."""
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def _step_rows(most: int) -> int:
    """Rows of a step: a number that every world divides, so that all take the same rows."""
    return lcm(_ROWS, *_worlds(most))


def _launch(arguments: list[str], ranks: int, rows: int, scratch: Path) -> list[dict[str, Any]]:
    from arriero.launch.local import run_ranks

    out = scratch / f"{ranks}.json"
    outcome = run_ranks(["check", *arguments, "--out", str(out), "--rows", str(rows)], ranks)
    if outcome.exit_code:
        raise UserError(outcome.message, exit_code=outcome.exit_code)
    return list(json.loads(out.read_text(encoding="utf-8")))


def _rank(recipe: Recipe, world: World, rows: int, out: Path | None, as_json: bool) -> int:
    from arriero.check import check_layouts  # after joining: DeepSpeed looks for an accelerator when imported

    checks = [asdict(check) for check in check_layouts(recipe, world, rows)]
    code = 0
    if world.rank == 0 and out is None:
        code = _tell(checks, as_json)
    elif world.rank == 0 and out is not None:
        out.write_text(json.dumps(checks), encoding="utf-8")
    world.barrier()
    return code


def _tell(checks: list[dict[str, Any]], as_json: bool) -> int:
    passed = all(check["passed"] for check in checks)
    typer.echo(json.dumps({"passed": passed, "checks": checks}) if as_json else _table(checks))
    return 0 if passed else 1


def _table(checks: list[dict[str, Any]]) -> str:
    """One line a layout: how far each measure is from the plain loop; ! where that is beyond its tolerance."""
    layouts: dict[str, dict[str, dict[str, Any]]] = {}
    for check in checks:
        layout, measure = check["name"].rsplit(": ", 1)
        layouts.setdefault(layout, {})[measure] = check
    width = max(len(layout) for layout in layouts)
    lines = [f"{'layout':<{width}}" + "".join(f"{name.replace('_', ' '):>12}" for name in _MEASURES)]
    for layout, found in layouts.items():
        cells = (_cell(found.get(measure)) for measure in _MEASURES)
        lines.append(f"{layout:<{width}}" + "".join(f"{cell:>12}" for cell in cells))
    failed = sum(not check["passed"] for check in checks)
    verdict = f"{failed} of {len(checks)} checks failed (!)" if failed else f"all {len(checks)} checks passed"
    return "\n".join([*lines, f"{verdict}; relative differences from a plain PyTorch loop of the same rows"])


def _cell(check: dict[str, Any] | None) -> str:
    if check is None:
        return "—"
    return f"{check['worst_difference']:.1e}{'' if check['passed'] else ' !'}"
