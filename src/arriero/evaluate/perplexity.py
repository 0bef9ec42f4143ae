"""Loss, perplexity and bits per byte from summed losses and target counts; it knows no model and no rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arriero.data.loader import MicroBatch
from arriero.data.packing import IGNORED_TARGET


@dataclass(frozen=True)
class Score:
    """Of one source, or of all together."""

    loss: float
    """Mean loss of a target, in nats."""
    target_tokens: int
    bits_per_byte: float | None
    """None where the number of bytes behind the targets isn't known."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def row_targets(batch: MicroBatch) -> Tensor:
    """Targets of each row, int64 ``[m]``."""
    return (batch.targets != IGNORED_TARGET).sum(1)


def sum_by_source(batch: MicroBatch, losses: Tensor, sources: int) -> Tensor:
    """Summed loss and number of targets per source, fp64 ``[2, sources]``; padding rows count nowhere.

    losses: summed loss of each row, ``[m]``.
    """
    source = torch.tensor([place.source for place in batch.places])
    real = source >= 0
    sums = torch.zeros(2, sources, dtype=torch.float64)
    sums[0].index_add_(0, source[real], losses.double().cpu()[real])
    sums[1].index_add_(0, source[real], row_targets(batch).double()[real])
    return sums


def score(
    batches: Iterable[MicroBatch],
    row_losses: Callable[[MicroBatch], Tensor],
    total: Callable[[Tensor], Tensor],
    targets_per_byte: Sequence[float | None],
) -> tuple[Score, list[Score | None]]:
    """Evaluate batches of one or more sources: the score of all targets together, and each source's.

    row_losses: batch → summed loss of each row. total: adds a tensor over the ranks. targets_per_byte: per source.
    """
    sources = len(targets_per_byte)
    sums = torch.zeros(2, sources, dtype=torch.float64)
    for batch in batches:
        sums += sum_by_source(batch, row_losses(batch), sources)
    sums = total(sums)
    each = [
        _score(float(sums[0, n]), int(sums[1, n]), targets_per_byte[n]) if sums[1, n] > 0 else None
        for n in range(sources)
    ]
    targets = int(sums[1].sum())
    if targets == 0:
        raise ValueError("there is nothing to evaluate: no target in any row")
    known = [(s, ratio) for s, ratio in zip(each, targets_per_byte, strict=True) if s is not None]
    bytes_behind = [s.target_tokens / ratio for s, ratio in known if ratio]
    overall_ratio = targets / sum(bytes_behind) if len(bytes_behind) == len(known) else None
    return _score(float(sums[0].sum()), targets, overall_ratio), each


def _score(loss_sum: float, targets: int, targets_per_byte: float | None) -> Score:
    loss = loss_sum / targets
    bits = loss / math.log(2) * targets_per_byte if targets_per_byte else None
    return Score(loss, targets, bits)
