"""From a checkpoint to a Hugging Face folder, without a GPU and without DeepSpeed, and proof that it is the same model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from arriero.checkpoint.saved import SavedState, read_json
from arriero.disk import sync_folder
from arriero.errors import UserError
from arriero.run_folder import RunFolder

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SHARD_BYTES = 5 * 10**9
# Largest difference of a logit, relative to the largest logit. In fp32 the reload differs by the order of sums only
# (1e-6 seen); in 16 bits one unit in the last place is 2⁻⁸ = 4e-3.
_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 4e-3}


@dataclass(frozen=True)
class Export:
    """What was written."""

    path: Path
    parameters: int
    max_logit_difference: float
    files: list[str]


def export_checkpoint(checkpoint: Path, run: RunFolder, out: Path, *, dtype: str | None = None) -> Export:
    """Write the model of ``checkpoint`` to ``out``: weights, configuration, tokenizer and a model card.

    dtype: bf16, fp16 or fp32 (from the masters); None: the precision that the model was trained in.
    The folder is reloaded with Transformers and its logits are compared with those that the training engine gave when
    it wrote the checkpoint; where they differ nothing is left at ``out`` and ``UserError`` says by how much.
    """
    trainer = read_json(checkpoint, "trainer_state.json")
    dtype = dtype or trainer["precision"]
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (out / "config.json").is_file():
        raise UserError(f"{out} exists and is no exported model", "Give another --out.")
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(run.model, aside)
    parameters = _write_weights(checkpoint, aside, DTYPES[dtype])
    _write_config(aside, dtype)
    (aside / "README.md").write_text(_model_card(checkpoint, trainer, parameters, dtype), encoding="utf-8")
    difference, largest = compare_with_engine(aside, checkpoint, trainer["precision"])
    if not difference <= _TOLERANCE[trainer["precision"]] * largest:
        shutil.rmtree(aside)
        raise UserError(
            f"the exported model's logits differ from the trained one's by {difference:.3g} (largest logit "
            f"{largest:.3g}); nothing was written to {out}",
            "This is a fault of arriero's: please report it with the recipe.",
            exit_code=1,
        )
    if out.exists():
        shutil.rmtree(out)
    aside.rename(out)
    sync_folder(out.parent)
    return Export(out, parameters, difference, sorted(path.name for path in out.iterdir()))


def compare_with_engine(folder: Path, checkpoint: Path, precision: str) -> tuple[float, float]:
    """Largest difference between the folder's logits and the training engine's, and the largest logit."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    probe = load_file(checkpoint / "probe.safetensors")
    # Not float32 and then .to(bf16): that would round the rotary tables too.
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision], output_loading_info=True)
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if wrong:
        raise UserError(f"{folder} doesn't load cleanly: {wrong}", exit_code=1)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=probe["input_ids"], use_cache=False).logits.float()
    return float((logits - probe["logits"]).abs().max()), float(probe["logits"].abs().max())


def _write_weights(checkpoint: Path, folder: Path, dtype: torch.dtype) -> int:
    """Shards of at most 5 GB, one in memory at a time; returns the number of parameters."""
    with SavedState(checkpoint) as saved:
        sizes = {name: _numel(entry["shape"]) for name, entry in saved.parameters.items()}
        shards = list(_split(sizes, dtype.itemsize))
        names = (
            ["model.safetensors"]
            if len(shards) == 1
            else [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
        )
        for file, members in zip(names, shards, strict=True):
            tensors: dict[str, Tensor] = {name: saved.read(name).to(dtype) for name in members}
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values()) * dtype.itemsize},
            "weight_map": {name: file for file, members in zip(names, shards, strict=True) for name in members},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return sum(sizes.values())


def _split(sizes: dict[str, int], item_bytes: int) -> Iterator[list[str]]:
    members: list[str] = []
    held = 0
    for name, numel in sizes.items():
        if members and held + numel * item_bytes > _SHARD_BYTES:
            yield members
            members, held = [], 0
        members.append(name)
        held += numel * item_bytes
    yield members


def _numel(shape: list[int]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def _write_config(folder: Path, dtype: str) -> None:
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # Training turns the cache off so that documents stay apart; a model that generates needs it.
    config |= {"use_cache": True, "dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _model_card(checkpoint: Path, trainer: dict[str, Any], parameters: int, dtype: str) -> str:
    sources = "\n".join(f"- {source['name']}: {source['epochs']:.3g} epochs" for source in trainer["sources"])
    evaluation = trainer.get("evaluation")
    scored = (
        "\n".join(f"- {key.removeprefix('eval_')}: {value:.4g}" for key, value in evaluation.items())
        if evaluation
        else "None was made."
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [arriero, deepspeed]
---

# A causal language model trained with arriero

{parameters:,} parameters, {dtype} weights, from `{checkpoint.name}`: {trainer["step"]:,} steps,
{trainer["tokens"]:,} tokens.

## Data

{sources}

## Evaluation on held-out documents

{scored}

## Recipe

```yaml
{trainer["recipe"].strip()}
```
"""
