"""``arriero recipes …``: those that are shipped, one made for this machine, one made of another system's."""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arriero.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.resources.abc import Traversable

    from arriero.config.schema import ModelShape


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
    wide = max(len(name) for name, _ in found)
    for name, description in found:
        typer.echo(f"{name:<{wide}}  {description}")


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
    _write_new(target, text)
    typer.echo(f"{target}\nNext: arriero train {target} --dry-run")


def recipes_new(
    out: Annotated[Path, typer.Argument(help="The recipe to write.", metavar="OUT", show_default=False)],
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="A prepared dataset, or files, a folder or a glob of text; may be given again."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A tokenizer folder; default: one is trained.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="A Hugging Face folder or hub name to continue.")] = None,
    size: Annotated[str | None, typer.Option("--size", help="Parameters of a new model: 125M, 1B.")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Shape of a new model: a config.json, or YAML with LlamaConfig's keys."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Tokens of the run; default: 20 a parameter, or one pass to continue."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Which, as in plan; default: this machine's, or its CPU.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="How many; default: this machine's.")] = None,
) -> None:
    """Write a recipe for your text and your machine: size, batch, schedule, and the layout that the planner finds best.

    Asks for what isn't given, on a terminal. Says what the recipe costs and which commands come next.

    Example: arriero recipes new my.yaml --data corpus --size 125M --gpu H100-SXM --gpus 8
    """
    from arriero.new_recipe import Wish, new_recipe
    from arriero.units import parse_count

    if out.exists():  # before anything is asked
        raise UserError(f"{out} exists already", "Give another name, or remove it first.")
    asks = _at_terminal()
    given = list(data or [])
    if not given and asks:
        given = typer.prompt("Your text, or a prepared dataset (folder, file or glob)").split()
    if not given:
        raise UserError("recipes new: no --data is given", "Name a folder of text, or a prepared dataset.")
    if asks and model is None and size is None and config is None:
        size, model = _ask_model()
    if asks and tokenizer is None and model is None:
        tokenizer = typer.prompt("Tokenizer folder (empty: train one)", default="", show_default=False) or None
    if asks and tokens is None:
        tokens = typer.prompt("Tokens (empty: as many as such a model wants)", default="", show_default=False) or None
    if sum(choice is not None for choice in (model, size, config)) > 1:
        raise UserError(
            "recipes new: --model continues a model, --size and --config make a new one", "Give one of them."
        )
    wish = Wish(
        data=tuple(given),
        tokenizer=tokenizer,
        model=model,
        shape=_read_shape(config) if config is not None else None,
        parameters=_number("--size", size, parse_count),
        tokens=_number("--tokens", tokens, parse_count),
        gpu=gpu,
        gpus=gpus,
    )
    made = new_recipe(wish, out)
    _write_new(out, made.text)
    typer.echo(f"{out}\nplanned   {made.cost}\nhow sure  {made.certainty}\n\nNext:")
    for command in made.commands:
        typer.echo(f"  {command}")


def recipes_convert(
    what: Annotated[
        str,
        typer.Argument(help="The file, or the command line in quotes.", metavar="FILE_OR_COMMAND", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="The recipe to write; default: it is printed.", show_default=False)
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="GPUs that it ran on, where it doesn't say that itself.")
    ] = None,
) -> None:
    """Turn another system's settings into a recipe, and say what could not be carried over.

    Takes a DeepSpeed-Chat command or a script with one, Hugging Face's TrainingArguments as JSON, or a LLaMA-Factory YAML
    with stage: pt.

    Example: arriero recipes convert run_llama2_7b.sh --gpus 8 --out my.yaml
    """
    from arriero.convert.convert import convert

    made = convert(what, gpus=gpus)
    if out is None:
        sys.stdout.write(made.text)
    else:
        _write_new(out, made.text)
        typer.echo(f"{out}\nNext:")
        for command in (*made.commands, f"arriero train {out} --dry-run"):
            typer.echo(f"  {command}")
    for name, why in made.dropped.items():
        typer.echo(f"not carried over  {name} ({why})", err=True)


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask_model() -> tuple[str | None, str | None]:
    """(size of a new model, or the model to continue)."""
    answer = typer.prompt("Size of a new model (125M, 1B), or a folder or hub name to continue").strip()
    return (answer, None) if answer[:1].isdigit() and "/" not in answer else (None, answer)


def _number(option: str, text: str | None, parse: Callable[[object], int]) -> int | None:
    if text is None:
        return None
    try:
        number = parse(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None
    if number < 1:
        raise UserError(f"{option} {text}: expected more than nothing")
    return number


def _read_shape(path: Path) -> ModelShape:
    from arriero.config.load import parse_yaml
    from arriero.config.schema import ModelShape

    file = path / "config.json" if path.is_dir() else path
    try:
        value = parse_yaml(file.read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise UserError(f"--config: can't read {file}: {error.strerror}") from None
    if not isinstance(value, dict):
        raise UserError(f"--config: {file} holds {type(value).__name__}, expected the keys of a LlamaConfig")
    known = {name: value[name] for name in ModelShape.model_fields if value.get(name) is not None}
    try:
        return ModelShape.model_validate(known)
    except ValueError as error:
        raise UserError(f"--config: {file} doesn't describe a LLaMA-like model: {error}") from None


def _write_new(target: Path, text: str) -> None:
    """Write a file that isn't there; ``UserError`` where it is, or can't be written."""
    if target.exists():
        raise UserError(f"{target} exists already", "give another name, or remove it first")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:  # "x": nor one that appears in this moment
            file.write(text)
    except OSError as error:
        raise UserError(f"{target} can't be written: {error.strerror}", "give another place") from error


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
