"""Rows of datasets on disk, and which rank gets which of them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.config.schema import Data
from arriero.config.schema import Source as SourceConfig
from arriero.data.loader import (
    MicroBatch,
    RowPlace,
    Rows,
    Source,
    TrainingData,
    open_one,
    open_sources,
    padding_row,
    spread,
    stack,
    validation_batches,
)
from arriero.data.packing import IGNORED_TARGET
from arriero.data.shards import ShardInfo, ShardWriter, split_entry, write_manifest
from arriero.errors import UserError

EOS = 1


def write_split(
    folder: Path, split: str, documents: Sequence[Sequence[int]], max_tokens: int | None = None
) -> list[ShardInfo]:
    with ShardWriter(folder, split, np.dtype("u2"), max_tokens=max_tokens) as writer:
        for document in documents:
            writer.add(np.array(document), np.array([len(document)]))
        return writer.close()


def write_dataset(
    folder: Path,
    train: Sequence[Sequence[int]],
    validation: Sequence[Sequence[int]] | None = None,
    *,
    fingerprint: str = "f",
    max_tokens: int | None = None,
) -> Path:
    folder.mkdir()
    parts = {"train": train} | ({} if validation is None else {"validation": validation})
    entries = {
        split: split_entry(write_split(folder, split, documents, max_tokens), text_bytes=3 * sum(map(len, documents)))
        for split, documents in parts.items()
    }
    write_manifest(
        folder,
        {
            "format_version": 1,
            "fingerprint": fingerprint,
            "tokenizer": {"fingerprint": "t", "eos_token_id": EOS},
            "largest_id": max(token for documents in parts.values() for document in documents for token in document),
            "splits": entries,
            "tables": [],
        },
    )
    return folder


def mark(count: int, seq_len: int) -> list[list[int]]:
    """Documents that fill exactly one row each; row i is the token i + 10, seq_len times."""
    return [[i + 10] * seq_len for i in range(count)]


def one_source(folder: Path, seq_len: int = 16, **keys: object) -> Source:
    return open_sources(Data(sources=(SourceConfig(path=str(folder)),), seq_len=seq_len, **keys))[0]  # type: ignore[arg-type]


def marks(batch: MicroBatch) -> list[int]:
    """Which of the marked rows a micro-batch holds; padding is left out."""
    return [int(ids[0]) - 10 for ids, place in zip(batch.input_ids, batch.places, strict=True) if place.source >= 0]


# ------------------------------------------------------------------------------------------------------------------- rows


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 60_000), min_size=1, max_size=30), min_size=1, max_size=12),
    seq_len=st.integers(2, 25),
    max_tokens=st.integers(1, 50),
)
def test_rows_of_any_documents_in_any_shards(documents: list[list[int]], seq_len: int, max_tokens: int) -> None:
    flat = [token for document in documents for token in document]
    with tempfile.TemporaryDirectory() as scratch:
        dataset = open_one(
            write_dataset(Path(scratch) / "d", [*documents, [7] * 30], max_tokens=max_tokens),
            Data(sources=(SourceConfig(path="d"),), seq_len=seq_len, validation_split=0),
        )
        flat += [7] * 30
        rows = [dataset.training[number] for number in range(len(dataset.training))]
    ends = set(np.cumsum([len(document) for document in documents]).tolist())
    for number, row in enumerate(rows):
        first = number * seq_len
        text = flat[first : first + seq_len]
        assert row.input_ids.tolist() == text + [EOS] * (seq_len - len(text))
        following = [
            IGNORED_TARGET if first + i + 1 in ends else token for i, token in enumerate(flat[first + 1 :][:seq_len])
        ]
        assert row.targets.tolist() == following + [IGNORED_TARGET] * (seq_len - len(following))
    assert len(rows) == -(-(len(flat) - 1) // seq_len)


def test_a11_a_data_set_of_less_than_a_row(tmp_path: Path) -> None:
    small = write_dataset(tmp_path / "small", [[5] * 10])
    with pytest.raises(
        UserError, match=r"small: its training part has 10 tokens, less than one row of data.seq_len 64"
    ):
        one_source(small, 64, validation_split=0)
    for tokens, targets in ((64, [63]), (65, [64]), (66, [64, 1])):
        rows = one_source(write_dataset(tmp_path / str(tokens), [[5] * tokens]), 64, validation_split=0).training
        assert [int((rows[n].targets != IGNORED_TARGET).sum()) for n in range(len(rows))] == targets


def test_a_missing_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        one_source(tmp_path / "nowhere")


def test_validation_rows(tmp_path: Path) -> None:
    own = one_source(write_dataset(tmp_path / "own", mark(8, 16), [[3] * 20]))
    assert own.validation is not None
    assert (len(own.training), len(own.validation), own.targets_per_byte) == (8, 2, 19 / 60)
    with_hash = one_source(write_dataset(tmp_path / "hash", mark(8, 16)), validation_split=0.3)
    assert with_hash.validation is not None
    assert with_hash.targets_per_byte is None
    rows = [
        {int(r.input_ids[0]) for r in (part[n] for n in range(len(part)))}
        for part in (with_hash.training, with_hash.validation)
    ]
    assert rows[0] | rows[1] == {i + 10 for i in range(8)}
    assert not rows[0] & rows[1]
    assert one_source(tmp_path / "hash", validation_split=0).validation is None
    assert one_source(write_dataset(tmp_path / "one", mark(8, 16), [[3]])).validation is None, "one token has no target"


def test_sources_carry_their_recipe(tmp_path: Path) -> None:
    for letter in "ab":
        write_dataset(tmp_path / letter, mark(4, 16))
    configs = (
        SourceConfig(path=str(tmp_path / "a"), weight=2.0),
        SourceConfig(path=str(tmp_path / "b"), name="other", weight=1.0, max_epochs=3),
    )
    sources = open_sources(Data(sources=configs, seq_len=16, validation_split=0))
    assert [(s.name, s.weight, s.max_epochs) for s in sources] == [("a", 2.0, None), ("other", 1.0, 3)]


def test_a_bare_megatron_pair_pads_with_0(tmp_path: Path) -> None:
    write_split(tmp_path, "corpus", [[5] * 20])
    rows = one_source(tmp_path, 16, validation_split=0).training
    assert rows[1].input_ids.tolist() == [5] * 4 + [0] * 12


def test_a_padding_row_counts_nothing() -> None:
    row = padding_row(8, EOS)
    assert row.input_ids.tolist() == [EOS] * 8
    assert row.targets.tolist() == [IGNORED_TARGET] * 8
    assert row.documents.tolist() == []


def test_a_micro_batch() -> None:
    batch = stack([padding_row(8, EOS)] * 3, [RowPlace(-1, 0, 0, 0)] * 3)
    for tensor in (batch.input_ids, batch.targets, batch.position_ids):
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.int64, (3, 8))
    assert batch.target_tokens == 0


# ------------------------------------------------------------------------------------------------------------- whose rows


@pytest.fixture(scope="module")
def three_sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    folder = tmp_path_factory.mktemp("three")
    for letter, rows in (("a", 5), ("b", 11), ("c", 30)):
        write_dataset(folder / letter, mark(rows, 8))
    weights = {"a": 0.2, "b": 0.5, "c": 0.3}
    configs = tuple(SourceConfig(path=str(folder / name), weight=weight) for name, weight in weights.items())
    return open_sources(Data(sources=configs, seq_len=8, validation_split=0))


def test_a_micro_step_takes_consecutive_positions_over_the_ranks(three_sources: list[Source]) -> None:
    """Micro-step k of rank r begins at (k · size + r) · micro_batch: 2 ranks, 3 micro-batches of 2 rows each."""
    data = TrainingData(three_sources, seed=1)
    firsts = [
        [batch.places[0].position for batch in batches]
        for batches in (
            data.micro_batches(100, end=999, rank=rank, size=2, micro_batch=2, accumulation=3) for rank in range(2)
        )
    ]
    assert firsts == [[100, 104, 108], [102, 106, 110]]


def step_places(
    data: TrainingData, position: int, end: int, *, size: int, micro_batch: int, accumulation: int
) -> list[RowPlace]:
    """Every row of a step over all ranks; padding left out."""
    batches = [
        batch
        for rank in range(size)
        for batch in data.micro_batches(
            position, end=end, rank=rank, size=size, micro_batch=micro_batch, accumulation=accumulation
        )
    ]
    assert len(batches) == size * accumulation
    assert all(len(batch.places) == len(batch.rows) == micro_batch for batch in batches)
    return [place for batch in batches for place in batch.places if place.source >= 0]


LAYOUTS = [(size, micro, 24 // size // micro) for size in (1, 2, 3, 4, 6, 8, 12, 24) for micro in (1, 2, 3, 4, 6, 24)]
LAYOUTS = [layout for layout in LAYOUTS if np.prod(layout) == 24]


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 99), position=st.integers(0, 10**6), short=st.integers(-5, 60)
)
def test_a_step_has_the_same_rows_in_every_layout(
    three_sources: list[Source], layout: tuple[int, int, int], seed: int, position: int, short: int
) -> None:
    data = TrainingData(three_sources, seed=seed)
    size, micro_batch, accumulation = layout
    end = position + short
    found = step_places(data, position, end, size=size, micro_batch=micro_batch, accumulation=accumulation)
    refs = data.mixture.rows_at(position, position + 24)
    expected = [
        RowPlace(int(s), int(e), int(r), position + n)
        for n, (s, e, r) in enumerate(zip(refs.source, refs.epoch, refs.row, strict=True))
        if position + n < end
    ]
    assert sorted(found, key=lambda place: place.position) == expected
    assert len(found) == min(24, max(0, short))


def test_the_rows_of_a_micro_batch_are_those_of_its_places(three_sources: list[Source]) -> None:
    batch = TrainingData(three_sources, seed=3).rows_at(100, 140, end=130)
    for n, place in enumerate(batch.places):
        row = batch.rows[n]
        assert place.position == 100 + n
        assert (place.source == -1) == (place.position >= 130)
        assert torch.equal(batch.input_ids[n], torch.from_numpy(row.input_ids))
        assert torch.equal(batch.targets[n], torch.from_numpy(row.targets))
        assert torch.equal(batch.position_ids[n], torch.from_numpy(row.position_ids))
        if place.source >= 0:
            assert row.input_ids.tolist() == [place.row + 10] * 8
            assert row.input_ids.tolist() == three_sources[place.source].training[place.row].input_ids.tolist()
        else:
            assert row.targets.tolist() == [IGNORED_TARGET] * 8
    assert batch.target_tokens == 30 * 7


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a01_an_epoch_takes_every_row_once_with_a_partial_last_step(tmp_path: Path, size: int) -> None:
    """10 rows, one each per rank and step: the last step of 4 ranks has 2 rows and 2 of padding."""
    data = TrainingData([one_source(write_dataset(tmp_path / "d", mark(10, 16)), validation_split=0)], seed=1)
    taken = []
    for rank in range(size):
        for position in range(0, 10, size):
            (batch,) = data.micro_batches(position, end=10, rank=rank, size=size, micro_batch=1, accumulation=1)
            taken += marks(batch)
            if position + rank >= 10:
                assert batch.target_tokens == 0
    assert sorted(taken) == list(range(10))


def test_a02_the_same_global_order_on_any_number_of_ranks(tmp_path: Path) -> None:
    source = one_source(write_dataset(tmp_path / "d", mark(32, 16)), validation_split=0)
    orders = []
    for size in (1, 2, 4):
        data = TrainingData([source], seed=1)
        steps = []
        for position in range(0, 96, 4):
            batches = [
                next(data.micro_batches(position, end=96, rank=rank, size=size, micro_batch=4 // size, accumulation=1))
                for rank in range(size)
            ]
            steps.append(tuple(n for batch in batches for n in marks(batch)))
        orders.append(steps)
    assert orders[0] == orders[1] == orders[2]
    epochs = [[n for step in orders[0][start : start + 8] for n in step] for start in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(32)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a03_going_on_at_an_epochs_end(tmp_path: Path) -> None:
    """8 rows in steps of 2, three epochs; the run is stopped after step 4, which ends the first epoch."""
    source = one_source(write_dataset(tmp_path / "d", mark(8, 16)), validation_split=0)
    straight = TrainingData([source], seed=1)
    record = json.loads(json.dumps(straight.record(8)))
    assert record == straight.record(8)
    again = TrainingData.continued([source], seed=1, record=record)
    orders = [
        [marks(data.rows_at(position, position + 2, end=24)) for position in range(record["position"], 24, 2)]
        for data in (straight, again)
    ]
    assert orders[0] == orders[1]
    assert len(orders[1]) == 8, "steps 5 to 12"
    assert Counter(n for step in orders[1] for n in step) == dict.fromkeys(range(8), 2)


def test_an_edited_mixture_goes_on_from_what_was_taken(three_sources: list[Source]) -> None:
    before = TrainingData(three_sources, seed=1)
    record = before.record(37)
    edited = [replace(three_sources[1], weight=0.1), three_sources[2]]
    after = TrainingData.continued(edited, seed=1, record=record)
    assert after.mixture.start.position == 37
    assert after.mixture.start.taken == record["taken"]
    taken = [(p.epoch, p.row) for p in before.rows_at(0, 37, end=99).places if p.source == 1]
    taken += [(p.epoch, p.row) for p in after.rows_at(37, 400, end=400).places if p.source == 0]
    assert len(set(taken)) == len(taken)
    # What goes on once more has the edited plan's start, not the first one's.
    later = after.record(80)
    assert later["start"] == {"position": 37, "taken": record["taken"]}
    assert later["taken"]["a"] == record["taken"]["a"]
    third = TrainingData.continued(edited, seed=1, record=json.loads(json.dumps(later)))
    assert third.rows_at(80, 120, end=120).places == after.rows_at(80, 120, end=120).places


def test_a_data_set_that_changed_is_refused_by_name(tmp_path: Path) -> None:
    old, new = (
        one_source(write_dataset(tmp_path / part / "d", mark(8, 16), fingerprint=part), validation_split=0)
        for part in ("old", "new")
        if (tmp_path / part).mkdir() is None
    )
    record = TrainingData([old], seed=1).record(4)
    with pytest.raises(UserError, match=r"'d' has changed since .* fingerprint old then, new now"):
        TrainingData.continued([new], seed=1, record=record)


# ------------------------------------------------------------------------------------------------------------- evaluation


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5), micro_batch=st.integers(1, 6), max_rows=st.none() | st.integers(1, 14))
def test_a01_a06_validation_rows_come_once_and_ranks_do_equally_many_batches(
    ten_rows: Rows, size: int, micro_batch: int, max_rows: int | None
) -> None:
    by_rank = [
        list(validation_batches(ten_rows, 2, max_rows=max_rows, rank=rank, size=size, micro_batch=micro_batch))
        for rank in range(size)
    ]
    shapes = [[tuple(batch.input_ids.shape) for batch in batches] for batches in by_rank]
    assert all(shape == shapes[0] for shape in shapes), "a rank with fewer batches would leave the others waiting"
    assert all(0 < rows <= micro_batch for rows, _ in shapes[0])
    seen = [n for batches in by_rank for batch in batches for n in marks(batch)]
    assert len(seen) == len(set(seen)) == min(10, max_rows or 10)
    assert set(seen) <= set(range(10))
    for batch in (batch for batches in by_rank for batch in batches):
        assert {place.source for place in batch.places} <= {2, -1}
        padded = torch.tensor([place.source < 0 for place in batch.places])
        assert bool((batch.targets[padded] == IGNORED_TARGET).all())


@pytest.fixture(scope="module")
def ten_rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = write_dataset(tmp_path_factory.mktemp("ten") / "d", mark(2, 16), mark(10, 16))
    rows = one_source(folder).validation
    assert rows is not None
    return rows


@given(total=st.integers(1, 1000), count=st.integers(1, 1000))
def test_spread_is_even(total: int, count: int) -> None:
    count = min(total, count)
    numbers = spread(total, count)
    assert numbers[0] == 0
    assert numbers[-1] < total
    gaps = np.diff(numbers, append=total)
    assert gaps.max() - gaps.min() <= 1
    assert gaps.min() >= 1


# --------------------------------------------------------------------------------------------------------------- best fit


def test_best_fit_rows_are_the_documents_and_the_index_is_used_again(tmp_path: Path) -> None:
    documents = [[100 * d + k for k in range(n)] for d, n in enumerate([6, 4, 3, 7, 15, 2, 9])]
    folder = write_dataset(tmp_path / "d", documents, [[1, 2, 3, 4]])
    source = one_source(folder, seq_len=8, packing="best_fit")
    pairs = []
    for number in range(len(source.training)):
        row = source.training[number]
        counted = row.targets != IGNORED_TARGET
        pairs += list(zip(row.input_ids[counted].tolist(), row.targets[counted].tolist(), strict=True))
        assert {token // 100 for token in row.input_ids[counted].tolist()} == set(row.documents.tolist())
    assert sorted(pairs) == sorted((d[k], d[k + 1]) for d in documents for k in range(len(d) - 1))
    (index,) = list((folder / "index").glob("best_fit-train-8.npz"))
    before = index.stat().st_mtime_ns
    assert len(one_source(folder, seq_len=8, packing="best_fit").training) == len(source.training)
    assert index.stat().st_mtime_ns == before
    assert source.validation is not None
    assert len(source.validation) == 1
    # A part that is drawn for the run has no index of its own; its documents keep the dataset's numbers.
    drawn = one_source(
        write_dataset(tmp_path / "whole", documents), seq_len=8, packing="best_fit", validation_split=0.3
    )
    found = {int(d) for number in range(len(drawn.training)) for d in drawn.training[number].documents}
    assert drawn.validation is not None
    held = {int(d) for number in range(len(drawn.validation)) for d in drawn.validation[number].documents}
    assert found | held == set(range(7))
    assert not found & held
    first = drawn.training[0]
    assert {token // 100 for token in first.input_ids[first.targets != IGNORED_TARGET].tolist()} == set(
        first.documents.tolist()
    )
