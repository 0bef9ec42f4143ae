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
