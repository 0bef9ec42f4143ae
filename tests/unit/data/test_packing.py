"""Rows cut out of a stream: what is read, what is predicted, and where documents begin."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.data.packing import (
    IGNORED_TARGET,
    Row,
    best_fit,
    build_row,
    join_rows,
    stream_rows,
    stream_span,
)

PAD = 9_999


def rows_of(lengths: list[int], seq_len: int, *, isolate: bool) -> list[Row]:
    """All rows of a stream of documents; token t of the stream is t + 100."""
    tokens = sum(lengths)
    begins = [0, *accumulate(lengths)][:-1]
    rows = []
    for number in range(stream_rows(tokens, seq_len)):
        start, stop = stream_span(number, tokens, seq_len)
        here = [
            d for d, (first, n) in enumerate(zip(begins, lengths, strict=True)) if first < stop and first + n > start
        ]
        rows.append(
            build_row(
                np.arange(start, stop) + 100,
                np.array([begins[d] - start for d in here]),
                np.array(here),
                seq_len=seq_len,
                isolate=isolate,
                pad_id=PAD,
            )
        )
    return rows


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def test_a09_three_documents_in_a_row() -> None:
    """Documents of 4, 6 and 6 tokens in 16, and a fourth behind them, so that the row's end is a boundary too."""
    ids = list(range(100, 116))
    isolated, plain = (rows_of([4, 6, 6, 5], 16, isolate=isolate)[0] for isolate in (True, False))
    assert isolated.input_ids.tolist() == plain.input_ids.tolist() == ids
    assert isolated.position_ids.tolist() == [*range(4), *range(6), *range(6)]
    assert plain.position_ids.tolist() == list(range(16))
    assert plain.targets.tolist() == [*ids[1:], 116]
    masked = [*ids[1:], 116]
    masked[3] = masked[9] = masked[15] = IGNORED_TARGET
    assert isolated.targets.tolist() == masked
    assert isolated.documents.tolist() == plain.documents.tolist() == [0, 1, 2]


def test_a09_the_stream_ends_with_the_row() -> None:
    """The last token has nothing to predict; in plain mode it is the only one."""
    isolated, plain = (rows_of([4, 6, 6], 16, isolate=isolate) for isolate in (True, False))
    assert len(isolated) == len(plain) == 1
    assert np.flatnonzero(isolated[0].targets == IGNORED_TARGET).tolist() == [3, 9, 15]
    assert np.flatnonzero(plain[0].targets == IGNORED_TARGET).tolist() == [15]


def test_a_document_that_is_cut_goes_on_at_position_0() -> None:
    """5 and 9 tokens in rows of 8: the second is cut after 3 of its tokens, and the cut costs no target."""
    first, second = rows_of([5, 9], 8, isolate=True)
    assert first.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert first.targets.tolist() == [101, 102, 103, 104, IGNORED_TARGET, 106, 107, 108]
    assert second.input_ids.tolist() == [108, 109, 110, 111, 112, 113, PAD, PAD]
    assert second.targets.tolist() == [109, 110, 111, 112, 113, *[IGNORED_TARGET] * 3]
    assert second.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert (first.documents.tolist(), second.documents.tolist()) == ([0, 1], [1])


def test_a_boundary_at_the_very_end_of_a_row() -> None:
    first, second = rows_of([8, 5], 8, isolate=True)
    assert first.targets.tolist() == [*range(101, 108), IGNORED_TARGET]
    assert first.documents.tolist() == [0]
    assert second.input_ids.tolist()[:5] == list(range(108, 113))
    assert second.documents.tolist() == [1]
    assert rows_of([8, 5], 8, isolate=False)[0].targets[-1] == 108


@pytest.mark.parametrize(
    ("tokens", "targets"), [(0, []), (1, []), (64, [63]), (65, [64]), (66, [64, 1]), (129, [64, 64])]
)
def test_a11_no_token_is_left_out(tokens: int, targets: list[int]) -> None:
    rows = rows_of([tokens], 64, isolate=True) if tokens else []
    assert stream_rows(tokens, 64) == len(targets)
    assert [int((row.targets != IGNORED_TARGET).sum()) for row in rows] == targets
    assert all(len(part) == 64 for row in rows for part in (row.input_ids, row.targets, row.position_ids))


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(2, 50), isolate=st.booleans())
def test_rows_hold_the_whole_stream(lengths: list[int], seq_len: int, isolate: bool) -> None:
    tokens = sum(lengths)
    rows = rows_of(lengths, seq_len, isolate=isolate)
    inputs = np.concatenate([np.zeros(0, np.int64), *(row.input_ids for row in rows)])
    real = inputs[inputs != PAD]
    # Only the last token may be a target alone, when it would begin a row of its own.
    assert real.tolist() == list(range(100, 100 + len(real)))
    assert len(real) in (tokens, tokens - 1)
    assert (inputs[: len(real)] != PAD).all(), "padding only behind the end"
    targets = np.concatenate([np.zeros(0, np.int64), *(row.targets for row in rows)])
    counted = targets != IGNORED_TARGET
    assert counted.sum() == (tokens - len(lengths) if isolate else tokens - 1)
    assert (targets[counted] == inputs[counted] + 1).all()
    assert len(set(targets[counted].tolist())) == counted.sum(), "no token is predicted twice"


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(2, 50))
def test_isolated_rows_follow_the_documents(lengths: list[int], seq_len: int) -> None:
    owner = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    for number, row in enumerate(rows_of(lengths, seq_len, isolate=True)):
        documents = []
        for i, token in enumerate(row.input_ids.tolist()):
            if token == PAD:
                assert row.targets[i] == IGNORED_TARGET
                continue
            place = token - 100
            assert place == number * seq_len + i
            assert row.position_ids[i] == min(place - begins[owner[place]], i)
            documents.append(int(owner[place]))
            same = place + 1 < len(owner) and owner[place + 1] == owner[place]
            assert row.targets[i] == (token + 1 if same else IGNORED_TARGET)
        assert row.documents.tolist() == sorted(set(documents))
        padding = row.position_ids[row.input_ids == PAD]
        assert padding.tolist() == list(range(len(padding))), "padding is a document of its own"


def test_types_and_lengths_are_fixed() -> None:
    for row in rows_of([3, 9, 1, 1, 20], 8, isolate=True):
        for part in (row.input_ids, row.targets, row.position_ids):
            assert (part.dtype, part.shape) == (np.int64, (8,))


# --------------------------------------------------------------------------------------------------------------- best fit


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(2, 24))
def test_best_fit_takes_every_target_once_and_cuts_nothing_that_fits(lengths: list[int], seq_len: int) -> None:
    packed = best_fit(np.array(lengths), seq_len)
    begins = [0, *accumulate(lengths)][:-1]
    targets = [
        target
        for begin, length in zip(packed.begin.tolist(), packed.length.tolist(), strict=True)
        for target in range(begin + 1, begin + length + 1)
    ]
    expected = [b + k for b, n in zip(begins, lengths, strict=True) for k in range(1, n)]
    assert sorted(targets) == expected
    for row in range(packed.rows):
        inside = slice(packed.first[row], packed.first[row + 1])
        assert 0 < packed.length[inside].sum() <= seq_len
    pieces = np.bincount(np.searchsorted(begins, packed.begin, side="right") - 1, minlength=len(lengths))
    for count, n in zip(pieces.tolist(), lengths, strict=True):
        assert count == (0 if n == 1 else 1 if n <= seq_len + 1 else -(-(n - 1) // seq_len))
    again = best_fit(np.array(lengths), seq_len)
    assert (again.first == packed.first).all()
    assert (again.begin == packed.begin).all()


def test_best_fit_by_hand() -> None:
    # Inputs 5, 3, 2, 6 and a document of 14 inputs, in rows of 8: 8 | 6 + 2 | 6 | 5 + 3.
    packed = best_fit(np.array([6, 4, 3, 7, 15]), 8)
    rows = [packed.length[packed.first[r] : packed.first[r + 1]].tolist() for r in range(packed.rows)]
    assert sorted(sorted(row) for row in rows) == [[2, 6], [3, 5], [6], [8]]
    assert packed.padding(8) == pytest.approx(2 / 32)
    assert best_fit(np.array([1, 1]), 8).rows == 0


def test_a_packed_row() -> None:
    pieces = [
        build_row(np.array(ids), np.array([start]), np.array([document]), seq_len=len(ids) - 1, isolate=True, pad_id=0)
        for ids, start, document in (([5, 6, 7], 0, 3), ([8, 9], -4, 1))
    ]
    row = join_rows(pieces, seq_len=5, pad_id=0)
    assert row.input_ids.tolist() == [5, 6, 8, 0, 0]
    assert row.targets.tolist() == [6, 7, 9, -100, -100]
    assert row.position_ids.tolist() == [0, 1, 0, 0, 1]
    assert row.documents.tolist() == [3, 1]
