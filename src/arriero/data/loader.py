"""Rows of the sources as tensors: what a rank's micro-batches hold at any position, memory-mapped, nothing kept.

Letters: m rows of a micro-batch, L = seq_len.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from arriero.config.schema import Data
from arriero.data.order import DataState, Ints, Mixture, MixtureSource
from arriero.data.packing import (
    IGNORED_TARGET,
    Packed,
    Row,
    best_fit,
    build_packed_row,
    build_row,
    stream_rows,
    stream_span,
)
from arriero.data.shards import INDEX_FOLDER, Dataset, TokenStream, is_dataset, open_dataset, split_by_hash
from arriero.errors import UserError


@dataclass(frozen=True)
class Rows:
    """The rows of one split of one source, cut out when they are asked for.

    packed: rows of whole documents; None: the stream cut every seq_len tokens.
    """

    stream: TokenStream
    seq_len: int
    isolate: bool
    pad_id: int
    packed: Packed | None = None

    def __len__(self) -> int:
        return stream_rows(self.stream.tokens, self.seq_len) if self.packed is None else self.packed.rows

    def __getitem__(self, number: int) -> Row:
        if self.packed is not None:
            return self._packed_row(number, self.packed)
        start, stop = stream_span(number, self.stream.tokens, self.seq_len)
        documents, starts = self.stream.documents_between(start, stop)
        return build_row(
            self.stream.read(start, stop),
            starts - start,
            documents,
            seq_len=self.seq_len,
            isolate=self.isolate,
            pad_id=self.pad_id,
        )

    def _packed_row(self, number: int, packed: Packed) -> Row:
        inside = slice(int(packed.first[number]), int(packed.first[number + 1]))
        begins, lengths = packed.begin[inside].tolist(), packed.length[inside].tolist()
        pieces = [self.stream.read(begin, begin + length + 1) for begin, length in zip(begins, lengths, strict=True)]
        # Numbers in the packing are places in the stream; the dataset's own ids may have gaps where some are held out.
        ids = [self.stream.documents_between(begin, begin + 1)[0] for begin in begins]
        return build_packed_row(pieces, np.concatenate(ids), seq_len=self.seq_len, pad_id=self.pad_id)


@dataclass(frozen=True)
class Source:
    """One source of a run with its training and validation rows."""

    name: str
    dataset: Dataset
    training: Rows
    validation: Rows | None
    targets_per_byte: float | None
    """Targets of the validation part per UTF-8 byte of its text; None where the dataset doesn't know its text."""
    weight: float | None
    max_epochs: int | None


@dataclass(frozen=True)
class RowPlace:
    """Where a row came from; ``source`` is −1 for padding."""

    source: int
    epoch: int
    row: int
    position: int


@dataclass(frozen=True)
class MicroBatch:
    """int64 tensors ``[m, L]`` on the CPU, and where each row came from."""

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    places: tuple[RowPlace, ...]
    rows: tuple[Row, ...]

    @property
    def target_tokens(self) -> int:
        return int((self.targets != IGNORED_TARGET).sum())


def open_sources(data: Data) -> list[Source]:
    """Open every source; ``UserError`` where one is missing, damaged, smaller than a row or shares a name."""
    return [
        _open_source(Path(source.path), source.label, data, source.weight, source.max_epochs) for source in data.sources
    ]


def open_one(path: Path, data: Data) -> Source:
    """A dataset by itself, for looking at it or evaluating on it."""
    return _open_source(path, path.name, data, None, None)


def _open_source(path: Path, name: str, data: Data, weight: float | None, max_epochs: int | None) -> Source:
    dataset = open_dataset(path)
    training = dataset.splits["train"]
    validation = dataset.splits.get("validation")
    if validation is None and data.validation_split > 0:
        training, validation = split_by_hash(training, data.validation_split)
    if training.tokens < data.seq_len:
        raise UserError(
            f"{path}: its training part has {training.tokens:,} tokens, less than one row of data.seq_len "
            f"{data.seq_len:,}",
            "Use shorter rows or more text.",
        )
    pad_id = dataset.eos_token_id if dataset.eos_token_id is not None else 0

    def rows(stream: TokenStream, split: str) -> Rows:
        packed = packed_rows(dataset, stream, split, data.seq_len) if data.packing == "best_fit" else None
        return Rows(stream, data.seq_len, data.isolate_documents, pad_id, packed)

    return Source(
        name,
        dataset,
        rows(training, "train"),
        rows(validation, "validation") if validation is not None and validation.tokens > 1 else None,
        targets_per_byte(validation, dataset.text_bytes.get("validation"), isolate=data.isolate_documents)
        if validation is not None
        else None,
        weight,
        max_epochs,
    )


def packed_rows(dataset: Dataset, stream: TokenStream, split: str, seq_len: int) -> Packed:
    """The best-fit rows of a split, from the index beside its shards where there is one, else packed and kept there.

    Ranks that come at once take turns on a file lock, not in a collective. A split that was drawn for this run, or a
    folder that can't be written to, is packed anew each time (a million documents take 0.6 s).
    """
    if stream is not dataset.splits.get(split) or not is_dataset(dataset.path) or not os.access(dataset.path, os.W_OK):
        return best_fit(stream.document_lengths(), seq_len)
    folder = dataset.path / INDEX_FOLDER
    folder.mkdir(exist_ok=True)
    file = folder / f"best_fit-{split}-{seq_len}.npz"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.is_file():
            packed = best_fit(stream.document_lengths(), seq_len)
            aside = file.with_suffix(".tmp.npz")
            np.savez(aside, first=packed.first, document=packed.document, begin=packed.begin, length=packed.length)
            aside.replace(file)
    with np.load(file, allow_pickle=False) as saved:
        return Packed(**{name: saved[name] for name in ("first", "document", "begin", "length")})


def targets_per_byte(stream: TokenStream, text_bytes: int | None, *, isolate: bool) -> float | None:
    """Targets of a whole stream per byte of its text: with isolation the first token of a document is none."""
    return (stream.tokens - (stream.documents if isolate else 1)) / text_bytes if text_bytes else None


def mixture_sources(sources: Sequence[Source]) -> list[MixtureSource]:
    """The sources as the order sees them."""
    return [MixtureSource(s.name, len(s.training), s.weight, s.max_epochs) for s in sources]


class TrainingData:
    """The rows of a run: any step's micro-batches of any rank, by position alone."""

    def __init__(self, sources: Sequence[Source], *, seed: int, start: DataState | None = None) -> None:
        self.sources = tuple(sources)
        self.mixture = Mixture(mixture_sources(sources), seed, start)

    def record(self, position: int) -> dict[str, Any]:
        """The state of the data for a checkpoint: what was taken, and the mixture that it was taken by; plain JSON."""
        now, start = self.mixture.state_at(position), self.mixture.start
        return {
            "position": now.position,
            "taken": dict(now.taken),
            "start": {"position": start.position, "taken": dict(start.taken)},
            "sources": [_source_record(source) for source in self.sources],
        }

    @classmethod
    def continued(cls, sources: Sequence[Source], *, seed: int, record: Mapping[str, Any]) -> Self:
        """Go on from a ``record``: by the same plan if the mixture is the same, else anew from what has been taken.

        Raises ``UserError`` where a dataset has changed under the run.
        """
        before = {entry["name"]: entry for entry in record["sources"]}
        now = [_source_record(source) for source in sources]
        for entry in now:
            old = before.get(entry["name"])
            if old and old["fingerprint"] != entry["fingerprint"]:
                raise UserError(
                    f"the dataset {entry['name']!r} has changed since the checkpoint was written: fingerprint "
                    f"{old['fingerprint']} then, {entry['fingerprint']} now",
                    "Put the old dataset back, or give the new one another name in data.sources.",
                )
        if now == record["sources"]:
            return cls(sources, seed=seed, start=DataState(**record["start"]))
        return cls(sources, seed=seed, start=DataState(record["position"], record["taken"]))

    def micro_batches(
        self, position: int, *, end: int, rank: int, size: int, micro_batch: int, accumulation: int
    ) -> Iterator[MicroBatch]:
        """One rank's share of the step that begins at ``position``; rows at or behind ``end`` are padding.

        A step takes size · accumulation · micro_batch positions in a row; micro-step k of rank r takes the next
        micro_batch of them at (k · size + r) · micro_batch. So the rows of a step are the same for every layout.
        """
        for k in range(accumulation):
            first = position + (k * size + rank) * micro_batch
            yield self.rows_at(first, first + micro_batch, end)

    def rows_at(self, start: int, stop: int, end: int) -> MicroBatch:
        """The rows at positions ``[start, stop)``."""
        refs = self.mixture.rows_at(start, stop)
        places = [
            RowPlace(int(source) if position < end else -1, int(epoch), int(row), position)
            for position, source, epoch, row in zip(range(start, stop), refs.source, refs.epoch, refs.row, strict=True)
        ]
        return stack([self._row(place) for place in places], places)

    def _row(self, place: RowPlace) -> Row:
        training = self.sources[max(place.source, 0)].training
        return training[place.row] if place.source >= 0 else padding_row(training.seq_len, training.pad_id)


def _source_record(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "fingerprint": source.dataset.fingerprint,
        "rows": len(source.training),
        "weight": source.weight,
        "max_epochs": source.max_epochs,
    }


def validation_batches(
    rows: Rows, source: int, *, max_rows: int | None, rank: int, size: int, micro_batch: int
) -> Iterator[MicroBatch]:
    """One rank's part of the validation rows, each on exactly one rank; padding evens out the number of batches.

    With ``max_rows``, rows spread evenly over the whole part are taken.
    """
    total = len(rows)
    chosen = np.arange(total) if max_rows is None or max_rows >= total else spread(total, max_rows)
    mine = chosen[rank::size]
    per_rank = -(-len(chosen) // size)
    for start in range(0, per_rank, micro_batch):
        numbers = mine[start : start + micro_batch]
        places = [RowPlace(source, 0, int(number), int(number)) for number in numbers]
        missing = min(micro_batch, per_rank - start) - len(numbers)
        padding = padding_row(rows.seq_len, rows.pad_id)
        yield stack(
            [rows[int(number)] for number in numbers] + [padding] * missing, places + [RowPlace(-1, 0, 0, 0)] * missing
        )


def isolation_batch(sources: Sequence[Source], micro_batch: int, look: int = 64) -> MicroBatch | None:
    """A micro-batch of one row, repeated, whose first document has no targets: its loss is that of the later ones.

    The first of the sources' first ``look`` rows that holds two documents or more; None where none does.
    """
    for number, source in enumerate(sources):
        for place in range(min(look, len(source.training))):
            row = source.training[place]
            second = int(np.argmax(row.position_ids[1:] == 0)) + 1
            targets = row.targets.copy()
            targets[:second] = IGNORED_TARGET
            if row.position_ids[second] == 0 and (targets != IGNORED_TARGET).any():
                places = [RowPlace(number, 0, place, 0)] * micro_batch
                return stack([Row(row.input_ids, targets, row.position_ids, row.documents)] * micro_batch, places)
    return None


def spread(total: int, count: int) -> Ints:
    """``count`` numbers of ``[0, total)``, evenly apart."""
    return np.arange(count, dtype=np.int64) * total // count


def padding_row(seq_len: int, pad_id: int) -> Row:
    """A row without targets."""
    nothing = np.zeros(0, dtype=np.int64)
    return build_row(np.full(1, pad_id, np.int64), nothing, nothing, seq_len=seq_len, isolate=True, pad_id=pad_id)


def stack(rows: Sequence[Row], places: Sequence[RowPlace]) -> MicroBatch:
    """Rows → one micro-batch."""
    return MicroBatch(
        torch.from_numpy(np.stack([row.input_ids for row in rows])),
        torch.from_numpy(np.stack([row.targets for row in rows])),
        torch.from_numpy(np.stack([row.position_ids for row in rows])),
        tuple(places),
        tuple(rows),
    )
