"""Which documents a run has seen, how often and when: answered from its counts alone, by the order's own functions.

Letters: d documents of a source, r rows asked about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from arriero.data.loader import Rows, Source, TrainingData
from arriero.data.order import Ints, permute, row_key, taken_of
from arriero.data.packing import Packed, Spans
from arriero.errors import UserError

_CHUNK = 1 << 20  # positions looked at together


@dataclass(frozen=True)
class Seen:
    """Of one source: rows taken, passes, and documents. A document counts once in a pass in which any row held it."""

    rows: int
    epochs: float
    documents_seen: int
    documents: int
    max_times: int


def seen_by_source(data: TrainingData, position: int) -> dict[str, Seen]:
    """What had been seen of each source when the rows before ``position`` were done."""
    taken, counted = data.mixture.state_at(position).taken, data.mixture.counted_at(position)
    return {s.name: _seen(s, data.mixture.seed, taken[s.name], counted[s.name]) for s in data.sources}


def _seen(source: Source, seed: int, taken: int, counted: int) -> Seen:
    rows, rest = source.training, source.training.rest
    passes, begun = divmod(counted, len(rows))
    again = begun > 0 or (rest is not None and passes == source.cut.epoch)
    if passes == 0 and rest is not None:
        key = row_key(seed, source.name, 0, len(source.cut.parts))
        seen = documents_begun(rows, rows.left(taken_of(rest.rows, begun - (len(rows) - rest.rows), key)))
    else:
        # With a pass behind it, every document that has an input was in it.
        index = np.arange(begun if passes == 0 else len(rows), dtype=np.int64)
        seen = documents_in(rows, permute(index, len(rows), row_key(seed, source.name, passes)))
    return Seen(taken, counted / len(rows), int(seen.sum()), rows.stream.documents, passes + int(again))


def documents_in(rows: Rows, numbers: Ints) -> np.ndarray:
    """Which of the split's documents lie in these rows, by their place in the split: bool ``[d]``. numbers: ``[r]``."""
    ends = np.cumsum(rows.stream.document_lengths())
    spans = rows.spans(numbers)
    first = np.searchsorted(ends, spans.begin, side="right")
    last = np.searchsorted(ends, spans.begin + spans.length - 1, side="right")
    opened = np.bincount(first, minlength=len(ends) + 1)
    closed = np.bincount(last + 1, minlength=len(ends) + 1)
    return np.asarray(np.cumsum(opened[: len(ends)] - closed[: len(ends)]) > 0)


def documents_begun(rows: Rows, left: Spans) -> np.ndarray:
    """Which of the split's documents have an input that is not among those ``left`` of an epoch: bool ``[d]``."""
    edges = np.concatenate([[0], np.cumsum(rows.stream.document_lengths())])
    if rows.packed is None:
        inputs = np.diff(np.minimum(edges, edges[-1] - 1))  # the stream's last token is a target only
    else:
        inputs = np.maximum(np.diff(edges) - 1, 0)  # and so is each document's
    borders = np.stack([left.begin, left.begin + left.length], axis=1).ravel()
    counts = np.concatenate([[0], np.cumsum(left.length)])
    # Inputs left below each border rise by the span's length across it and stay level up to the next.
    below = np.interp(edges, borders, np.repeat(counts, 2)[1:-1]) if borders.size else np.zeros(len(edges))
    return np.asarray(np.diff(below) < inputs)


def rows_of_document(rows: Rows, place: int) -> Ints:
    """The rows that hold any input token of the split's document at ``place``."""
    ends = np.cumsum(rows.stream.document_lengths())
    begin, end = int(ends[place - 1]) if place else 0, int(ends[place])
    if rows.packed is not None:
        found = _rows_across(rows.packed, begin, end)
    else:
        found = np.arange(begin // rows.seq_len, min((end - 1) // rows.seq_len, len(rows) - 1) + 1, dtype=np.int64)
    return found if rows.rest is None else np.concatenate([found, len(rows) + _rows_across(rows.rest, begin, end)])


def _rows_across(packed: Packed, begin: int, end: int) -> Ints:
    """The rows with a piece that holds any of the tokens ``[begin, end)``."""
    pieces = np.flatnonzero((packed.begin < end) & (packed.begin + packed.length > begin))
    return np.unique(np.searchsorted(packed.first, pieces, side="right") - 1)


def positions_of_rows(data: TrainingData, source: int, numbers: Ints, stop: int) -> Iterator[tuple[int, int]]:
    """(position, epoch) of every time that one of these rows of a source came before ``stop``, from the mixture's start
    on."""
    for low in range(data.mixture.start.position, stop, _CHUNK):
        refs = data.mixture.rows_at(low, min(low + _CHUNK, stop))
        hits = np.flatnonzero((refs.source == source) & np.isin(refs.row, numbers))
        yield from ((low + int(hit), int(refs.epoch[hit])) for hit in hits)


def find_document(source: Source, file: str, row: int) -> int | None:
    """The place in the training part of the document that came from row ``row`` of ``file``; None if it isn't there.

    ``file`` may be the end of a path. Raises ``UserError`` where the dataset keeps no origins, or nothing matches.
    """
    tables = sorted(Path(source.dataset.path).glob("documents-*.parquet"))
    if not tables:
        raise UserError(f"{source.dataset.path} doesn't say where its documents came from")
    for table in tables:
        for batch in pq.ParquetFile(table).iter_batches(columns=["split", "index", "file", "row"]):
            for entry in batch.filter(pc.field("row") == row).to_pylist():
                if entry["file"] == file or entry["file"].endswith(f"/{file}"):
                    return int(entry["index"]) if entry["split"] == "train" else None
    raise UserError(f"{source.name} holds no document {file}:{row}", "`arriero data stats` lists some.")
