"""Every row exactly once per epoch, for any rows, ranks, stops and changes of the number of ranks."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from arriero.data import ExactSampler
from arriero.errors import UserError

ROWS, SIZES = st.integers(1, 300), st.integers(1, 9)


def ranks(rows: int, size: int, **options: bool) -> list[ExactSampler]:
    return [ExactSampler(rows, rank=rank, size=size, seed=3, **options) for rank in range(size)]


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, size=SIZES, shuffle=st.booleans())
def test_every_row_once_per_epoch(rows: int, size: int, shuffle: bool) -> None:
    samplers = ranks(rows, size, shuffle=shuffle)
    for _ in range(3):
        lengths = [len(sampler) for sampler in samplers]
        epoch = [list(sampler) for sampler in samplers]
        assert [len(share) for share in epoch] == lengths
        assert max(lengths) - min(lengths) <= 1
        assert sorted(row for share in epoch for row in share) == list(range(rows))


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, size=SIZES)
def test_padded_passes_are_of_one_length_and_repeat_nothing(rows: int, size: int) -> None:
    samplers = ranks(rows, size, pad=True)
    seen: list[int] = []
    for _ in range(5):
        assert len({len(sampler) for sampler in samplers}) == 1
        passes = [list(sampler) for sampler in samplers]
        assert len({len(share) for share in passes}) == 1
        seen += [row for together in zip(*passes, strict=True) for row in together]
    for first in range(0, len(seen) - rows + 1, rows):
        assert sorted(seen[first : first + rows]) == list(range(rows))
    assert len(seen) >= 5 * rows, "each pass finishes its epoch"
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)
    assert states[0]["epoch"] * rows + states[0]["position"] == len(seen)


@settings(max_examples=120, deadline=None)
@given(
    rows=ROWS,
    pad=st.booleans(),
    lives=st.lists(st.tuples(SIZES, st.integers(1, 7), st.integers(0, 60)), min_size=1, max_size=8),
)
def test_stopped_and_continued_on_other_numbers_of_ranks(
    rows: int, pad: bool, lives: list[tuple[int, int, int]]
) -> None:
    """Each life: a number of ranks, a batch size, and the batches after which it is stopped."""
    state = ExactSampler(rows, rank=0, size=1, seed=3).state_dict()
    seen: Counter[tuple[int, int]] = Counter()
    for size, batch_size, batches in lives:
        samplers = ranks(rows, size, pad=pad)
        for sampler in samplers:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        while True:
            begun = state["epoch"] * rows + state["position"]
            taken, batches, over = one_pass(samplers, rows, batch_size, batches)
            states = [sampler.state_dict() for sampler in samplers]
            assert all(one == states[0] for one in states), "any rank's state is everybody's"
            state = states[0]
            now = state["epoch"] * rows + state["position"]
            assert sum(len(mine) for mine in taken) == now - begun, "nothing was taken that the state doesn't count"
            for place in range(begun, now):
                turn, rank = divmod(place - begun, size)
                seen[place // rows, taken[rank][turn]] += 1
            if not over:
                break
    assert max(seen.values(), default=1) == 1, "nothing twice in an epoch"
    assert len(seen) == state["epoch"] * rows + state["position"], "nothing lost"


def one_pass(
    samplers: list[ExactSampler], rows: int, batch_size: int, batches: int
) -> tuple[list[list[int]], int, bool]:
    """(rows of each rank, batches that are left, whether the pass came to its end) of real loaders in step."""
    loaders = [iter(DataLoader(range(rows), sampler=sampler, batch_size=batch_size)) for sampler in samplers]  # type: ignore[arg-type]
    taken: list[list[int]] = [[] for _ in samplers]
    for left in range(batches, 0, -1):
        together = [next(loader, None) for loader in loaders]
        if all(batch is None for batch in together):
            return taken, left, True
        for mine, batch in zip(taken, together, strict=True):
            mine += [] if batch is None else batch.tolist()
    return taken, 0, False


def test_what_the_stock_sampler_repeats() -> None:
    """Ten rows on four ranks, as the docs show it."""
    stock = [list(DistributedSampler(range(10), 4, rank, shuffle=False)) for rank in range(4)]  # type: ignore[arg-type]
    ours = [list(sampler) for sampler in ranks(10, 4, shuffle=False)]
    assert stock == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert ours == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert [len(sampler) for sampler in ranks(10, 4)] == [3, 3, 2, 2]
    short = [list(DistributedSampler(range(10), 4, rank, shuffle=False, drop_last=True)) for rank in range(4)]  # type: ignore[arg-type]
    assert short == [[0, 4], [1, 5], [2, 6], [3, 7]]
    again = DistributedSampler(range(10), 4, 0)  # type: ignore[arg-type]
    assert list(again) == list(again)
    sampler = ExactSampler(10, rank=0, size=4)
    assert list(sampler) != list(sampler)


def test_a_pass_begins_again_unless_its_state_is_loaded() -> None:
    sampler = ExactSampler(100, rank=0, size=2)
    first = next(iter(sampler))
    whole = list(sampler)
    assert whole[0] == first
    assert len(whole) == 50
    other = list(sampler)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 0, "position": 30})
    assert (len(sampler), list(sampler)) == (35, whole[15:])
    assert (len(sampler), list(sampler)) == (50, other)


def test_worker_processes_fetch_ahead() -> None:
    sampler = ExactSampler(64, rank=0, size=1, seed=1)
    loader = iter(DataLoader(range(64), sampler=sampler, batch_size=4, num_workers=1))  # type: ignore[arg-type]
    used = [row for _ in range(2) for row in next(loader).tolist()]
    assert sampler.state_dict()["position"] > 8
    other = ExactSampler(64, rank=0, size=1, seed=1)
    other.load_state_dict(sampler.state_dict(taken=8))
    assert sorted([*used, *other]) == list(range(64))


def test_the_order_is_pinned() -> None:
    """A saved state means something only as long as these stay."""
    assert list(ExactSampler(10, rank=0, size=1, seed=42)) == [5, 2, 8, 4, 3, 6, 9, 0, 7, 1]


def test_rank_and_size_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone = ExactSampler(10)
    assert (alone.rank, alone.size) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert len(ExactSampler(10)) == 2


def test_the_process_group_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert len(ExactSampler(10)) == 10
    finally:
        dist.destroy_process_group()


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="no rows"):
        ExactSampler([])
    with pytest.raises(UserError, match="no rank 4 of 4"):
        ExactSampler(10, rank=4, size=4)
    with pytest.raises(UserError, match="Give both"):
        ExactSampler(10, rank=0)
    state = ExactSampler(10, rank=0, size=1).state_dict()
    with pytest.raises(UserError, match="for rows 10, this one has rows 11"):
        ExactSampler(11, rank=0, size=1).load_state_dict(state)
    with pytest.raises(UserError, match="for seed 0, this one has seed 1"):
        ExactSampler(10, rank=0, size=1, seed=1).load_state_dict(state)
