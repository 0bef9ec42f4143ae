"""Rows of the sources as tensors: what a rank's micro-batches hold at any position, memory-mapped, nothing kept.

Letters: m rows of a micro-batch, L = seq_len.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arriero.config.schema import Data
from arriero.data.order import DataState, Ints, Mixture, MixtureSource, Rest, row_key, taken_of
from arriero.data.packing import (
    IGNORED_TARGET,
    Packed,
    Row,
    Spans,
    best_fit,
    build_row,
    cut_spans,
    join_rows,
    pack_spans,
    packed_left,
    stream_left,
    stream_rows,
    stream_span,
)
from arriero.data.shards import INDEX_FOLDER, Dataset, TokenStream, is_dataset, open_dataset, split_by_hash
from arriero.errors import UserError


@dataclass(frozen=True)
class Rows:
    """The rows of one split of one source, cut out when they are asked for.

    packed: rows of whole documents; None: the stream cut every seq_len tokens. rest: rows that finish an epoch which was
    begun with rows of another length; their numbers come behind those of the others, and ``len`` doesn't count them.
    """

    stream: TokenStream
    seq_len: int
    isolate: bool
    pad_id: int
    packed: Packed | None = None
    rest: Packed | None = None

    def __len__(self) -> int:
        return stream_rows(self.stream.tokens, self.seq_len) if self.packed is None else self.packed.rows

    def __getitem__(self, number: int) -> Row:
        behind = number - len(self)
        if behind >= 0:
            assert self.rest is not None
            return self._row_of_pieces(self.rest, behind)
        if self.packed is not None:
            return self._row_of_pieces(self.packed, number)
        start, stop = stream_span(number, self.stream.tokens, self.seq_len)
        return self._cut(start, stop, self.seq_len)

    def spans(self, numbers: Ints) -> Spans:
        """The inputs of these rows, in their order. numbers: int64 ``[n]``."""
        whole, behind = numbers[numbers < len(self)], numbers[numbers >= len(self)] - len(self)
        if self.packed is not None:
            begin, length = self.packed.pieces(whole)
        else:
            begin = whole * self.seq_len
            length = np.minimum(self.seq_len, self.stream.tokens - begin)
        if self.rest is None:
            return Spans(begin, length)
        more = self.rest.pieces(behind)
        return Spans(np.concatenate([begin, more[0]]), np.concatenate([length, more[1]]))

    def left(self, taken: NDArray[np.bool_]) -> Spans:
        """The inputs of an epoch but those of the rows that were taken: of its rest, where there is one.

        taken: bool, a value per row of the epoch, or of the rest.
        """
        packed = self.rest or self.packed
        return packed_left(taken, packed) if packed else stream_left(taken, self.stream.tokens, self.seq_len)

    def with_rest(self, left: Spans) -> Rows:
        """These rows, and what is left of an epoch as rows of their length: at most as many as an epoch has.

        Best fit places the pieces as it places documents. Only where gaps leave so many pieces that fit badly that they
        need more rows than a whole epoch are they cut at row ends, as a stream is.
        """
        rest = cut_spans(left, self.seq_len) if self.packed is None else pack_spans(left, self.seq_len)
        return replace(self, rest=rest if rest.rows <= len(self) else cut_spans(left, self.seq_len))

    def _row_of_pieces(self, packed: Packed, number: int) -> Row:
        begins, lengths = packed.pieces(np.array([number], dtype=np.int64))
        pieces = [self._cut(b, b + n + 1, n) for b, n in zip(begins.tolist(), lengths.tolist(), strict=True)]
        return join_rows(pieces, seq_len=self.seq_len, pad_id=self.pad_id)

    def _cut(self, start: int, stop: int, seq_len: int) -> Row:
        documents, starts = self.stream.documents_between(start, stop)
        return build_row(
            self.stream.read(start, stop),
            starts - start,
            documents,
            seq_len=seq_len,
            isolate=self.isolate,
            pad_id=self.pad_id,
        )


@dataclass(frozen=True)
class Cut:
    """Where the rows of a source got today's length, in a run in which they had another."""

    shift: int = 0
    """Added to the rows taken, it counts them as if all had had today's length."""
    epoch: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    """(seq_len, rows taken) of the rows with which that epoch was begun, and of its rests until now."""


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
    cut: Cut = Cut()


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
            np.savez(aside, first=packed.first, begin=packed.begin, length=packed.length)
            aside.replace(file)
    with np.load(file, allow_pickle=False) as saved:
        return Packed(**{name: saved[name] for name in ("first", "begin", "length")})


def targets_per_byte(stream: TokenStream, text_bytes: int | None, *, isolate: bool) -> float | None:
    """Targets of a whole stream per byte of its text: with isolation the first token of a document is none."""
    return (stream.tokens - (stream.documents if isolate else 1)) / text_bytes if text_bytes else None


def mixture_sources(sources: Sequence[Source]) -> list[MixtureSource]:
    """The sources as the order sees them."""
    return [
        MixtureSource(
            source.name,
            len(source.training),
            source.weight,
            source.max_epochs,
            source.cut.shift,
            Rest(source.cut.epoch, rest.rows, len(source.cut.parts)) if (rest := source.training.rest) else None,
        )
        for source in sources
    ]


def rows_of_length(source: Source, seq_len: int) -> Rows:
    """The source's training rows in another length; those of no rest."""
    rows = source.training
    packed = packed_rows(source.dataset, rows.stream, "train", seq_len) if rows.packed is not None else None
    return replace(rows, seq_len=seq_len, packed=packed, rest=None)


def cut_anew(source: Source, cut: Cut, seed: int) -> Source:
    """The source with what its ``cut`` left of an epoch, as rows of today's length.

    A row was taken or it wasn't: what the rows that weren't hold is cut again, each target once. Laid out once per
    start, from counts alone: a byte for each row of the epoch, and 16 for each piece of its rest.
    """
    if not cut.parts:
        return replace(source, cut=cut)
    rows = rows_of_length(source, cut.parts[0][0])
    lengths = [*(seq_len for seq_len, _ in cut.parts[1:]), source.training.seq_len]
    for number, ((_, taken), following) in enumerate(zip(cut.parts, lengths, strict=True)):
        size = rows.rest.rows if rows.rest else len(rows)
        left = rows.left(taken_of(size, taken, row_key(seed, source.name, cut.epoch, number)))
        rows = rows_of_length(source, following).with_rest(left)
    return replace(source, training=rows, cut=cut)


def carry_on(source: Source, seed: int, entry: Mapping[str, Any], taken: int) -> Source:
    """The source as it goes on once ``taken`` rows are taken, by its ``entry`` of a record; its rows may have another length now.

    Raises ``UserError`` where the dataset has changed, or its documents become rows in another way.
    """
    if entry["fingerprint"] != source.dataset.fingerprint:
        raise UserError(
            f"the dataset {source.name!r} has changed since the checkpoint was written: fingerprint "
            f"{entry['fingerprint']} then, {source.dataset.fingerprint} now",
            "Put the old dataset back, or give the new one another name in data.sources.",
        )
    cut = Cut(entry["shift"], entry["epoch"], tuple((seq_len, rows) for seq_len, rows in entry["parts"]))
    then = cut_anew(replace(source, training=rows_of_length(source, entry["seq_len"])), cut, seed)
    if len(then.training) != entry["rows"]:
        raise UserError(
            f"the dataset {source.name!r} had {entry['rows']:,} rows of {entry['seq_len']:,} tokens when the checkpoint "
            f"was written, now it has {len(then.training):,}",
            "Set data.packing and data.validation_split back, or give it another name in data.sources.",
        )
    if entry["seq_len"] == source.training.seq_len:
        return then
    epoch, parts = _stands(then, taken + cut.shift)
    now = cut_anew(source, Cut(0, epoch, parts), seed)
    rows, rest = len(now.training), now.training.rest
    counted = (epoch + 1) * rows - rest.rows if rest else epoch * rows
    return replace(now, cut=replace(now.cut, shift=counted - taken))


def _stands(source: Source, counted: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """(epoch, its parts) where a source stands after that many rows; no parts where the epoch is still whole."""
    rows, rest = source.training, source.training.rest
    epoch, index = divmod(counted, len(rows))
    parts: tuple[tuple[int, int], ...] = ()
    if rest is not None and epoch == source.cut.epoch:
        parts, index = source.cut.parts, index - (len(rows) - rest.rows)
    return epoch, (*parts, (rows.seq_len, index)) if index else parts


class TrainingData:
    """The rows of a run: any step's micro-batches of any rank, by position alone.

    dropped: of sources that no longer take part, what ``record`` said last.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        start: DataState | None = None,
        dropped: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.sources = tuple(sources)
        self.mixture = Mixture(mixture_sources(sources), seed, start)
        self.dropped = tuple(dropped)

    def record(self, position: int) -> dict[str, Any]:
        """The state of the data for a checkpoint: what was taken, and the mixture that it was taken by; plain JSON."""
        now, start = self.mixture.state_at(position), self.mixture.start
        return {
            "position": now.position,
            "taken": dict(now.taken),
            "start": {"position": start.position, "taken": dict(start.taken)},
            "sources": [_source_record(source) for source in self.sources],
            "dropped": [dict(entry) for entry in self.dropped],
        }

    @classmethod
    def continued(cls, sources: Sequence[Source], *, seed: int, record: Mapping[str, Any]) -> Self:
        """Go on from a ``record``: by the same plan if the mixture is the same, else anew from what has been taken.

        Raises ``UserError`` where a dataset has changed under the run.
        """
        known = {entry["name"]: entry for entry in [*record["dropped"], *record["sources"]]}
        taken = record["taken"]
        now = [carry_on(s, seed, known[s.name], taken[s.name]) if s.name in known else s for s in sources]
        names = {source.name for source in now}
        same = [_source_record(source) for source in now] == record["sources"]
        return cls(
            now,
            seed=seed,
            start=DataState(**record["start"]) if same else DataState(record["position"], taken),
            dropped=[entry for name, entry in known.items() if name not in names],
        )

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
        "seq_len": source.training.seq_len,
        "shift": source.cut.shift,
        "epoch": source.cut.epoch,
        "parts": [list(part) for part in source.cut.parts],
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
