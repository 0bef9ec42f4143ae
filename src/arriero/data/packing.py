"""From a stream of tokens to rows of ``seq_len``: numbers in, numbers out; no files.

Letters: L = seq_len, T = tokens of the stream.
"""

from __future__ import annotations

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
class Packed:
    """Rows of whole documents. Row r holds the pieces ``[first[r], first[r + 1])``.

    A piece is ``length`` inputs from token ``begin`` of the stream on, and their targets, one token further each.
    first: int64 ``[rows + 1]``; document, begin, length: int64 ``[pieces]``.
    """

    first: Ints
    document: Ints
    begin: Ints
    length: Ints

    @property
    def rows(self) -> int:
        return len(self.first) - 1

    def padding(self, seq_len: int) -> float:
        """Share of the rows' inputs that is padding."""
        return 1 - int(self.length.sum()) / max(1, self.rows * seq_len)


def best_fit(lengths: Ints, seq_len: int) -> Packed:
    """Pack documents into rows so that none that fits is cut.

    lengths: tokens of each document, int64 ``[d]``, in stream order. A document of n tokens has n − 1 inputs, its last
    token being a target only, so up to seq_len + 1 tokens fit; a longer one becomes full rows and a rest. Pieces are
    placed the longest first, each into the row with the least space that still holds it (best-fit decreasing; Ding et
    al., arXiv:2404.10830, use it for the same). Every target of a document comes exactly once; single tokens have none
    and are left out. The same lengths give the same rows.
    """
    document, begin, length = _pieces(lengths, seq_len)
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
    return Packed(first, document[by_row], begin[by_row], length[by_row])


def _pieces(lengths: Ints, seq_len: int) -> tuple[Ints, Ints, Ints]:
    """(document, first token in the stream, inputs) of every piece, in stream order."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    inputs = np.maximum(lengths - 1, 0)
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    number = np.arange(len(document), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    length = np.minimum(inputs[document] - number * seq_len, seq_len)
    return document, starts[document] + number * seq_len, length


def build_packed_row(pieces: list[Ints], documents: Ints, *, seq_len: int, pad_id: int) -> Row:
    """One row of whole documents: each piece is its inputs and one token more, int64 ``[≥ 2]``; the rest is padding."""
    input_ids = np.full(seq_len, pad_id, dtype=np.int64)
    targets = np.full(seq_len, IGNORED_TARGET, dtype=np.int64)
    position_ids = np.empty(seq_len, dtype=np.int64)
    place = 0
    for ids in pieces:
        inside = slice(place, place + len(ids) - 1)
        input_ids[inside], targets[inside] = ids[:-1], ids[1:]
        position_ids[inside] = np.arange(len(ids) - 1)
        place = inside.stop
    position_ids[place:] = np.arange(seq_len - place)
    return Row(input_ids, targets, position_ids, documents)
