"""Rows of the sources as tensors: what a rank's micro-batches hold at any position, memory-mapped, nothing kept.

Letters: m rows of a micro-batch, L = seq_len.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from arriero.config.schema import Data
from arriero.data.order import DataState, Ints, Mixture, MixtureSource
from arriero.data.packing import IGNORED_TARGET, Row, build_row, stream_rows, stream_span
from arriero.data.shards import Dataset, TokenStream, open_dataset, split_by_hash
from arriero.errors import UserError


@dataclass(frozen=True)
class Rows:
    """The rows of one split of one source, cut out when they are asked for."""

    stream: TokenStream
    seq_len: int
    isolate: bool
    pad_id: int

    def __len__(self) -> int:
        return stream_rows(self.stream.tokens, self.seq_len)

    def __getitem__(self, number: int) -> Row:
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

    def rows(stream: TokenStream) -> Rows:
        return Rows(stream, data.seq_len, data.isolate_documents, pad_id)

    return Source(
        name,
        dataset,
        rows(training),
        rows(validation) if validation is not None and validation.tokens > 1 else None,
        targets_per_byte(validation, dataset.text_bytes.get("validation"), isolate=data.isolate_documents)
        if validation is not None
        else None,
        weight,
        max_epochs,
    )


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
