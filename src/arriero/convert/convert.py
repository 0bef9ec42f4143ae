"""Another system's settings into a recipe: which system they are of is seen by their form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arriero.config.load import parse_yaml
from arriero.convert.deepspeed_chat import convert_deepspeed_chat
from arriero.convert.draft import Draft
from arriero.convert.hugging_face import convert_hugging_face
from arriero.convert.llama_factory import convert_llama_factory
from arriero.errors import UserError

_FORMS = (
    "a DeepSpeed-Chat command (or a .sh file with one), a JSON file of Hugging Face's TrainingArguments, or a "
    "LLaMA-Factory YAML with stage: pt"
)


@dataclass(frozen=True)
class Converted:
    """The recipe's text, and what a person must know."""

    text: str
    system: str
    dropped: dict[str, str]
    """What could not be carried over, and why."""
    commands: tuple[str, ...]
    """What is to be done before it can be trained."""


def convert(what: str, *, gpus: int | None = None) -> Converted:
    """A recipe of a file or a command line. gpus: that it ran on, where it doesn't say it itself.

    Raises ``UserError`` where it is none of the three, contradicts itself, or the schema refuses a value.
    """
    path = Path(what)
    is_file = len(what) < 4096 and path.is_file()
    if not is_file and "--" not in what:
        raise UserError(f"there is no file {what}, and it is no command either", f"Give {_FORMS}.")
    draft = _draft(path, gpus) if is_file else convert_deepspeed_chat(what, gpus=gpus)
    draft.recipe()  # refused here rather than when it is trained
    origin = path.name if is_file else "a command line"
    return Converted(draft.text(origin), draft.system, draft.dropped, tuple(draft.commands))


def _draft(path: Path, gpus: int | None) -> Draft:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path} is not valid JSON: {error}") from None
        return convert_hugging_face(_settings(value, path), gpus=gpus, folder=path.parent)
    if path.suffix in (".yaml", ".yml"):
        return convert_llama_factory(_settings(parse_yaml(text), path), gpus=gpus, folder=path.parent)
    return convert_deepspeed_chat(text, gpus=gpus)


def _settings(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}, expected settings by name", f"Give {_FORMS}.")
    others = {"base_model": "Axolotl", "model_config": "litgpt", "metrics": "torchtitan"}
    for key, system in others.items():
        if key in value:
            raise UserError(
                f"{path} looks like {system}'s ({key}), which isn't converted",
                f"`arriero keys {system.lower()}` has its names beside ours; `arriero recipes new` makes a recipe to fill in.",
            )
    if {"zero_optimization", "train_micro_batch_size_per_gpu"} & value.keys():
        raise UserError(f"{path} is DeepSpeed's own configuration", "A recipe takes it as it stands: deepspeed: FILE.")
    return value
