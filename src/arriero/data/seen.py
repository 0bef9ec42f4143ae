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
from arriero.data.order import Ints, permute, row_key
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
    taken = data.mixture.state_at(position).taken
    return {source.name: _seen(source, data.mixture.seed, taken[source.name]) for source in data.sources}


def _seen(source: Source, seed: int, taken: int) -> Seen:
    rows = source.training
    passes, begun = divmod(taken, len(rows))
    # With a pass behind it, every document that has an input was in it.
    index = np.arange(begun if passes == 0 else len(rows), dtype=np.int64)
    order = permute(index, len(rows), row_key(seed, source.name, passes))
    seen = int(documents_in(rows, order).sum())
    return Seen(taken, taken / len(rows), seen, rows.stream.documents, passes + (1 if begun else 0))


def documents_in(rows: Rows, numbers: Ints) -> np.ndarray:
    """Which of the split's documents lie in these rows, by their place in the split: bool ``[d]``. numbers: ``[r]``."""
    found = np.zeros(rows.stream.documents, dtype=bool)
    if rows.packed is not None:
        first = rows.packed.first
        for number in numbers.tolist():
            found[rows.packed.document[first[number] : first[number + 1]]] = True
        return found
    ends = np.cumsum(rows.stream.document_lengths())
    first = np.searchsorted(ends, numbers * rows.seq_len, side="right")
    last = np.searchsorted(ends, np.minimum((numbers + 1) * rows.seq_len, ends[-1]) - 1, side="right")
    opened = np.bincount(first, minlength=len(ends) + 1)
    closed = np.bincount(last + 1, minlength=len(ends) + 1)
    found[:] = np.cumsum(opened[: len(ends)] - closed[: len(ends)]) > 0
    return found


def rows_of_document(rows: Rows, place: int) -> Ints:
    """The rows that hold any input token of the split's document at ``place``."""
    if rows.packed is not None:
        pieces = np.flatnonzero(rows.packed.document == place)
        return np.unique(np.searchsorted(rows.packed.first, pieces, side="right") - 1)
    ends = np.cumsum(rows.stream.document_lengths())
    begin = int(ends[place - 1]) if place else 0
    last = min((int(ends[place]) - 1) // rows.seq_len, len(rows) - 1)
    return np.arange(begin // rows.seq_len, last + 1, dtype=np.int64)


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
