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
# Settings that are calculated with on the way, and the least they may be; the schema checks the others.
_WHOLE = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "block_size", "cutoff_len"), 1),
    **dict.fromkeys(("num_nodes", "num_gpus", "train_batch_size"), 1),
    **dict.fromkeys(("zero_stage", "lora_dim"), 0),
    "max_steps": -1,
}
_NUMBERS = {"learning_rate", "num_train_epochs", "warmup_steps", "warmup_ratio", "save_steps", "eval_steps"} | {
    *("logging_steps", "validation_split_percentage", "val_size")
}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "deepspeed": ((str, dict), "a file or settings"),
    "fsdp": ((str, list, bool), "text or a list"),
    "lr_scheduler_kwargs": ((dict,), "settings"),
    "report_to": ((str, list), "text or a list"),
    **dict.fromkeys(("dataset_name", "dataset_config_name", "train_file"), ((str,), "text")),
}


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


def readable(given: dict[str, Any]) -> dict[str, Any]:
    """The settings, with numbers that are written as text as numbers. ``UserError`` names every one that can't be read."""
    found, problems = dict(given), []
    for name, value in given.items():
        if name in _WHOLE or name in _NUMBERS:
            number = _as_number(value)
            if number is None or (name in _WHOLE and (not isinstance(number, int) or number < _WHOLE[name])):
                least = f"a whole number of at least {_WHOLE[name]}" if name in _WHOLE else "a number"
                problems.append(f"{name}: expected {least}, got {value!r}")
            else:
                found[name] = number
        elif name in _KINDS and not isinstance(value, _KINDS[name][0]):
            problems.append(f"{name}: expected {_KINDS[name][1]}, got {value!r}")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f"these settings can't be read:\n{listed}", "Mend them there, and convert again.")
    return found


def _as_number(value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return whole(float(value))
    except (ValueError, OverflowError):
        return None


def whole(value: float) -> int | float:
    """3.0 → 3."""
    return int(value) if float(value).is_integer() else value


def _plain(value: Any) -> str:
    words = {True: "true", False: "false", None: "null"}
    return words[value] if isinstance(value, bool | None) else str(value)
