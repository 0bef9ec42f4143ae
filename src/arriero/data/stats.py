"""What a dataset holds: how many documents of which lengths, copies among them, and where the longest came from.

Everything is read in chunks. Kept are 8 bytes a document, its content's hash, and a count for each length that occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from arriero.data.shards import Dataset, TokenStream, open_dataset
from arriero.errors import UserError

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_CHUNK = 1 << 20  # documents looked at together: 24 MiB

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class LengthBin:
    """The documents of ``shortest`` to ``longest`` tokens, both included; bounds double from bin to bin."""

    shortest: int
    longest: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class LongDocument:
    """A document among the longest: ``index`` within its split; file, row and UTF-8 bytes are None in a bare corpus."""

    index: int
    tokens: int
    file: str | None
    row: int | None
    text_bytes: int | None


@dataclass(frozen=True)
class SplitStats:
    """One split. Tokens include BOS and EOS; ``duplicates`` are documents whose content came before in the split."""

    documents: int
    tokens: int
    text_bytes: int | None
    bytes_per_token: float | None
    mean_tokens: float
    shortest: int
    longest: int
    percentiles: dict[int, int]
    """Per cent → the length that at least so many of the documents don't pass."""
    histogram: tuple[LengthBin, ...]
    duplicates: int
    duplicate_share: float
    longest_documents: tuple[LongDocument, ...]


def dataset_stats(path: Path, *, longest: int = 5) -> dict[str, SplitStats]:
    """The statistics of each split that has documents, with its ``longest`` longest documents.

    Of a prepared dataset it reads the index and the document table; of a bare Megatron corpus also every token, whose
    stored bytes are hashed. Raises ``UserError`` where the dataset can't be opened or its table doesn't fit it.
    """
    dataset = open_dataset(path)
    streams = {name: stream for name, stream in dataset.splits.items() if stream.documents}
    lengths = {name: _Lengths(stream, longest) for name, stream in streams.items()}
    hashes, origins = _read_tables(dataset, streams, lengths) if dataset.manifest else (_token_hashes(streams), {})
    return {
        name: _split_stats(lengths[name], dataset.text_bytes.get(name), _copies(hashes[name]), origins.get(name, {}))
        for name in streams
    }


def _split_stats(
    lengths: _Lengths, text_bytes: int | None, duplicates: int, origins: dict[int, tuple[str, int, int]]
) -> SplitStats:
    documents = int(lengths.counts.sum())
    tokens = int((lengths.values * lengths.counts).sum())
    return SplitStats(
        documents=documents,
        tokens=tokens,
        text_bytes=text_bytes,
        bytes_per_token=text_bytes / tokens if text_bytes is not None and tokens else None,
        mean_tokens=tokens / documents,
        shortest=int(lengths.values[0]),
        longest=int(lengths.values[-1]),
        percentiles=lengths.percentiles(),
        histogram=tuple(lengths.bins()),
        duplicates=duplicates,
        duplicate_share=duplicates / documents,
        longest_documents=tuple(
            LongDocument(index, size, *origins.get(index, (None, None, None))) for size, index in lengths.top
        ),
    )


class _Lengths:
    """How often each length occurs, ``values`` rising, and the longest documents as (tokens, index), longest first."""

    def __init__(self, stream: TokenStream, longest: int) -> None:
        self.values, self.counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self.top: list[tuple[int, int]] = []
        for first in range(0, stream.documents, _CHUNK):
            lengths = stream.document_lengths(first, min(first + _CHUNK, stream.documents))
            values, counts = np.unique(lengths, return_counts=True)
            self._merge(values, counts)
            # A stable sort: of two that are equally long the earlier one comes first.
            order = np.argsort(-lengths, kind="stable")[:longest]
            found = [(int(lengths[place]), first + int(place)) for place in order]
            self.top = sorted(self.top + found, key=lambda document: (-document[0], document[1]))[:longest]

    def _merge(self, values: Ints, counts: Ints) -> None:
        merged, place = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        summed = np.zeros(len(merged), dtype=np.int64)
        np.add.at(summed, place, np.concatenate([self.counts, counts]))
        self.values, self.counts = merged, summed

    def percentiles(self) -> dict[int, int]:
        up_to = np.cumsum(self.counts)
        return {p: int(self.values[np.searchsorted(up_to, -(-p * up_to[-1] // 100))]) for p in PERCENTILES}

    def bins(self) -> Iterator[LengthBin]:
        """From the bin of the shortest document to that of the longest; an empty document counts as of one token."""
        power = np.frexp(np.maximum(self.values, 1))[1].astype(np.int64) - 1
        for exponent in range(int(power[0]), int(power[-1]) + 1):
            here = power == exponent
            tokens = int((self.values[here] * self.counts[here]).sum())
            yield LengthBin(1 << exponent, (2 << exponent) - 1, int(self.counts[here].sum()), tokens)


def _copies(hashes: Hashes) -> int:
    hashes.sort()
    return int((hashes[1:] == hashes[:-1]).sum())


def _token_hashes(streams: dict[str, TokenStream]) -> dict[str, Hashes]:
    found = {}
    for name, stream in streams.items():
        found[name] = np.empty(stream.documents, dtype=np.uint64)
        for place, (_, ids) in enumerate(stream.iterate_documents()):
            found[name][place] = xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids).data)
    return found


def _read_tables(
    dataset: Dataset, streams: dict[str, TokenStream], lengths: dict[str, _Lengths]
) -> tuple[dict[str, Hashes], dict[str, dict[int, tuple[str, int, int]]]]:
    """(content hashes of each split, index → file, row, bytes of its longest documents) from the document table."""
    hashes = {name: np.empty(stream.documents, dtype=np.uint64) for name, stream in streams.items()}
    filled = dict.fromkeys(streams, 0)
    origins: dict[str, dict[int, tuple[str, int, int]]] = {name: {} for name in streams}
    for batch in _table_batches(dataset):
        splits = np.asarray(batch.column("split").to_pylist())
        index = batch.column("index").to_numpy()
        xxh3 = batch.column("xxh3").to_numpy()
        for name in np.unique(splits).tolist():
            here = np.flatnonzero(splits == name)
            if name not in streams or filled[name] + len(here) > streams[name].documents:
                raise _misfit(dataset)
            hashes[name][filled[name] : filled[name] + len(here)] = xxh3[here]
            filled[name] += len(here)
            for place in here[np.isin(index[here], [document for _, document in lengths[name].top])].tolist():
                row = {column: batch.column(column)[place].as_py() for column in ("index", "file", "row", "text_bytes")}
                origins[name][row["index"]] = (row["file"], row["row"], row["text_bytes"])
    if any(filled[name] != stream.documents for name, stream in streams.items()):
        raise _misfit(dataset)
    return hashes, origins


def _table_batches(dataset: Dataset) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for table in dataset.manifest["tables"]:
        with pq.ParquetFile(dataset.path / table["name"]) as file:
            yield from file.iter_batches(batch_size=1 << 16)


def _misfit(dataset: Dataset) -> UserError:
    return UserError(
        f"the document table of {dataset.path} doesn't list the documents of its shards",
        "Files of two datasets were mixed: prepare it again.",
    )
