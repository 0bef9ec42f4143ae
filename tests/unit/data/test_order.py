"""The order of rows: a permutation per epoch, and a mixture that keeps every source within one row of its share."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.data.order import DataState, Mixture, MixtureSource, permute, row_key, whole_weights

KEYS = st.integers(0, 2**64 - 1)

# ------------------------------------------------------------------------------------------------------------ permutation


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 5_000), key=KEYS)
def test_every_index_has_one_place(size: int, key: int) -> None:
    places = permute(np.arange(size), size, key)
    assert places.dtype == np.int64
    assert np.array_equal(np.sort(places), np.arange(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(2**20, 2**62), key=KEYS, start=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_places_of_large_orders_differ_and_stay_inside(size: int, key: int, start: float, seed: int) -> None:
    first = min(int(start * size), size - 2_000)
    anywhere = np.random.default_rng(seed).integers(0, size, 2_000)
    index = np.unique(np.concatenate([np.arange(first, first + 2_000), anywhere]))
    places = permute(index, size, key)
    assert places.min() >= 0
    assert places.max() < size
    assert len(np.unique(places)) == len(index)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 2**40), key=KEYS, cut=st.integers(1, 99))
def test_a_place_depends_on_its_own_index_alone(size: int, key: int, cut: int) -> None:
    index = np.arange(min(size, 100))
    whole = permute(index, size, key)
    apart = np.concatenate([permute(index[:cut], size, key), permute(index[cut:], size, key)])
    assert np.array_equal(whole, apart)
    assert np.array_equal(whole[::-1], permute(index[::-1], size, key))
    assert np.array_equal(index, np.arange(min(size, 100))), "the caller's array is left alone"


def test_a_permutation_of_nothing() -> None:
    assert permute(np.zeros(0, np.int64), 5, 1).tolist() == []
    with pytest.raises(ValueError, match="at least one row"):
        permute(np.zeros(0, np.int64), 0, 1)


def test_orders_are_shuffled_well() -> None:
    """Neither fixed points, neighbours nor the first place show a pattern over 200 keys (expected 1, 2 and uniform)."""
    size = 1_000
    orders = np.stack([permute(np.arange(size), size, row_key(seed, "a", 0)) for seed in range(200)])
    assert 0.7 < (orders == np.arange(size)).sum(1).mean() < 1.3
    assert 1.6 < (np.abs(np.diff(orders, axis=1)) == 1).sum(1).mean() < 2.4
    assert 450 < orders[:, 0].mean() < 550
    assert len({order.tobytes() for order in orders}) == 200


def test_the_key_depends_on_seed_source_and_epoch() -> None:
    keys = {row_key(seed, name, epoch) for seed in (0, 1, 11) for name in ("a", "b", "1") for epoch in (0, 1, 10, 11)}
    assert len(keys) == 36
    assert row_key(7, "stdlib", 3) == row_key(7, "stdlib", 3) < 2**64


def test_the_order_is_pinned() -> None:
    """A checkpoint's data state means something only as long as these numbers stay."""
    assert row_key(42, "a", 0) == 3378741727407129418
    assert permute(np.arange(10), 10, row_key(42, "a", 0)).tolist() == [5, 2, 8, 9, 3, 1, 6, 0, 4, 7]


# ---------------------------------------------------------------------------------------------------------------- mixture


def mixture(
    rows: Sequence[int],
    weights: Sequence[float | None] | None = None,
    epochs: Sequence[int | None] | None = None,
    *,
    seed: int = 1,
    start: DataState | None = None,
) -> Mixture:
    """Sources called a, b, c, …"""
    many = [None] * len(rows)
    return Mixture(
        [
            MixtureSource(name(n), *values)
            for n, values in enumerate(zip(rows, weights or many, epochs or many, strict=True))
        ],
        seed,
        start,
    )


def name(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"s{number}"


def triples(mixed: Mixture, start: int, stop: int) -> list[tuple[str, int, int]]:
    refs = mixed.rows_at(start, stop)
    names = [*(source.name for source in mixed.sources), "-"]
    return [(names[s], int(e), int(r)) for s, e, r in zip(refs.source, refs.epoch, refs.row, strict=True)]


@settings(max_examples=80, deadline=None)
@given(
    weights=st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any),
    begin=st.integers(0, 10**12),
)
def test_every_source_stays_within_one_row_of_its_share(weights: list[int], begin: int) -> None:
    mixed = mixture([7] * len(weights), weights)
    shares = np.array(whole_weights(mixed.sources))
    period = int(shares.sum())
    for start in (0, begin):
        stop = start + min(2 * period, 1_000)
        picks = np.eye(len(weights), dtype=np.int64)[mixed.rows_at(start, stop).source]
        counts = np.array(list(mixed.state_at(start).taken.values())) + picks.cumsum(0)
        # |taken − position · share / period| < 1, in whole numbers
        assert np.abs(counts * period - np.arange(start + 1, stop + 1)[:, None] * shares).max() < period
        assert list(mixed.state_at(stop).taken.values()) == counts[-1].tolist()


def test_the_bound_is_not_trivial() -> None:
    """Taking the largest deficit, as one would first write it, drifts past one row with many sources."""
    weights = [*[40] * 8, *[20] * 3, 9, 9, 5, 5, 5, 3, 3, 2, 2, 2, *[1] * 17]
    total, taken, worst = sum(weights), [0] * len(weights), Fraction(0)
    for position in range(1, total + 1):
        deficits = [Fraction(position * w, total) - n for w, n in zip(weights, taken, strict=True)]
        taken[deficits.index(max(deficits))] += 1
        worst = max(worst, *(abs(Fraction(position * w, total) - n) for w, n in zip(weights, taken, strict=True)))
    assert worst >= 1


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    weights=st.data(),
    seed=st.integers(0, 2**32),
    length=st.integers(1, 400),
)
def test_each_row_comes_once_per_epoch(rows: list[int], weights: st.DataObject, seed: int, length: int) -> None:
    chosen = weights.draw(st.none() | st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
    taken: dict[tuple[str, int], list[int]] = {}
    for source, epoch, row in triples(mixture(rows, chosen, seed=seed), 0, length):
        taken.setdefault((source, epoch), []).append(row)
    for number, size in enumerate(rows):
        epochs = [taken[key] for key in sorted(taken) if key[0] == name(number)]
        assert [key[1] for key in sorted(taken) if key[0] == name(number)] == list(range(len(epochs)))
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs[:-1])
        assert all(len(set(epoch)) == len(epoch) and set(epoch) <= set(range(size)) for epoch in epochs[-1:])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    draw=st.data(),
)
def test_sources_end_after_their_epochs(rows: list[int], draw: st.DataObject) -> None:
    epochs = draw.draw(st.lists(st.integers(1, 4), min_size=len(rows), max_size=len(rows)))
    weights = draw.draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
    mixed = mixture(rows, weights, epochs)
    assert mixed.end == sum(n * times for n, times in zip(rows, epochs, strict=True))
    found = Counter((source, row) for source, _, row in triples(mixed, 0, mixed.end))
    assert found == {
        (name(k), row): times for k, (n, times) in enumerate(zip(rows, epochs, strict=True)) for row in range(n)
    }
    behind = mixed.rows_at(mixed.end - 1, mixed.end + 3)
    assert (behind.source == -1).tolist() == [False, True, True, True]
    assert mixed.state_at(mixed.end + 3).taken == mixed.state_at(mixed.end).taken
    assert mixed.epochs_at(mixed.end) == {name(k): float(times) for k, times in enumerate(epochs)}


def test_when_a_source_has_ended_the_others_share_its_part() -> None:
    """a has 6 rows and two epochs at half of the rows: it is over after 24 positions; b and c go on as 2 : 1."""
    mixed = mixture([6, 100, 100], [0.5, 0.3333, 0.1667], [2, None, None])
    assert mixed.end is None
    first = Counter(source for source, _, _ in triples(mixed, 0, 24))
    assert first["a"] == 12
    assert triples(mixed, 23, 24)[0][0] == "a" or triples(mixed, 22, 23)[0][0] == "a"
    for stop in range(24, 300):
        counts = Counter(source for source, _, _ in triples(mixed, 24, stop))
        assert counts["a"] == 0
        assert abs(counts["b"] - (stop - 24) * 0.3333 / 0.5) < 1
        assert abs(counts["c"] - (stop - 24) * 0.1667 / 0.5) < 1


def test_a_mixture_without_weights_takes_everything_once_an_epoch() -> None:
    mixed = mixture([10, 30, 7])
    found = Counter((source, row) for source, _, row in triples(mixed, 0, 47))
    assert len(found) == 47
    assert mixed.epochs_at(47) == {"a": 1.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize("weight", [0.0, 1e-9])
def test_a_weight_of_zero_means_never_and_any_other_means_sometimes(weight: float) -> None:
    mixed = mixture([10, 10], [1, weight])
    assert mixed.state_at(3_000_000).taken["b"] == (3 if weight else 0)
    with pytest.raises(ValueError, match="a weight above 0"):
        mixture([10, 10], [0, 0])


def test_an_ended_data_set_of_zero_weight_is_over_at_once() -> None:
    mixed = mixture([3, 5], [1, 0], [1, 1])
    assert mixed.end == 3


# A20: (weights, rows of a in 2,000 positions). Its 10 rows repeat; b has 1,000.
@pytest.mark.parametrize(
    ("weights", "share"), [((0.001, 0.999), 0.001), ((0.5, 0.5), 0.5), ((1, 0), 1.0), ((30, 70), 0.3)]
)
def test_a20_shares_and_epochs(weights: tuple[float, float], share: float) -> None:
    mixed = mixture([10, 1000], weights)
    rows = triples(mixed, 0, 2_000)
    counts = Counter(source for source, _, _ in rows)
    assert abs(counts["a"] - 2_000 * share) <= 1
    assert counts["a"] + counts["b"] == 2_000
    assert mixed.epochs_at(2_000) == {"a": counts["a"] / 10, "b": counts["b"] / 1000}
    times = Counter(row for source, _, row in rows if source == "a")
    assert sum(times.values()) == sum(times[row] for row in range(10))
    assert max(times[row] for row in range(10)) - min(times[row] for row in range(10)) <= 1
    orders = {epoch: tuple(r for s, e, r in rows if (s, e) == ("a", epoch)) for epoch in range(counts["a"] // 10)}
    assert len(set(orders.values())) == len(orders), "repeats are shuffled anew"


def test_a02_three_epochs_are_three_permutations_and_every_run_has_the_same() -> None:
    runs = [[row for _, _, row in triples(mixture([32], seed=1), 0, 96)] for _ in range(2)]
    assert runs[0] == runs[1]
    epochs = [tuple(runs[0][start : start + 32]) for start in (0, 32, 64)]
    assert all(sorted(epoch) == list(range(32)) for epoch in epochs)
    assert len({*epochs, tuple(range(32))}) == 4
    assert [row for _, _, row in triples(mixture([32], seed=2), 0, 96)] != runs[0]


# -------------------------------------------------------------------------------------------------- slices and goings-on


@settings(max_examples=60, deadline=None)
@given(
    epochs=st.lists(st.none() | st.integers(1, 3), min_size=3, max_size=3),
    cuts=st.lists(st.integers(0, 150), min_size=1, max_size=6),
)
def test_any_slices_give_the_same_rows(epochs: list[int | None], cuts: list[int]) -> None:
    mixed = mixture([5, 11, 17], [3, 1, 2], epochs)
    whole = triples(mixed, 0, 150)
    edges = sorted({0, 150, *cuts})
    assert [row for a, b in pairwise(edges) for row in triples(mixed, a, b)] == whole
    counts = Counter(source for source, _, _ in whole[: cuts[0]])
    assert mixed.state_at(cuts[0]) == DataState(cuts[0], {source: counts[source] for source in "abc"})
    assert triples(mixture([5, 11, 17], [3, 1, 2], epochs), cuts[0], 150) == whole[cuts[0] :]


@settings(max_examples=80, deadline=None)
@given(
    first=st.integers(0, 200),
    second=st.integers(0, 200),
    weights=st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any),
    dropped=st.sampled_from(["a", "b", "c", None]),
)
def test_an_edited_mixture_repeats_no_row_within_an_epoch(
    first: int, second: int, weights: list[int], dropped: str | None
) -> None:
    """Reweighted, one source dropped and one new after ``first`` rows, and the same again the other way round."""
    rows = {"a": 7, "b": 13, "c": 29, "d": 5}
    taken: list[tuple[str, int, int]] = []
    state = DataState()
    plans = [
        ({"a": 2, "b": 1, "c": 4}, first),
        (dict(zip("abcd", weights, strict=True)), second),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, 120),
    ]
    for number, (plan, length) in enumerate(plans):
        sources = [
            MixtureSource(key, rows[key], weight) for key, weight in plan.items() if (number, key) != (1, dropped)
        ]
        if not any(source.weight for source in sources):
            continue
        mixed = Mixture(sources, 1, state)
        taken += triples(mixed, state.position, state.position + length)
        state = mixed.state_at(state.position + length)
        assert state.position == len(taken)
        assert {key: n for key, n in state.taken.items() if n} == Counter(source for source, _, _ in taken)
    assert len(set(taken)) == len(taken)
    for key, size in rows.items():
        counts = Counter(epoch for source, epoch, _ in taken if source == key)
        assert all(counts[epoch] == size for epoch in range(max(counts, default=0))), (
            "no epoch begins before one is done"
        )


def test_an_edited_mixture_counts_epochs_that_were_taken_before() -> None:
    state = mixture([10, 10], epochs=[2, None]).state_at(30)
    assert state.taken == {"a": 15, "b": 15}
    rest = Mixture([MixtureSource("a", 10, 1.0, max_epochs=2)], 1, state)
    assert rest.end == 35
    assert [epoch for _, epoch, _ in triples(rest, 30, 35)] == [1] * 5
    assert rest.state_at(35).taken == {"a": 20, "b": 15}
    over = Mixture([MixtureSource("a", 10, 1.0, max_epochs=1)], 1, state)
    assert over.end == 30
    assert over.rows_at(30, 32).source.tolist() == [-1, -1]


def test_positions_before_the_start_are_refused() -> None:
    mixed = mixture([10], start=DataState(5, {"a": 5}))
    for ask in (lambda: mixed.rows_at(4, 6), lambda: mixed.state_at(4)):
        with pytest.raises(ValueError, match="position 4 lies before this mixture's start at 5"):
            ask()


# ------------------------------------------------------------------------------------------------------- far into the run


@pytest.mark.parametrize("position", [10**9, 10**12])
def test_far_positions_cost_what_the_first_costs(position: int) -> None:
    """The memory that 64 rows take tells how much is worked on; a table of what came before would be gigabytes."""
    weights = [0.7, 0.2, 0.1]
    mixed = mixture([10**9 + 7, 3, 999], weights)
    peaks = []
    for start in (0, position):
        mixed.rows_at(start, start + 64)
        tracemalloc.start()
        refs = mixed.rows_at(start, start + 64)
        mixed.state_at(start)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 100_000
    assert peaks[1] < 4 * peaks[0]
    taken = mixed.state_at(position).taken
    assert sum(taken.values()) == position
    assert all(abs(taken[name(n)] - position * weight) < 1 for n, weight in enumerate(weights))
    for number, rows in enumerate([10**9 + 7, 3, 999]):
        here = refs.source == number
        done = taken[name(number)] + np.arange(here.sum())
        assert refs.epoch[here].tolist() == (done // rows).tolist()
        for epoch, index, row in zip(refs.epoch[here], done % rows, refs.row[here], strict=True):
            assert permute(np.array([index]), rows, row_key(1, name(number), int(epoch))) == row


# ---------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([0.7, 0.3], [7, 3]),
        ([30, 70], [3, 7]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([1, 0], [1, 0]),
        ([5.0], [1]),
        ([1e-9, 1], [1, 1_000_000]),
        ([0.333333, 0.666667], [333333, 666667]),
    ],
)
def test_whole_weights(weights: list[float], whole: list[int]) -> None:
    assert whole_weights([MixtureSource("x", 1, weight) for weight in weights]) == whole


@pytest.mark.parametrize("rows", [(10, 4 * 10**6), (1_234_567, 7_654_321, 333_333)])
def test_without_weights_a_pass_takes_every_row_once_however_many_there_are(rows: tuple[int, ...]) -> None:
    sources = [MixtureSource(f"s{number}", count) for number, count in enumerate(rows)]
    mixture = Mixture(sources, 3)
    total = sum(rows)
    for passes in (1, 2, 1000):
        assert list(mixture.state_at(passes * total).taken.values()) == [passes * count for count in rows]
    refs = mixture.rows_at(total - 50, total + 50)
    assert (refs.epoch == np.repeat([0, 1], 50)).all()
    # The smallest source whole, from every position that it has in the first pass.
    small = min(range(len(rows)), key=lambda number: rows[number])
    if rows[small] == 10:
        found = [mixture.rows_at(at, at + 10**6) for at in range(0, total, 10**6)]
        seen = np.concatenate([ref.row[(ref.source == small) & (ref.epoch == 0)] for ref in found])
        assert sorted(seen.tolist()) == list(range(10))


def test_without_weights_an_edit_first_ends_the_passes_that_have_begun() -> None:
    before = Mixture([MixtureSource("a", 10), MixtureSource("b", 6)], 1)
    state = before.state_at(9)
    after = Mixture([MixtureSource("a", 10), MixtureSource("b", 6), MixtureSource("new", 5, max_epochs=1)], 1, state)
    left = 16 - 9
    refs = after.rows_at(9, 9 + left + 21)
    assert set(refs.source[:left].tolist()) == {0, 1}
    assert sorted(refs.source[left:].tolist()) == [0] * 10 + [1] * 6 + [2] * 5
    taken = [(0, 0, row) for row in before.rows_at(0, 9).row[before.rows_at(0, 9).source == 0].tolist()]
    again = [(0, 0, row) for row in refs.row[(refs.source == 0) & (refs.epoch == 0)].tolist()]
    assert sorted(row for _, _, row in taken + again) == list(range(10))


def test_sources_that_have_all_ended() -> None:
    for weight in (None, 1.0):
        sources = [MixtureSource("a", 4, weight, max_epochs=1), MixtureSource("b", 2, weight, max_epochs=1)]
        done = Mixture(sources, 1, DataState(6, {"a": 4, "b": 2}))
        assert done.end == 6
        assert done.rows_at(6, 9).source.tolist() == [-1, -1, -1]
        assert done.state_at(8).taken == {"a": 4, "b": 2}
