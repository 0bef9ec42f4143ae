"""The Hugging Face folder: weights in shards, a configuration for older and newer Transformers, generation settings."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.checkpoint.saved import SavedState
from arriero.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def write_hf_folder(saved: SavedState, folder: Path, *, dtype: str, shard_bytes: int) -> None:
    """Weights into ``folder``, which holds the model's configuration and tokenizer; these are completed.

    dtype: bf16, fp16 or fp32. shard_bytes: of a file of weights at most, unless one tensor alone has more.
    """
    _write_weights(saved, folder, dtype, shard_bytes)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    _write_json(path, complete_config(config, dtype))
    if unused := unused_ids(folder, config["vocab_size"]):
        path = folder / "generation_config.json"
        generation = json.loads(path.read_text(encoding="utf-8"))
        # Rows beyond the tokenizer were never a target, and no text stands for them.
        generation["suppress_tokens"] = sorted({*(generation.get("suppress_tokens") or []), *unused})
        _write_json(path, generation)


def complete_config(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The configuration as Transformers 4 (tried: 4.46) and 5 read it.

    Version 5 has ``dtype`` and ``rope_parameters``; version 4 reads ``torch_dtype``, ``rope_theta`` and
    ``rope_scaling``, and takes its defaults in silence where they are missing: the wrong base for the rotary angles.
    """
    name = str(DTYPES[dtype]).removeprefix("torch.")
    # Training turns the cache off so that documents stay apart; a model that generates needs it.
    config = {**config, "use_cache": True, "dtype": name, "torch_dtype": name}
    if not config.get("architectures"):  # what vLLM and llama.cpp's converter go by
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    rope = dict(config.get("rope_parameters") or {})
    if "rope_theta" in rope:
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        config["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    return config


def unused_ids(folder: Path, vocab_size: int) -> list[int]:
    """Ids that the model has a row for and the tokenizer no token: padding of the vocabulary, mostly."""
    state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = state["model"]["vocab"]
    known = set(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
    known |= {token["id"] for token in state["added_tokens"]}
    return [number for number in range(vocab_size) if number not in known]


def cast(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """The master in the asked precision; ``UserError`` where fp16 can't hold it."""
    value = tensor.to(DTYPES[dtype])
    if dtype == "fp16" and not bool(value.isfinite().all()):
        raise UserError(
            f"--dtype fp16: {name} has the value {float(tensor.abs().max()):.4g}, fp16 ends at 65,504",
            "Export in bf16 or fp32.",
        )
    return value.contiguous()


def _write_weights(saved: SavedState, folder: Path, dtype: str, shard_bytes: int) -> None:
    shapes = {name: list(entry["shape"]) for name, entry in saved.parameters.items()}
    sizes = {name: prod(shape) * DTYPES[dtype].itemsize for name, shape in shapes.items()}
    shards = list(split(sizes, shard_bytes))
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    )
    for file, members in zip(names, shards, strict=True):
        _write_safetensors(folder / file, saved, {name: shapes[name] for name in members}, dtype)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: file for file, members in zip(names, shards, strict=True) for name in members},
        }
        _write_json(folder / "model.safetensors.index.json", index)


def split(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
    """Names in their order, in groups whose sizes sum to ``limit`` at most, unless one alone is larger."""
    members: list[str] = []
    held = 0
    for name, size in sizes.items():
        if members and held + size > limit:
            yield members
            members, held = [], 0
        members.append(name)
        held += size
    yield members


def _write_safetensors(path: Path, saved: SavedState, shapes: dict[str, list[int]], dtype: str) -> None:
    """One tensor in memory at a time: safetensors' own writer wants the whole file's, and copies them once more.

    The format: length of the header as 8 bytes, the header as JSON padded to 8 bytes, the tensors' bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in shapes:
            file.write(cast(name, saved.read(name), dtype).view(torch.uint8).numpy().data)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
