"""From a stream of tokens to rows of ``seq_len``: numbers in, numbers out; no files.

Letters: L = seq_len, T = tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
IGNORED_TARGET = -100


@dataclass(frozen=True)
class Row:
    """One row: ``input_ids``, ``targets`` and ``position_ids`` are int64 ``[L]``, ``documents`` int64 ``[d]``.

    ``targets[i]`` is the token that ``input_ids[i]`` must predict, −100 where the loss doesn't count it.
    """

    input_ids: Ints
    targets: Ints
    position_ids: Ints
    documents: Ints


def stream_rows(tokens: int, seq_len: int) -> int:
    """Rows that hold a stream of ``tokens``: each row has ``seq_len`` inputs, and the next token is its last target.

    So T tokens make T − 1 targets and ceil((T − 1) / L) rows; the last row is padded and no token is left out.
    """
    return max(0, -(-(tokens - 1) // seq_len))


def stream_span(row: int, tokens: int, seq_len: int) -> tuple[int, int]:
    """The tokens ``[start, stop)`` that a row needs, its last target included."""
    start = row * seq_len
    return start, min(start + seq_len + 1, tokens)


def build_row(ids: Ints, starts: Ints, documents: Ints, *, seq_len: int, isolate: bool, pad_id: int) -> Row:
    """Cut one row out of the stream.

    ids: the row's tokens and the next one, int64 ``[≤ L + 1]``. starts: where the documents in it begin, relative to
    the row, int64 ``[d]``, the first may be negative. documents: their ids, int64 ``[d]``.

    With ``isolate`` position ids restart at every document (and at the row's start for one that was cut), and the
    target that would cross from one document into the next is not counted. Padding is a document of its own with no
    targets.
    """
    inputs = min(len(ids), seq_len)
    input_ids = np.full(seq_len, pad_id, dtype=np.int64)
    input_ids[:inputs] = ids[:inputs]
    targets = np.full(seq_len, IGNORED_TARGET, dtype=np.int64)
    targets[: len(ids) - 1] = ids[1:]
    inside = (starts > 0) & (starts <= seq_len)
    begins = starts[inside]
    if isolate:
        targets[begins - 1] = IGNORED_TARGET
        segments = np.concatenate([[0], begins[begins < inputs], [inputs] if inputs < seq_len else []]).astype(np.int64)
        lengths = np.diff(segments, append=seq_len)
        position_ids = np.arange(seq_len, dtype=np.int64) - np.repeat(segments, lengths)
    else:
        position_ids = np.arange(seq_len, dtype=np.int64)
    return Row(input_ids, targets, position_ids, documents[starts < inputs])


@dataclass(frozen=True)
class Spans:
    """Inputs ``[begin, begin + length)`` of the stream, ascending and apart; each int64 ``[spans]``.

    The target of an input is the token behind it.
    """

    begin: Ints
    length: Ints


@dataclass(frozen=True)
class Packed:
    """Rows made of pieces of the stream. Row r holds the pieces ``[first[r], first[r + 1])``.

    A piece is ``length`` inputs from token ``begin`` of the stream on, and their targets, one token further each.
    first: int64 ``[rows + 1]``; begin, length: int64 ``[pieces]``.
    """

    first: Ints
    begin: Ints
    length: Ints

    @property
    def rows(self) -> int:
        return len(self.first) - 1

    def padding(self, seq_len: int) -> float:
        """Share of the rows' inputs that is padding."""
        return 1 - int(self.length.sum()) / max(1, self.rows * seq_len)

    def pieces(self, rows: Ints) -> tuple[Ints, Ints]:
        """(begin, length) of the pieces in these rows, one row after the other."""
        counts = self.first[rows + 1] - self.first[rows]
        before = np.repeat(np.cumsum(counts) - counts, counts)
        inside = np.arange(int(counts.sum()), dtype=np.int64) - before + np.repeat(self.first[rows], counts)
        return self.begin[inside], self.length[inside]


def best_fit(lengths: Ints, seq_len: int) -> Packed:
    """Pack documents into rows so that none that fits is cut.

    lengths: tokens of each document, int64 ``[d]``, in stream order. A document of n tokens has n − 1 inputs, its last
    token being a target only, so up to seq_len + 1 tokens fit; a longer one becomes full rows and a rest. Every target
    of a document comes exactly once; single tokens have none and are left out. The same lengths give the same rows.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return pack_spans(Spans(starts, np.maximum(lengths - 1, 0)), seq_len)


def pack_spans(spans: Spans, seq_len: int) -> Packed:
    """Pack spans into rows so that none that fits is cut.

    Pieces are placed the longest first, each into the row with the least space that still holds it (best-fit
    decreasing; Ding et al., arXiv:2404.10830, use it for the same).
    """
    begin, length = _pieces(spans, seq_len)
    order = np.argsort(-length, kind="stable")
    rows_of_full = int((length == seq_len).sum())
    row = np.empty(len(order), dtype=np.int64)
    row[:rows_of_full] = np.arange(rows_of_full)
    rows = rows_of_full
    open_rows: list[list[int]] = [[] for _ in range(seq_len)]  # rows by the space left in them
    spaces = 0  # bit s is set while some row has space s
    for place, wanted in enumerate(length[order[rows_of_full:]].tolist(), start=rows_of_full):
        fitting = spaces >> wanted
        if fitting:
            space = wanted + ((fitting & -fitting).bit_length() - 1)
            into = open_rows[space].pop()
            if not open_rows[space]:
                spaces &= ~(1 << space)
        else:
            space, into = seq_len, rows
            rows += 1
        row[place] = into
        if space > wanted:
            open_rows[space - wanted].append(into)
            spaces |= 1 << (space - wanted)
    by_row = order[np.argsort(row, kind="stable")]
    first = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))]).astype(np.int64)
    return Packed(first, begin[by_row], length[by_row])


def _pieces(spans: Spans, seq_len: int) -> tuple[Ints, Ints]:
    """(first token in the stream, inputs) of every piece of at most a row, in stream order."""
    counts = -(-spans.length // seq_len)
    span = np.repeat(np.arange(len(spans.length), dtype=np.int64), counts)
    number = np.arange(len(span), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    length = np.minimum(spans.length[span] - number * seq_len, seq_len)
    return spans.begin[span] + number * seq_len, length


def cut_spans(spans: Spans, seq_len: int) -> Packed:
    """Spans one after the other, cut every ``seq_len`` inputs: what a stream is, with holes. Only the last row is short."""
    ends = np.cumsum(spans.length)
    total = int(ends[-1])
    cuts = np.arange(0, total, seq_len, dtype=np.int64)
    edges = np.sort(np.concatenate([cuts, ends]), kind="stable")  # two ascending runs are merged; np.unique would hash
    edges = edges[np.diff(edges, prepend=-1) > 0]
    span = np.searchsorted(ends, edges[:-1], side="right")
    begin = spans.begin[span] + edges[:-1] - (ends - spans.length)[span]
    return Packed(np.searchsorted(edges, np.append(cuts, total)).astype(np.int64), begin, np.diff(edges))


def stream_left(taken: NDArray[np.bool_], tokens: int, seq_len: int) -> Spans:
    """The inputs of a stream's rows but those of the rows that were taken. taken: bool ``[rows]``."""
    edges = np.flatnonzero(np.diff(np.concatenate([[True], taken, [True]])))
    begin, end = edges[::2] * seq_len, np.minimum(edges[1::2] * seq_len, tokens - 1)
    return Spans(begin, end - begin)


def packed_left(taken: NDArray[np.bool_], packed: Packed) -> Spans:
    """The inputs of packed rows but those of the rows that were taken; pieces that touch are one span again."""
    begin, length = packed.pieces(np.flatnonzero(~taken))
    order = np.argsort(begin)
    begin, end = begin[order], (begin + length)[order]
    apart = np.flatnonzero(begin[1:] != end[:-1])
    begin, end = np.concatenate([begin[:1], begin[apart + 1]]), np.concatenate([end[apart], end[-1:]])
    return Spans(begin, end - begin)


def join_rows(pieces: Sequence[Row], *, seq_len: int, pad_id: int) -> Row:
    """Pieces side by side as one row; each keeps its position ids, which begin at 0. The rest is padding."""
    input_ids = np.full(seq_len, pad_id, dtype=np.int64)
    targets = np.full(seq_len, IGNORED_TARGET, dtype=np.int64)
    position_ids = np.empty(seq_len, dtype=np.int64)
    place = 0
    for piece in pieces:
        inside = slice(place, place + len(piece.input_ids))
        input_ids[inside], targets[inside], position_ids[inside] = piece.input_ids, piece.targets, piece.position_ids
        place = inside.stop
    position_ids[place:] = np.arange(seq_len - place)
    documents = dict.fromkeys(int(document) for piece in pieces for document in piece.documents)
    return Row(input_ids, targets, position_ids, np.array(list(documents), dtype=np.int64))
