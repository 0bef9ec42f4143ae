"""A recipe that is being made of another system's settings: its values, and all that must be said about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from arriero.config.keys import KEY_MAP, NOTES
from arriero.config.load import check_recipe, commented_yaml
from arriero.config.schema import Recipe
from arriero.engine.ds_config import put_leaf
from arriero.errors import UserError

# As a recipe is read: what is trained, on what, how.
_SECTIONS = ("output_dir", "model", "data", "train", "optim", "parallel", "checkpoint", "log", "eval", "deepspeed")


@dataclass
class Draft:
    """What has been made so far. It fills up while another system's settings are gone through."""

    system: str
    """What it is made of, as people call it."""
    values: dict[str, Any] = field(default_factory=dict)
    """By dotted key of ours."""
    said: dict[str, str] = field(default_factory=dict)
    """By dotted key: where the value is from, where it was not simply copied."""
    dropped: dict[str, str] = field(default_factory=dict)
    """What could not be carried over, by its name and value there, and why."""
    clashes: list[str] = field(default_factory=list)
    """What contradicts itself there, so that nobody can tell what was meant."""
    commands: list[str] = field(default_factory=list)
    """What is to be done before the recipe can be trained."""
    _origins: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, origin: str, note: str = "") -> None:
        """Set a key; a second origin that says otherwise is a clash. note: why it isn't as it stands there."""
        if key in self.values and self.values[key] != value:
            self.clashes.append(
                f"{key}: {self._origins[key]} says {_plain(self.values[key])}, {origin} says {_plain(value)}"
            )
            return
        self.values[key] = value
        self._origins.setdefault(key, origin)
        if note:
            self.said[key] = note

    def default(self, key: str, value: Any) -> None:
        """Set a key to what the other system does where nothing is said, if that isn't what ours does."""
        if key not in self.values:
            self.values[key] = value
            self.said.setdefault(key, f"{self.system}'s default")

    def drop(self, name: str, value: Any, why: str) -> None:
        """Note that a setting has no place in a recipe."""
        self.dropped[f"{name}: {_plain(value)}"] = why

    def recipe(self) -> Recipe:
        """The checked recipe. ``UserError`` with every clash, or with what the schema says of the values."""
        if self.clashes:
            listed = "\n".join(f"  {clash}" for clash in self.clashes)
            raise UserError(
                f"these settings contradict one another:\n{listed}", "Decide there which is meant, and convert again."
            )
        return check_recipe(self.nested(), f"what {self.system} says")

    def nested(self) -> dict[str, Any]:
        """The values as sections."""
        value: dict[str, Any] = {}
        for section in _SECTIONS:
            for key, inner in self.values.items():
                if key.split(".")[0] == section:
                    put_leaf(value, key, inner)
        return value

    def text(self, origin: str) -> str:
        """The recipe as YAML, with what could not be carried over in its first lines."""
        dropped = [f"Not carried over: {name} ({why})" for name, why in self.dropped.items()]
        return (
            commented_yaml({}, {}, [f"From {origin} ({self.system}), by `arriero recipes convert`."])
            + "".join(f"# First: {command}\n" for command in self.commands)  # whole lines, to be copied
            + (commented_yaml({}, {}, dropped) if dropped else "")
            + commented_yaml(self.nested(), self.said)
        )


def our_keys(system: str) -> dict[str, str]:
    """Names of a system whose value can be copied, and our key for each (``config/keys.py``)."""
    copied = {}
    for key, systems in KEY_MAP.items():
        for name in systems.get(system, "").split():
            if name not in NOTES and "[]" not in key:
                copied[name.lstrip("-")] = key
    return copied


def whole(value: float) -> int | float:
    """3.0 → 3."""
    return int(value) if float(value).is_integer() else value


def _plain(value: Any) -> str:
    words = {True: "true", False: "false", None: "null"}
    return words[value] if isinstance(value, bool | None) else str(value)
