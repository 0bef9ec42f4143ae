"""From a YAML file and dotted overrides to a checked recipe; every problem is reported at once, by its key's path."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from arriero.config.keys import nearest, translate
from arriero.config.schema import Recipe
from arriero.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its surprises: a repeated key is an error, only true/false are booleans, 1e-4 is a number,
    12:00:00 stays text."""


class _Dumper(yaml.SafeDumper):
    """Quotes every text that this loader or YAML 1.1 would read as something else."""


_UNWANTED = (":bool", ":int", ":float", ":timestamp", ":merge", ":value")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(_UNWANTED)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$"),
    list("-+.0123456789"),
)
_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeLoader.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeLoader.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(
                f"the key in line {line} is a list or a section", "A template such as {{x}} is not filled in."
            )
        key = loader.construct_object(key_node)
        if key in seen:
            raise UserError(f"the key {key!r} stands in line {seen[key]} and again in line {line}", "Keep one of them.")
        seen[key] = line
    return dict(loader.construct_pairs(node, deep=True))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value.replace("_", "")))


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    """YAML takes these three for the ends of lines and folds them, unless they are escaped."""
    style = '"' if any(end in value for end in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def parse_yaml(text: str) -> Any:
    """One YAML document; a syntax error becomes a ``UserError`` with its line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError("not valid YAML: " + str(error).replace('in "<unicode string>", ', "at ")) from None


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read ``path``, apply overrides such as ``optim.learning_rate=2e-4`` and check the whole.

    Raises ``UserError`` with all problems: a missing file, broken YAML, unknown keys (with the nearest key, or the key
    of ours that another system's name means), wrong types and values that contradict one another.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no recipe at {path}", "`arriero recipes list` shows those that are shipped.")
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"))
    except UserError as error:
        raise UserError(f"{path}: {error.problem}", error.remedy) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    if not isinstance(value, dict):
        found = "nothing" if value is None else type(value).__name__
        raise UserError(f"{path}: expected sections such as model and data, found {found}")
    for override in overrides:
        _apply(value, override)
    return check_recipe(value, str(path))


def check_recipe(value: dict[str, Any], origin: str) -> Recipe:
    """Validate a plain dictionary; ``origin`` names it in errors."""
    try:
        return Recipe.model_validate(value)
    except ValidationError as error:
        problems = _explain([dict(problem) for problem in error.errors()])
        count = f"{len(problems)} problems" if len(problems) > 1 else "one problem"
        raise UserError(f"{origin}: {count}\n" + "\n".join(f"  {line}" for line in problems)) from None


def recipe_yaml(recipe: Recipe) -> str:
    """The whole recipe with every default written out."""
    text: str = yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def commented_yaml(value: Mapping[str, Any], comments: Mapping[str, str], head: Sequence[str] = ()) -> str:
    """A recipe's dictionary as a person writes it: sections in blocks, what is in them in lines, with comments.

    comments: by dotted path. head: sentences, each a comment of its own before everything.
    """
    lines = [
        f"# {line}"
        for sentence in head
        for line in textwrap.wrap(sentence, 116, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    ]
    return "\n".join([*lines, *_yaml_lines(value, comments, "", "")]) + "\n"


def _yaml_lines(value: Mapping[str, Any], comments: Mapping[str, str], path: str, indent: str) -> Iterator[str]:
    for key, inner in value.items():
        note = f" # {comments[path + key]}" if path + key in comments else ""
        if isinstance(inner, dict) and inner:
            yield f"{indent}{key}:{note}"
            yield from _yaml_lines(inner, comments, f"{path}{key}.", indent + "  ")
        else:
            # A scalar by itself is followed by YAML's own end of document.
            dumped = yaml.dump([inner], Dumper=_Dumper, default_flow_style=True, width=10**6, allow_unicode=True)
            yield f"{indent}{key}: {dumped.strip()[1:-1]}{note}"


def differing_keys(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """``(path, old, new)`` of the leaves in which two dumped recipes differ, in the order of the schema."""
    return list(_differences(old, new, ()))


def _differences(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(key for key in old if key not in new)]:
            yield from _differences(old.get(key), new.get(key), (*path, str(key)))
    elif old != new:
        yield ".".join(path), old, new


def _apply(value: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    parts = dotted.strip().split(".")
    if not separator or not all(parts):
        raise UserError(f"{override!r} is no override", "Write section.key=value, e.g. optim.learning_rate=2e-4.")
    where: Any = value
    for number, part in enumerate(parts):
        place: Any = part
        if isinstance(where, list):
            if not part.isdigit() or int(part) >= len(where):
                raise UserError(f"{override!r}: {'.'.join(parts[:number])} is a list with {len(where)} entries")
            place = int(part)
        if number == len(parts) - 1:
            try:
                where[place] = parse_yaml(text) if text else None
            except UserError as error:
                raise UserError(f"{override!r}: {error.problem}", error.remedy) from None
            return
        if isinstance(where, dict) and where.get(place) is None:
            where[place] = {}
        where = where[place]
        if not isinstance(where, dict | list):
            raise UserError(f"{override!r}: {'.'.join(parts[: number + 1])} is {where!r}, not a section")


def _explain(problems: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each key. A key that takes one of two types has a problem with each: they share a line."""
    by_path: dict[str, list[dict[str, Any]]] = {}
    for problem in problems:
        by_path.setdefault(_path(problem), []).append(problem)
    lines = []
    for path, group in by_path.items():
        if path:
            lines.append(f"{path}: {_sentence(group)}")
        else:
            lines.extend(line for problem in group for line in problem["msg"].removeprefix("Value error, ").split("\n"))
    return lines


def _path(problem: dict[str, Any]) -> str:
    # A union such as "auto" | count adds its branch to the location; only real keys and list places are shown.
    *before, last = problem["loc"] or [""]
    names = {path.rpartition(".")[2] for path in all_keys()}
    shown = [part for part in before if isinstance(part, int) or part in names]
    if isinstance(last, int) or last in names or problem["type"] == "extra_forbidden":
        shown.append(last)
    return ".".join(map(str, shown))


def _sentence(group: Sequence[dict[str, Any]]) -> str:
    kind, value = group[0]["type"], group[0]["input"]
    if kind == "extra_forbidden":
        return f"no such key{_hint(group[0]['loc'])}"
    if kind == "missing":
        return "is missing"
    first, *others = dict.fromkeys(_wish(problem) for problem in group)
    wishes = " or ".join([first, *(other.removeprefix("expected ") for other in others)])
    words = {None: "nothing", True: "true", False: "false"}
    return f"{wishes}, got {words[value] if isinstance(value, bool | None) else repr(value)}"


def _wish(problem: dict[str, Any]) -> str:
    """What was wanted, without what was found."""
    if problem["type"] in _WISHES:
        return _WISHES[problem["type"]]
    if problem["type"] == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ").partition(", got ")[0]
    if problem["type"] == "literal_error":
        return f"expected {problem['ctx']['expected']}"
    return str(problem["msg"][0].lower() + problem["msg"][1:])


_WISHES = {
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "dict_type": "expected a section of keys",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "model_type": "expected a section of keys",
    "string_type": "expected text",
    "tuple_type": "expected a list",
}


def _hint(location: tuple[str | int, ...]) -> str:
    """Where a key that doesn't exist was probably meant to point."""
    name = str(location[-1])
    siblings = _keys_at(Recipe, location[:-1])
    near = nearest(name, siblings)
    if near:
        return f"; did you mean {near}?"
    elsewhere = [path for path in all_keys() if path.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return f"; {name} belongs to {elsewhere[0].rpartition('.')[0] or 'the top level'}"
    translated = translate(name)
    if translated:
        systems = ", ".join(dict.fromkeys(system for system, _ in translated))
        return f"; {name} ({systems}) is {translated[0][1]} here"
    return f"; known here: {', '.join(siblings)}"


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    for part in location:
        if isinstance(part, int) or part not in model.model_fields:
            continue
        inner = _model_in(model.model_fields[part].annotation)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def all_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Dotted paths of every key of the schema, sections included."""
    paths = []
    for name, field in model.model_fields.items():
        paths.append(prefix + name)
        inner = _model_in(field.annotation)
        if inner is not None:
            paths.extend(all_keys(inner, f"{prefix}{name}."))
    return paths


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, tuple):
        return next((model for part in get_args(annotation) if (model := _model_in(part))), None)
    return None
