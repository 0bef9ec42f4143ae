"""Evaluate an exported model by itself, on one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.config.schema import Data
from arriero.config.schema import Source as SourceConfig
from arriero.data.loader import MicroBatch, Rows, open_one, targets_per_byte, validation_batches
from arriero.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from arriero.errors import UserError
from arriero.evaluate.perplexity import Score, score
from arriero.model.build import PretrainModel
from arriero.model.loss import LossHead


def evaluate_folder(
    folder: Path, datasets: Sequence[Path], *, seq_len: int | None, split: str, max_rows: int | None, batch_size: int
) -> dict[str, Any]:
    """Score a Hugging Face folder on the datasets' held-out (or training) rows: the keys of ``arriero eval --json``.

    Raises ``UserError`` where a dataset has no such part or was made with another tokenizer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    ours = tokenizer_fingerprint(load_tokenizer(folder))
    names = [path.name for path in datasets]
    if len(set(names)) < len(names):
        names = [str(path) for path in datasets]
    context = AutoConfig.from_pretrained(folder).max_position_embeddings
    seq_len = seq_len or min(context, 2048)
    parts = [(name, *_part(path, seq_len, split, ours)) for name, path in zip(names, datasets, strict=True)]
    if seq_len > context:
        raise UserError(f"--seq-len {seq_len} is beyond the model's context of {context}", "Use shorter rows.")
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    LossHead.install(causal_lm)
    model = PretrainModel(causal_lm).to("cuda" if torch.cuda.is_available() else "cpu")
    device = next(model.parameters()).device

    def losses(batch: MicroBatch) -> Tensor:
        rows: Tensor
        with torch.no_grad():
            _, rows = model(batch.input_ids.to(device), batch.targets.to(device), batch.position_ids.to(device))
        return rows

    def batches() -> Iterator[MicroBatch]:
        for number, (_, rows, _) in enumerate(parts):
            yield from validation_batches(rows, number, max_rows=max_rows, rank=0, size=1, micro_batch=batch_size)

    overall, each = score(batches(), losses, lambda sums: sums, [ratio for _, _, ratio in parts])
    return _keys(overall) | {
        "sources": {name: _keys(one) for (name, _, _), one in zip(parts, each, strict=True) if one is not None}
    }


def _part(path: Path, seq_len: int, split: str, fingerprint: str) -> tuple[Rows, float | None]:
    """The rows to score, and their targets per byte."""
    if split not in {"train", "validation"}:
        raise UserError(f"--split {split}: expected validation or train")
    # Nothing is held out here: a part that the dataset doesn't have may have been trained on.
    data = Data(sources=(SourceConfig(path=str(path)),), seq_len=seq_len, validation_split=0)
    source = open_one(path, data)
    theirs = source.dataset.tokenizer_fingerprint
    if theirs is not None and theirs != fingerprint:
        raise UserError(
            f"{path} was prepared with another tokenizer: fingerprint {theirs}, the model's is {fingerprint}"
        )
    rows = source.training if split == "train" else source.validation
    if rows is None:
        raise UserError(f"{path} has no validation part", "Prepare it with --validation-split, or use --split train.")
    return rows, targets_per_byte(rows.stream, source.dataset.text_bytes.get(split), isolate=True)


def _keys(one: Score) -> dict[str, Any]:
    return {
        "loss": one.loss,
        "perplexity": one.perplexity,
        "bits_per_byte": one.bits_per_byte,
        "target_tokens": one.target_tokens,
    }
