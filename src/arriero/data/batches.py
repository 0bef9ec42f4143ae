"""Documents → token ids, batch by batch and in the order of the sources: reading and encoding each in a thread of its own.

files ─ read, parse, hash (Python) ─▶ batch ─ encode (gigatoken, without the interpreter's lock) ─▶ the caller, who writes

A queue of one lies behind each stage, so at most four batches are in memory. What is read ahead and then not written is
nobody's loss: each batch says for itself what was skipped before it and where the encoder stood after it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from arriero.data.sources import Note, Place, ReadLog, ReadOptions, SourceFile, read_documents
from arriero.data.tokenizer import Encoder, Proof

# gigatoken uses about 3.3 bytes of memory per byte of input, and gains nothing from batches beyond this.
_BATCH_BYTES = 4 << 20
_BATCH_NOTES = 10_000  # 3 MB: a file may hold nothing but what has to be skipped

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Batch:
    """Documents that are encoded at once, and what was skipped or repaired before the last of them.

    files: the number of each document's file, int32; rows: int64; sizes_bytes: UTF-8, int64; hashes: xxh3_64 of the
    UTF-8 text, uint64. bytes_read: how far reading had come in the source files. Without documents it carries what was
    skipped behind the last one.
    """

    texts: list[str]
    files: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    sizes_bytes: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]
    notes: list[Note]
    bytes_read: int

    def only(self, kept: npt.NDArray[np.bool_]) -> Batch:
        """The documents that are kept, without their texts."""
        arrays = {name: getattr(self, name)[kept] for name in ("files", "rows", "sizes_bytes", "hashes")}
        return replace(self, texts=[], **arrays)


@dataclass(frozen=True)
class Encoded:
    """A batch (without its texts) with its ids back to back, the number of ids of each document [n], what is left to
    prove, and the state of the encoder behind it."""

    batch: Batch
    ids: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    proof: Proof | None
    encoder: dict[str, Any]


def encoded_batches(
    files: Sequence[SourceFile], options: ReadOptions, log: ReadLog, encoder: Encoder, *, after: Place
) -> Generator[Encoded, None, None]:
    """Every document of the files behind ``after``, encoded; to be closed, which ends its threads.

    ``log`` and ``encoder`` run ahead of what is yielded. Raises what reading and encoding raise, each in its place.
    """

    def read(put: Callable[[Batch], None]) -> None:
        _read_batches(files, options, log, after, put)

    def encode(put: Callable[[Encoded], None]) -> None:
        with closing(_ahead(read)) as batches:
            for batch in batches:
                ids, lengths, proof = encoder.encode(batch.texts, batch.sizes_bytes, batch.hashes)
                put(Encoded(replace(batch, texts=[]), ids, lengths, proof, encoder.state()))

    return _ahead(encode)


@dataclass
class _Gathered:
    """What has been read since the last batch."""

    texts: list[str] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def batch(self, bytes_read: int) -> Batch:
        return Batch(
            self.texts,
            np.array(self.files, dtype=np.int32),
            np.array(self.rows, dtype=np.int64),
            np.array(self.sizes_bytes, dtype=np.int64),
            np.array(self.hashes, dtype=np.uint64),
            self.notes,
            bytes_read,
        )


def _read_batches(
    files: Sequence[SourceFile], options: ReadOptions, log: ReadLog, after: Place, put: Callable[[Batch], None]
) -> None:
    """Batches of about ``_BATCH_BYTES`` of text, at least one document each; what was skipped behind the last document
    of one, and before the first of the next, belongs to the next: reading can go on only behind a document."""
    numbers = {file.name: number for number, file in enumerate(files)}
    gathered, total = _Gathered(), 0
    behind: list[Note] = []  # the last document

    def hand_on() -> None:
        nonlocal gathered, total
        if gathered.texts or gathered.notes:
            put(gathered.batch(log.bytes_read()))
        gathered, total = _Gathered(), 0

    def note(entry: Note) -> None:
        nonlocal behind
        behind.append(entry)
        if len(behind) >= _BATCH_NOTES:
            hand_on()
            gathered.notes, behind = behind, []
            hand_on()

    log.each = note
    for document in read_documents(files, options, log, after=after):
        data = document.text.encode()
        gathered.texts.append(document.text)
        gathered.files.append(numbers[document.file])
        gathered.rows.append(document.row)
        gathered.sizes_bytes.append(len(data))
        gathered.hashes.append(xxhash.xxh3_64_intdigest(data))
        if behind:
            gathered.notes += behind
            behind = []
        total += len(data)
        if total >= _BATCH_BYTES:
            hand_on()
    hand_on()
    gathered.notes = behind
    hand_on()


class _NobodyWaits(Exception):
    """The one who took the items has gone."""


def _ahead(work: Callable[[Callable[[_Item], None]], None]) -> Generator[_Item, None, None]:
    """What ``work(put)`` puts, while it works ahead by one item in a thread; raises what it raises, after its items.

    Closing waits until the work has ended, at its next ``put`` at the latest.
    """
    items: queue.Queue[tuple[_Item] | BaseException | None] = queue.Queue(maxsize=1)
    closed = threading.Event()

    def put(item: _Item) -> None:
        if closed.is_set():
            raise _NobodyWaits
        items.put((item,))

    def run() -> None:
        end: BaseException | None = None
        try:
            work(put)
        except BaseException as error:  # noqa: BLE001, it is raised where the items are taken
            end = error
        items.put(end)

    thread = threading.Thread(target=run, name="arriero-prepare", daemon=True)
    thread.start()
    try:
        while isinstance(item := items.get(), tuple):
            yield item[0]
        if item is not None:
            raise item
    finally:
        closed.set()
        while thread.is_alive():
            with suppress(queue.Empty):
                items.get_nowait()
            thread.join(timeout=0.01)


def frame(
    ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], bos: int | None, eos: int, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Puts BOS (unless None) in front of each document and EOS behind it.

    ids: documents back to back; lengths [n]. Returns the longer ids, in ``dtype``, and lengths.
    """
    lengths = lengths + (1 if bos is None else 2)
    ends = np.cumsum(lengths)
    framed = np.empty(int(ends[-1]), dtype=dtype)
    text = np.ones(len(framed), dtype=bool)
    text[ends - 1] = False
    if bos is not None:
        text[ends - lengths] = False
        framed[ends - lengths] = bos
    framed[ends - 1] = eos
    framed[text] = ids
    return framed, lengths
