"""Whether a recipe could run here: read it, then let `arriero train --dry-run` say what follows, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arriero.config.load import load_recipe
from arriero.config.schema import Recipe
from arriero.doctor.finding import Check
from arriero.doctor.machine import usable_memory_bytes
from arriero.errors import UserError
from arriero.units import format_bytes

DRY_RUN = """
import sys
sys.argv = ["arriero", "train", sys.argv[1], "--dry-run", "--json"]
from arriero.__main__ import main
main()
"""
DRY_RUN_LIMIT_S = 180.0


def read_recipe(path: Path | None) -> tuple[Recipe | None, list[Check]]:
    """The recipe, and whether it is one; nothing where none is given."""
    if path is None:
        return None, []
    try:
        recipe = load_recipe(path)
    except UserError as error:
        return None, [Check("recipe", False, error.problem, error.remedy or "mend it: docs/recipe.md has every key")]
    return recipe, [Check("recipe", True, f"{path} is valid")]


def dry_run_checks(
    returncode: int | None, output: str, facts: Mapping[str, Any] | None
) -> tuple[list[Check], dict[str, Any]]:
    """What a dry run has said: what is missing or can't be arranged, and whether its memory is there; and its answer."""
    lines = output.splitlines()
    if returncode != 0:
        where = next((number for number, line in enumerate(lines) if line.startswith("error: ")), None)
        said = lines[where:] if where is not None else lines[-1:] or ["it said nothing"]
        problem = (
            said[0].removeprefix("error: ") if returncode is not None else f"no end within {DRY_RUN_LIMIT_S:.0f} s"
        )
        remedy = " ".join(line.strip() for line in said[1:]) or "arriero train RECIPE --dry-run  (says more)"
        return [Check("dry run", False, problem, remedy)], {}
    answer: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    missing = [entry.partition(": ") for entry in answer["missing"]]
    if missing:
        detail = f"not there yet: {', '.join(name for name, _, _ in missing)}"
        remedy = "\n".join(how.partition("; ")[2] or how for _, _, how in missing)
        return [Check("dry run", False, detail, remedy), *_memory_check(answer, facts)], answer
    steps, batch = f"{answer['steps']:,} steps", f"{answer['global_batch_size']} rows a step"
    ranks = answer["layout"]["ranks"]
    done = Check("dry run", True, f"{steps}, {batch} on {ranks} rank{'s' * (ranks > 1)}")
    return [done, *_memory_check(answer, facts)], answer


def _memory_check(answer: Mapping[str, Any], facts: Mapping[str, Any] | None) -> list[Check]:
    """Planned memory of a rank against its GPU's, or of all ranks against this machine's."""
    if facts is None:
        return []
    needed = answer["memory_bytes"]["total"]
    if facts["devices"]:
        room, where = min(facts["memory"]), f"of a {facts['devices'][0]}"
    else:
        ranks = answer["layout"]["ranks"]
        room, where = (
            usable_memory_bytes() // ranks,
            f"of this machine for each of {ranks} ranks" if ranks > 1 else "of this machine",
        )
    detail = f"planned {format_bytes(needed)} a rank, {format_bytes(room)} {where}"
    remedy = "arriero plan RECIPE  (lists the layouts that need less)"
    return [Check("memory", needed <= room, detail, "" if needed <= room else remedy)]
