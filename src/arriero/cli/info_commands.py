"""``arriero doctor`` and ``arriero keys``: what there is, before anything is trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.errors import UserError

if TYPE_CHECKING:
    from arriero.doctor.finding import Check


def doctor_command(
    recipe: Annotated[
        Path | None, typer.Argument(help="Also check what this recipe needs.", metavar="RECIPE", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What this machine can run, what is missing, and the line that mends it.

    Takes about five seconds: it imports the libraries, lets two ranks meet, compiles a file and writes one. Exit code
    1 if something that training needs is missing.

    Example: arriero doctor recipe.yaml
    """
    from arriero.doctor.finding import all_ok
    from arriero.doctor.run import run_checks

    checks = run_checks(recipe)
    ok = all_ok(checks)
    if as_json:
        fields = ("name", "ok", "detail", "remedy", "required")
        listed = [{field: getattr(check, field) for field in fields} for check in checks]
        typer.echo(json.dumps({"ok": ok, "checks": listed}, ensure_ascii=False))
    else:
        _print_checks(checks, ok=ok)
    if not ok:
        raise typer.Exit(1)


def keys_command(
    system: Annotated[
        str | None, typer.Argument(help="Only this system's names.", metavar="SYSTEM", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Our keys beside the names that other systems use.

    Systems: hf, megatron, deepspeed-chat, torchtitan, litgpt, deepspeed, llama-factory, axolotl.

    Example: arriero keys megatron
    """
    from arriero.config.keys import KEY_MAP, NOTES, SYSTEMS, nearest

    if system is not None and system not in SYSTEMS:
        near = nearest(system, SYSTEMS)
        hint = f"did you mean {near}? " if near else ""
        raise UserError(f"no system is called {system!r}", f"{hint}There are {', '.join(SYSTEMS)}.")
    entries = [
        {"key": key, "system": its_system, "name": name, "note": NOTES.get(name, "")}
        for key, systems in KEY_MAP.items()
        for its_system, names in systems.items()
        if system in (None, its_system)
        for name in names.split()
    ]
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(entry, ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    title = "Other systems' names beside ours" if system is None else f"{SYSTEMS[system]}, beside our keys"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("arriero", style="bold", no_wrap=True)
    table.add_column(system or "elsewhere", overflow="fold")
    shown = ""
    for key, systems in KEY_MAP.items() if system is None else []:
        table.add_row(key, Text("\n".join(f"{name}: {', '.join(names.split())}" for name, names in systems.items())))
    for entry in entries if system is not None else []:
        name = Text(entry["name"]).append(f"  {entry['note']}" if entry["note"] else "", "dim")
        table.add_row(entry["key"] if entry["key"] != shown else "", name)
        shown = entry["key"]
    _console().print(table)


def _print_checks(checks: list[Check], *, ok: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    console = _console()
    marks = {"ok": Text("ok", "green"), "note": Text("note", "yellow"), "fail": Text("fail", "bold red")}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark = marks["ok" if check.ok else "fail" if check.required else "note"]
        table.add_row(mark, check.name, Text(check.detail))
    console.print(table)
    for check in sorted(
        (check for check in checks if check.remedy and not check.ok), key=lambda check: not check.required
    ):
        # Unwrapped, so that a line can be copied as it is.
        console.print(Text(f"\n{check.name}:", "bold red" if check.required else "bold yellow"))
        console.print(Text(check.remedy), soft_wrap=True)
    failed = sum(not check.ok and check.required for check in checks)
    verdict = "This machine can train." if ok else f"{failed} of {len(checks)} checks failed; mend what is marked fail."
    console.print(Text(f"\n{verdict}", "bold green" if ok else "bold red"))


def _console() -> Any:
    from rich.console import Console

    # Into a pipe a row stays on one line, for grep.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)
