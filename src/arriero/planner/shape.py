"""The shape of a recipe's model from the JSON files beside it, without loading a tokenizer or a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arriero.config.schema import Model, ModelShape
from arriero.errors import UserError


def shape_of_model(model: Model) -> tuple[ModelShape, int]:
    """(shape, rows of the embedding) of a new model or of the Hugging Face folder that is continued.

    A name on the hub is looked up there, one small file. Raises ``UserError`` where a file that is needed isn't there.
    """
    if model.config is not None:
        return model.config, model.config.vocab_size or _tokens(Path(str(model.tokenizer)))
    value = _read(_config_file(str(model.model_name_or_path)))
    known = {name: value[name] for name in ModelShape.model_fields if value.get(name) is not None}
    try:
        return ModelShape.model_validate(known), int(value["vocab_size"])
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{model.model_name_or_path}: its config.json doesn't describe a LLaMA-like model: {error}",
            "Llama, Mistral, Qwen and their like work.",
        ) from None


def _config_file(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name) / "config.json"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model.model_name_or_path: there is no folder {name!r}, and the hub gave no config.json: "
            f"{str(error).splitlines()[0]}",
            "Give the path of a Hugging Face model folder, or a hub name while the hub can be reached.",
        ) from None


def _tokens(folder: Path) -> int:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"the model's size depends on its tokenizer's, and there is no {file}",
            "Give model.config.vocab_size, or make the tokenizer first.",
        )
    value = _read(file)
    vocab = value.get("model", {}).get("vocab", {})
    ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    return len(ids | {token["id"] for token in value.get("added_tokens", [])})


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"can't read {file}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} holds {type(value).__name__}, expected an object")
    return value
