"""Loss, perplexity and bits per byte are sums over targets, so no batch size and no number of ranks changes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from arriero.data.loader import MicroBatch, RowPlace, padding_row, stack
from arriero.data.packing import IGNORED_TARGET, Row
from arriero.evaluate.perplexity import Score, row_targets, score, sum_by_source

SEQ_LEN = 64
TARGETS = [3, 60, 17, 8, 41, 29, 12]  # B19: seven rows with 3 to 60 targets


def row(targets: int, number: int) -> Row:
    ids = np.random.default_rng(number).integers(0, 1000, SEQ_LEN)
    wanted = np.full(SEQ_LEN, IGNORED_TARGET, dtype=np.int64)
    places = np.random.default_rng(100 + number).permutation(SEQ_LEN)[:targets]
    wanted[places] = ids[places]
    return Row(ids, wanted, np.arange(SEQ_LEN), np.array([number]))


ROWS = [row(targets, number) for number, targets in enumerate(TARGETS)]


def token_losses(batch: MicroBatch) -> Tensor:
    """A stand-in for a model: a token's loss depends on the token alone."""
    losses = 0.1 + (batch.targets * 37 % 101).double() / 50
    return losses.where(batch.targets != IGNORED_TARGET, 0)


def row_losses(batch: MicroBatch) -> Tensor:
    return token_losses(batch).sum(1)


def batches_of(rank: int, size: int, batch: int, sources: Sequence[int] = (0,) * 7) -> list[MicroBatch]:
    """Rank r takes rows r, r + size, …; padding evens out the number of rows."""
    per_rank = -(-len(ROWS) // size)
    mine = [(ROWS[n], RowPlace(sources[n], 0, n, n)) for n in range(rank, len(ROWS), size)]
    mine += [(padding_row(SEQ_LEN, 0), RowPlace(-1, 0, 0, 0))] * (per_rank - len(mine))
    return [
        stack([one for one, _ in mine[n : n + batch]], [place for _, place in mine[n : n + batch]])
        for n in range(0, per_rank, batch)
    ]


def evaluate(
    size: int, batch: int, sources: Sequence[int] = (0,) * 7, ratios: Sequence[float | None] = (0.25,)
) -> list[tuple[Score, list[Score | None]]]:
    """The score on each of ``size`` ranks; a rank's sums meet those of the others where the ranks would reduce them."""
    sums = [
        sum(
            (sum_by_source(b, row_losses(b), len(ratios)) for b in batches_of(r, size, batch, sources)),
            torch.zeros(2, len(ratios)),
        )
        for r in range(size)
    ]

    def total(mine: Tensor) -> Tensor:
        assert any(torch.equal(mine, one) for one in sums)
        return torch.stack(sums).sum(0)

    return [score(batches_of(rank, size, batch, sources), row_losses, total, ratios) for rank in range(size)]


def by_hand() -> float:
    losses = [loss for one in ROWS for loss in token_losses(stack([one], [RowPlace(0, 0, 0, 0)])).flatten().tolist()]
    return math.fsum(losses) / sum(TARGETS)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 4, 7])
def test_b19_neither_batch_size_nor_ranks_change_the_loss(size: int, batch: int) -> None:
    results = evaluate(size, batch)
    assert len(results) == size
    for overall, each in results:
        assert overall.loss == pytest.approx(by_hand(), rel=1e-12)
        assert overall.target_tokens == sum(TARGETS) == 170
        assert each == [overall]


def test_b19_the_mean_of_batch_means_would_differ() -> None:
    means = [float(row_losses(b).sum()) / int(row_targets(b).sum()) for b in batches_of(0, 1, 2)]
    assert abs(sum(means) / len(means) - by_hand()) > 1e-3


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert Score(2.0, 1, None).perplexity == math.exp(2.0)
    assert evaluate(1, 7)[0][0].perplexity == math.exp(evaluate(1, 7)[0][0].loss)
    assert math.isfinite(Score(1e6, 1, None).perplexity), "an untrained model's may be too large for a float"


def test_bits_per_byte_by_hand() -> None:
    """170 targets at 0.25 tokens a byte stand for 680 bytes; loss in nats over ln 2 is bits a token."""
    ((overall, _),) = evaluate(1, 7)
    assert overall.bits_per_byte == pytest.approx(by_hand() * 170 / math.log(2) / 680, rel=1e-12)
    ((overall, _),) = evaluate(1, 7, ratios=[None])
    assert overall.bits_per_byte is None


def test_sources_are_scored_apart_and_together() -> None:
    sources = [0, 1, 0, 1, 1, 0, 0]
    ((overall, each),) = evaluate(1, 2, sources, [0.25, 0.5, 0.5])
    assert each[2] is None, "nothing was evaluated of the third"
    first, second = each[:2]
    assert first is not None
    assert second is not None
    assert (first.target_tokens, second.target_tokens) == (3 + 17 + 29 + 12, 60 + 8 + 41)
    together = (first.loss * first.target_tokens + second.loss * second.target_tokens) / 170
    assert overall.loss == pytest.approx(together, rel=1e-12)
    bits = (first.loss * first.target_tokens + second.loss * second.target_tokens) / math.log(2)
    assert overall.bits_per_byte == pytest.approx(bits / (first.target_tokens / 0.25 + second.target_tokens / 0.5))
    ((overall, each),) = evaluate(1, 2, sources, [0.25, None, 0.5])
    assert overall.bits_per_byte is None, "one source's bytes are not known, so the whole's aren't"
    assert each[0] is not None
    assert each[0].bits_per_byte is not None


def test_padding_counts_nowhere() -> None:
    (batch,) = batches_of(2, 3, 7)
    assert [place.source for place in batch.places] == [0, 0, -1]
    assert row_targets(batch).tolist() == [17, 29, 0]
    losses = torch.tensor([1.0, 2.0, float("nan")])
    assert sum_by_source(batch, losses, 1).tolist() == [[3.0], [46.0]]


def test_sums_are_kept_in_fp64() -> None:
    """Adding up 2²⁵ in fp32 would lose the last row."""
    (batch,) = batches_of(0, 3, 7)
    sums = sum_by_source(batch, torch.tensor([2.0**25, 1.0, 1.0]), 1)
    assert sums.dtype == torch.float64
    assert sums[0].item() == 2**25 + 2


def test_nothing_to_evaluate_is_an_error() -> None:
    def nothing() -> Iterable[MicroBatch]:
        yield stack([padding_row(SEQ_LEN, 0)], [RowPlace(-1, 0, 0, 0)])

    with pytest.raises(ValueError, match="no target in any row"):
        score(nothing(), row_losses, lambda sums: sums, [None])
