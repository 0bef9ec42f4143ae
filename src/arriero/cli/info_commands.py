"""``arriero doctor``, ``arriero recipes …`` and ``arriero keys``: what there is, before anything is trained."""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.errors import UserError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from arriero.doctor import Check


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
    from arriero.doctor import all_ok, run_checks

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


def recipes_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """The recipes that are shipped.

    Example: arriero recipes list
    """
    found = [(name, _description(file)) for name, file in _recipes().items()]
    if as_json:
        for name, description in found:
            typer.echo(json.dumps({"name": name, "description": description}, ensure_ascii=False))
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("recipe", style="bold", no_wrap=True)
    table.add_column("what it is")
    for name, description in found:
        table.add_row(name, description)
    _console().print(table)


def recipes_show(name: Annotated[str, typer.Argument(help="A name that `arriero recipes list` shows.")]) -> None:
    """Print a shipped recipe.

    Example: arriero recipes show demo/tiny_cpu
    """
    sys.stdout.write(_recipe(name).read_text(encoding="utf-8"))


def recipes_copy(
    name: Annotated[str, typer.Argument(help="A name that `arriero recipes list` shows.")],
    dest: Annotated[Path, typer.Argument(help="The file to write, or a folder to put it in.")],
) -> None:
    """Copy a shipped recipe, to change it. An existing file is left alone.

    Example: arriero recipes copy demo/tiny_cpu my.yaml
    """
    text = _recipe(name).read_text(encoding="utf-8")
    target = dest / f"{name.rpartition('/')[2]}.yaml" if dest.is_dir() else dest
    if target.exists():
        raise UserError(f"{target} exists already", "give another name, or remove it first")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:  # "x": nor one that appears in this moment
            file.write(text)
    except OSError as error:
        raise UserError(f"{target} can't be written: {error.strerror}", "give another place") from error
    typer.echo(f"{target}\nNext: arriero train {target}")


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


def _recipes() -> dict[str, Traversable]:
    """Shipped recipes by name: the path under ``recipes`` without ``.yaml``."""
    found: dict[str, Traversable] = {}
    folders = [("", resources.files("arriero") / "recipes")]
    while folders:
        prefix, folder = folders.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((f"{prefix}{entry.name}/", entry))
            elif entry.name.endswith(".yaml"):
                found[f"{prefix}{entry.name.removesuffix('.yaml')}"] = entry
    return dict(sorted(found.items()))


def _recipe(name: str) -> Traversable:
    recipes = _recipes()
    found = recipes.get(name.removesuffix(".yaml"))
    if found is None:
        from arriero.config.keys import nearest

        near = nearest(name, recipes)
        hint = f"did you mean {near}? " if near else ""
        raise UserError(f"no shipped recipe is called {name!r}", f"{hint}There are {', '.join(recipes)}.")
    return found


def _description(recipe: Traversable) -> str:
    """The first comment line."""
    first, _, _ = recipe.read_text(encoding="utf-8").partition("\n")
    return first.lstrip("# ").strip() if first.startswith("#") else ""
