"""Writes docs/recipe.md from the schema: every key with its kind, default and meaning, which stand there and nowhere else.

python docs/make_recipe_page.py            writes the page
python docs/make_recipe_page.py --check    exit 1 if the page isn't what the schema says
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from arriero.config import schema

PAGE = Path(__file__).with_name("recipe.md")

_HEAD = """\
<!-- Written by docs/make_recipe_page.py (make docs): change the docstrings in src/arriero/config/schema.py instead. -->

# The recipe

A recipe is a YAML file that describes one run. It names what it is read from and where it writes; everything else has a
default. `arriero train RECIPE --dry-run` shows what follows from it, and every run writes the whole recipe, defaults
included, to `config.yaml` in its run folder.

Keys can be changed on the command line, by their dotted path and in YAML; entries of a list are counted from 0:

```sh
arriero train recipe.yaml optim.learning_rate=2e-4 data.sources.0.weight=0.7
```

All problems of a recipe are reported at once, each by its key's path. An unknown key is an error that names the nearest
one, or the key of ours that another system's name means (`arriero keys`).

How values are written:

| kind | examples | |
| --- | --- | --- |
| count | `64`, `500M`, `2B`, `100_000` | a whole number, at least 1 unless the table says otherwise; k, M, B and T are powers of a thousand |
| number | `0.1`, `2e-5` | |
| time | `3h30m`, `90s`, `2d` | a bare number is seconds |
| switch | `true`, `false` | `yes` and `on` are texts here, not switches |
| text | `runs/demo` | paths are relative to the folder that the command runs in |

**required** means that there is no default. Where a kind lists values, those are all; where it lists a single one, this
version has no other yet.
"""

# The aliases of the schema, as people call them.
_KINDS = {schema.Count: "count", schema.Positive: "count", schema.Real: "number", schema.TimeS: "time"}
_PLAIN = {bool: "switch", str: "text", int: "count", float: "number"}
_BOUNDS = {annotated_types.Ge: ("ge", "≥"), annotated_types.Gt: ("gt", ">"), annotated_types.Le: ("le", "≤")}
_BOUNDS[annotated_types.Lt] = ("lt", "<")


def render() -> str:
    """The whole page."""
    parts = [_HEAD, "## Top level\n", *_table(list(_rows(schema.Recipe)))]
    for name, field in schema.Recipe.model_fields.items():
        model = _model_in(field.annotation)
        if model is not None:
            parts += list(_section(name, model))
    return "\n".join(parts) + "\n"


def _section(path: str, model: type[BaseModel]) -> Iterator[str]:
    """A heading with the class's sentence, the table of its keys, then the sections inside it."""
    yield f"\n## `{path}`\n"
    yield f"{_markdown(model.__doc__ or '')}\n"
    yield from _table(list(_rows(model)))
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from _section(f"{path}.{name}{'[]' if _is_list(field.annotation) else ''}", inner)


def _table(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    yield "| key | kind | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if not field.description and inner is None:
            raise SystemExit(f"{model.__name__}.{name} has no docstring in the schema")
        meaning = field.description or (inner.__doc__ if inner else None) or ""
        yield f"`{name}`", _kind_of_field(field), _default(field), _markdown(meaning)


def _markdown(docstring: str) -> str:
    return " ".join(docstring.split()).replace("``", "`")


def _kind_of_field(field: FieldInfo) -> str:
    if _model_in(field.annotation) is not None:
        return "list of sections" if _is_list(field.annotation) else "section"
    return _kind(Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation)


def _kind(annotation: Any) -> str:
    """What a value is called, with its bounds."""
    if annotation in _KINDS:
        return _KINDS[annotation]
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{_yaml(value)}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(argument) for argument in arguments if argument is not NoneType)
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "keys and values"
    if origin is Annotated:
        inner, *notes = arguments
        # Annotated[Positive, Field(ge=2)] is flattened: the alias's own mark comes first, then the bounds.
        alias = next((kind for known, kind in _KINDS.items() if get_args(known)[1] in notes), None)
        return ", ".join([alias or _kind(inner), *_bounds(notes)])
    raise SystemExit(f"how is {annotation} called in a recipe? Add it to {Path(__file__).name}")


def _bounds(notes: list[Any]) -> Iterator[str]:
    for note in notes:
        if isinstance(note, FieldInfo):
            yield from _bounds(note.metadata)
        for kind, (name, sign) in _BOUNDS.items():
            if isinstance(note, kind):
                yield f"{sign} {_number(getattr(note, name))}"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "**required**"
    if isinstance(value, BaseModel):
        return ""
    return f"`{_yaml(value)}`"


def _yaml(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, dict) and value:
        return f"{{{', '.join(f'{key}: {_yaml(item)}' for key, item in value.items())}}}"
    return _number(value) if isinstance(value, float) else json.dumps(value)


def _number(value: float) -> str:
    """Floats as a recipe has them: 3e-4 rather than 0.0003, 1e-8 rather than 1e-08, 1 rather than 1.0."""
    if value and abs(value) < 1e-2:
        digits, _, power = f"{value:e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:g}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, one or many."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in get_args(annotation))
    return next((model for model in found if model is not None), None)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple


def main() -> None:
    text = render()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is not what the schema says: run `make docs`")


if __name__ == "__main__":
    main()
