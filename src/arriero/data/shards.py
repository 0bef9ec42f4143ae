"""The dataset on disk: Megatron's ``.bin``/``.idx`` pairs and the manifest ``dataset.json``, written and read.

A pair holds documents back to back. ``.bin`` is nothing but token ids; ``.idx`` is

=========  ==========================================================================
bytes      meaning (little endian)
=========  ==========================================================================
9          ``MMIDIDX\\0\\0``
8          version, 1
1          dtype code of the ids (Megatron's table: 4 = int32, 8 = uint16, …)
8          S, the number of sequences (here a sequence is a document)
8          E, the number of entries of the document index, documents + 1
4 · S      int32 lengths in tokens
8 · S      int64 offsets of the sequences in ``.bin``, in bytes
8 · E      int64 document index: the first sequence of each document, then S
=========  ==========================================================================
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from arriero.disk import sync_folder
from arriero.errors import UserError
from arriero.units import format_count

FORMAT_VERSION = 1
MANIFEST = "dataset.json"
INDEX_FOLDER = "index"  # inside a dataset, for what can be made again from it, such as rows packed by best fit

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_SHARD_BYTES = 1 << 30
_LONGEST_DOCUMENT = (1 << 31) - 1  # the format stores lengths as int32
_DTYPE_OF_CODE = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODE_OF_DTYPE = {np.dtype(name): code for code, name in _DTYPE_OF_CODE.items()}
# DeepSpeed's own writer numbers the unsigned types differently from Megatron. Megatron's 6 and 7 are floats, which no
# token file holds, so the bytes per token tell the two tables apart: (code, bytes per token) → dtype.
_DEEPSPEED_DTYPES = {(6, 2): "<u2", (7, 4): "<u4", (8, 8): "<u8"}
_CHUNK = 1 << 20  # items moved at once while streaming: 12 MiB for the longest of them

IntArray = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]


def token_dtype(largest_id: int) -> np.dtype[Any]:
    """uint16 where ids up to ``largest_id`` fit, else int32."""
    return np.dtype("<u2") if largest_id <= np.iinfo(np.uint16).max else np.dtype("<i4")


# ------------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class ShardInfo:
    """What the manifest says of one ``.bin``/``.idx`` pair; the hashes are xxh3_128 in hex."""

    name: str
    documents: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    bin_xxh3: str
    idx_xxh3: str


class ShardWriter:
    """Writes documents into ``<folder>/<split>-00000.bin/.idx`` and on to the next number at ``max_tokens`` per shard.

    A document is never cut. Memory does not grow with the data: lengths are spooled to a file beside the shard.
    Leaving the ``with`` block without ``close`` drops what is unfinished but closes its files. Between ``checkpoint``
    and ``restore`` a process may die; for that, ``keep_spools`` leaves the files of lengths to the caller to remove.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype[Any],
        *,
        max_tokens: int | None = None,
        keep_spools: bool = False,
    ) -> None:
        self._folder = folder
        self._split = split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        if self._dtype not in _CODE_OF_DTYPE:
            raise ValueError(f"no Megatron dtype code for {dtype}")
        self._max_tokens = max_tokens or _SHARD_BYTES // self._dtype.itemsize
        self._keep_spools = keep_spools
        self._infos: list[ShardInfo] = []
        self._bin: IO[bytes] | None = None
        self._spool: IO[bytes] | None = None
        self._hash = xxhash.xxh3_128()
        self._tokens = 0
        self._documents = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._bin, self._spool):
            if file is not None:
                file.close()

    def add(self, ids: IntArray, lengths: IntArray) -> None:
        """Appends whole documents.

        ids: the documents back to back, BOS and EOS already in place; lengths: their sizes, positive, summing to
        ``len(ids)``. Raises ``UserError`` for a document that the format can't hold (2³¹ tokens or more).
        """
        if not len(lengths):
            return
        ends = np.cumsum(lengths, dtype=np.int64)
        assert int(ends[-1]) == len(ids), "lengths must sum to the number of ids"
        assert int(lengths.min()) > 0, "a document has at least one token"
        if int(lengths.max()) > _LONGEST_DOCUMENT:
            raise UserError(
                f"a document of {format_count(int(lengths.max()))} tokens can't be stored: the limit is 2^31 - 1",
                "Split it into several documents.",
            )
        taken = 0  # documents of this call that are written
        while taken < len(lengths):
            start = int(ends[taken - 1]) if taken else 0
            room = max(0, self._max_tokens - self._tokens)
            fit = int(np.searchsorted(ends, start + room, side="right")) - taken
            if fit == 0 and self._documents == 0:
                fit = 1  # longer than a whole shard: it gets one to itself
            if fit == 0:
                self._finish_shard()
                continue
            self._append(ids[start : int(ends[taken + fit - 1])], lengths[taken : taken + fit])
            taken += fit

    def close(self) -> list[ShardInfo]:
        """Finishes the last shard, everything synced to the disk; an empty list (and no file) if nothing was added."""
        if self._documents:
            self._finish_shard()
        return list(self._infos)

    def checkpoint(self) -> dict[str, Any]:
        """Syncs what has been added to the disk; returns what ``restore`` needs to go on from here, for JSON."""
        for file in (self._bin, self._spool):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        return {
            "shards": [asdict(info) for info in self._infos],
            "documents": self._documents,
            "tokens": self._tokens,
            "bin_xxh3": self._hash.hexdigest(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a ``checkpoint`` with the files as they were then; what was added later is cut off.

        For a new writer. Raises ``ValueError`` if the files don't hold what they held.
        """
        self._infos = [ShardInfo(**info) for info in state["shards"]]
        for info in self._infos:
            sizes = {".bin": info.bin_bytes, ".idx": info.idx_bytes}
            for path, size in ((self._folder / (info.name + suffix), size) for suffix, size in sizes.items()):
                if not path.is_file() or path.stat().st_size != size:
                    raise ValueError(f"{path} does not have {size} bytes")
        self._documents, self._tokens = state["documents"], state["tokens"]
        if not self._documents:
            return
        self._bin = _open_cut(self._path(".bin"), self._tokens * self._dtype.itemsize)
        self._spool = _open_cut(self._path(".lengths"), 4 * self._documents)
        self._bin.seek(0)
        while data := self._bin.read(1 << 22):
            self._hash.update(data)
        if self._hash.hexdigest() != state["bin_xxh3"]:
            raise ValueError(f"{self._path('.bin')} holds something else than was written")
        self._spool.seek(0, os.SEEK_END)

    def _append(self, ids: IntArray, lengths: IntArray) -> None:
        if self._bin is None or self._spool is None:
            self._bin = self._path(".bin").open("wb")
            self._spool = self._path(".lengths").open("w+b")
        stored = np.ascontiguousarray(ids, dtype=self._dtype)
        self._hash.update(stored.data)
        self._bin.write(stored.data)
        self._spool.write(np.ascontiguousarray(lengths, dtype="<i4").data)
        self._tokens += len(ids)
        self._documents += len(lengths)

    def _finish_shard(self) -> None:
        assert self._bin is not None
        assert self._spool is not None
        _sync_and_close(self._bin)
        idx_bytes, idx_xxh3 = self._write_index(self._spool)
        self._spool.close()
        if not self._keep_spools:
            self._path(".lengths").unlink()
        self._infos.append(
            ShardInfo(
                name=self._name(),
                documents=self._documents,
                tokens=self._tokens,
                bin_bytes=self._tokens * self._dtype.itemsize,
                idx_bytes=idx_bytes,
                bin_xxh3=self._hash.hexdigest(),
                idx_xxh3=idx_xxh3,
            )
        )
        self._bin = self._spool = None
        self._hash = xxhash.xxh3_128()
        self._tokens = self._documents = 0

    def _write_index(self, spool: IO[bytes]) -> tuple[int, str]:
        """(size, xxh3_128) of the ``.idx`` that is made from the spooled lengths, a chunk at a time."""
        digest = xxhash.xxh3_128()
        with self._path(".idx").open("wb") as file:

            def put(data: bytes | memoryview) -> None:
                digest.update(data)
                file.write(data)

            code = _CODE_OF_DTYPE[self._dtype]
            put(_HEADER.pack(_MAGIC, 1, code, self._documents, self._documents + 1))
            for lengths in _chunks(spool):
                put(lengths.data)
            offset = 0  # bytes
            for lengths in _chunks(spool):
                ends = offset + np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
                put((ends - lengths.astype("<i8") * self._dtype.itemsize).data)
                offset = int(ends[-1])
            for first in range(0, self._documents + 1, _CHUNK):
                put(np.arange(first, min(first + _CHUNK, self._documents + 1), dtype="<i8").data)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        return size, digest.hexdigest()

    def _name(self) -> str:
        return f"{self._split}-{len(self._infos):05d}"

    def _path(self, suffix: str) -> Path:
        return self._folder / (self._name() + suffix)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes ``dataset.json`` whole or not at all; its presence is what makes the folder a dataset."""
    write_whole(folder / MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all, and so that it survives a power cut."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def _chunks(spool: IO[bytes]) -> Iterator[npt.NDArray[np.int32]]:
    spool.seek(0)
    while data := spool.read(4 * _CHUNK):
        yield np.frombuffer(data, dtype="<i4")


def _open_cut(path: Path, size: int) -> IO[bytes]:
    """A file opened to be read and written, cut to a size that it must have at least."""
    file = path.open("r+b")
    if file.seek(0, os.SEEK_END) < size:
        file.close()
        raise ValueError(f"{path} has less than {size} bytes")
    file.truncate(size)
    return file


def _sync_and_close(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


# ------------------------------------------------------------------------------------------------------------- reading


class _Descriptor:
    """A file open for reading until nobody holds this any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self, close: Any = os.close) -> None:
        close(self.number)


class _Maps(NamedTuple):
    bin: _Descriptor
    lengths: npt.NDArray[np.int32]
    pointers: Int64Array
    document_index: Int64Array


@dataclass(frozen=True, eq=False)
class Shard:
    """A read-only view of one ``.bin``/``.idx`` pair. Opening it reads the header only; the arrays are memory maps.

    ``prefix`` is the path without its suffix. Raises ``UserError`` that names the file when one is missing, has
    another format, or is shorter or longer than its header says.
    """

    prefix: Path
    dtype: np.dtype[Any] = field(init=False)
    sequences: int = field(init=False)
    documents: int = field(init=False)
    tokens: int = field(init=False)
    identity: tuple[int, ...] = field(init=False)  # of both files, to notice when they are replaced

    def __post_init__(self) -> None:
        dtype, sequences, entries, tokens, identity = _read_header(self.prefix)
        facts = {
            "dtype": dtype,
            "sequences": sequences,
            "documents": entries - 1,
            "tokens": tokens,
            "identity": identity,
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    @property
    def ids(self) -> IntArray:
        """Token ids, in the stored dtype [tokens]: a map, for reading one after the other."""
        return _ids(self)

    def read(self, out: Int64Array, start: int) -> None:
        """Fills ``out`` with the tokens from ``start`` on, for places in any order.

        Through the map, each row would pull as much into memory as the disk reads ahead (128 kB to 8 MB): here 1.9 ms
        for 8 kB that nobody had read before, instead of 7 µs.
        """
        size, file = self.dtype.itemsize, _map(self).bin.number
        for first in range(0, len(out), _CHUNK):
            last = min(first + _CHUNK, len(out))
            data = os.pread(file, (last - first) * size, (start + first) * size)
            out[first:last] = np.frombuffer(data, dtype=self.dtype)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of ``.bin`` and ``.idx``."""
        return self.identity[2], self.identity[6]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens in each sequence, int32 [sequences]."""
        return _map(self).lengths

    @property
    def pointers(self) -> Int64Array:
        """Where each sequence starts in ``.bin``, in bytes, int64 [sequences]."""
        return _map(self).pointers

    def document_starts(self, documents: Int64Array) -> Int64Array:
        """The first token of each document (``documents`` may hold ``self.documents``, the end), int64, in tokens."""
        maps = _map(self)
        first = maps.document_index[documents]
        inside = first < self.sequences
        starts = np.full(len(documents), self.tokens, dtype=np.int64)
        starts[inside] = maps.pointers[first[inside]] // self.dtype.itemsize
        return starts

    def documents_between(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """(documents, their first tokens) of the documents that overlap ``[start, stop)``, both int64."""
        maps = _map(self)
        size = self.dtype.itemsize
        # the last sequence that begins at or before a token holds it; the last document likewise
        first, last = np.searchsorted(maps.pointers, [start * size, (stop - 1) * size], side="right") - 1
        first, last = np.searchsorted(maps.document_index, [first, last], side="right") - 1
        documents = np.arange(int(first), int(last) + 1, dtype=np.int64)
        edges = self.document_starts(np.arange(int(first), int(last) + 2, dtype=np.int64))
        full = edges[1:] > edges[:-1]  # other writers may have left empty documents in between
        return documents[full], edges[:-1][full]

    def file(self, suffix: str) -> Path:
        """The path of its ``.bin`` or ``.idx``."""
        return self.prefix.with_name(self.prefix.name + suffix)


# Each holds two descriptors, and 1024 is the usual limit: of a thousand shards only the last used stay open.
@lru_cache(maxsize=128)
def _map(shard: Shard) -> _Maps:
    bin_path, idx_path = shard.file(".bin"), shard.file(".idx")
    if _identity(bin_path.stat(), idx_path.stat()) != shard.identity:
        raise UserError(
            f"{bin_path} or its .idx was replaced while it was in use",
            "Leave a dataset alone while something trains on it: prepare into another folder.",
            exit_code=1,
        )
    sequences = shard.sequences
    index = _mapped(idx_path)
    lengths_end = _HEADER.size + 4 * sequences
    pointers_end = lengths_end + 8 * sequences
    return _Maps(
        bin=_Descriptor(bin_path),
        lengths=np.frombuffer(index, dtype="<i4", offset=_HEADER.size, count=sequences),
        pointers=np.frombuffer(index, dtype="<i8", offset=lengths_end, count=sequences),
        document_index=np.frombuffer(index, dtype="<i8", offset=pointers_end, count=shard.documents + 1),
    )


@lru_cache(maxsize=16)
def _ids(shard: Shard) -> IntArray:
    _map(shard)
    return _mapped(shard.file(".bin")).view(shard.dtype)


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    """A file's bytes, mapped."""
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def _identity(*files: os.stat_result) -> tuple[int, ...]:
    return tuple(number for file in files for number in (file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns))


def _read_header(prefix: Path) -> tuple[np.dtype[Any], int, int, int, tuple[int, ...]]:
    """(dtype, sequences, entries of the document index, tokens, identity), checked against the sizes of both files.

    Two look-ups and one small read: what a dataset of 10⁵ shards needs 10⁵ times, on a network file system too.
    """
    bin_path, idx_path = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
    try:
        bin_stat, idx_stat = bin_path.stat(), idx_path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{error.filename} does not exist", "A shard is a .bin and an .idx file with the same name."
        ) from error
    with idx_path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise UserError(f"{idx_path} is no Megatron index: it does not begin with MMIDIDX")
        _, version, code, sequences, entries = _HEADER.unpack(header)
        if version != 1:
            raise UserError(f"{idx_path} has index version {version}, only version 1 is known")
        _expect_size(idx_path, idx_stat.st_size, _HEADER.size + 12 * sequences + 8 * entries)
        if sequences == 0:
            raise UserError(f"{idx_path} holds no documents")
        file.seek(_HEADER.size + 4 * (sequences - 1))
        last_length = int.from_bytes(file.read(4), "little")
        file.seek(_HEADER.size + 12 * sequences - 8)
        last_pointer = int.from_bytes(file.read(8), "little")
        first_lengths, first_pointers = _first_of_both(file, sequences)
    item_bytes = _bytes_per_token(first_lengths, first_pointers) or _item_bytes(code)
    name = _DEEPSPEED_DTYPES.get((code, item_bytes)) or _DTYPE_OF_CODE.get(code)
    if name is None:
        raise UserError(f"{idx_path} stores its ids with dtype code {code}, which is no integer type")
    dtype = np.dtype(name)
    end_bytes = last_pointer + last_length * dtype.itemsize
    _expect_size(bin_path, bin_stat.st_size, end_bytes)
    return dtype, sequences, entries, end_bytes // dtype.itemsize, _identity(bin_stat, idx_stat)


def _first_of_both(file: IO[bytes], sequences: int) -> tuple[npt.NDArray[np.int32], Int64Array]:
    count = min(sequences, 1024)
    file.seek(_HEADER.size)
    lengths = np.frombuffer(file.read(4 * count), dtype="<i4")
    file.seek(_HEADER.size + 4 * sequences)
    return lengths, np.frombuffer(file.read(8 * count), dtype="<i8")


def _bytes_per_token(lengths: npt.NDArray[np.int32], pointers: Int64Array) -> int | None:
    """How many bytes a token takes, from two neighbouring sequences; None if all but the last are empty."""
    gaps = np.diff(pointers)
    known = np.flatnonzero(lengths[:-1])
    return int(gaps[known[0]] // lengths[known[0]]) if len(known) else None


def _item_bytes(code: int) -> int:
    return np.dtype(_DTYPE_OF_CODE[code]).itemsize if code in _DTYPE_OF_CODE else 0


def _check_size(path: Path, expected: int) -> None:
    """``UserError`` unless the file is there with that size."""
    try:
        actual = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist", "Prepare the dataset again, or copy it again in full.") from None
    _expect_size(path, actual, expected)


def _expect_size(path: Path, actual: int, expected: int) -> None:
    if actual != expected:
        raise UserError(
            f"{path} has {actual} bytes instead of {expected}",
            "It was cut off or changed after it was written. Prepare the dataset again, or copy it again in full.",
        )


class TokenStream:
    """The documents of one split as one stream of tokens over all its shards, in document order.

    tokens, documents: how many there are. Positions count tokens from 0. Pickling it carries paths, not data.
    """

    def __init__(self, shards: list[Shard], document_ids: Int64Array | None = None) -> None:
        self._shards = shards
        self._shard_tokens = _starts([shard.tokens for shard in shards])  # the first token of each, [shards + 1]
        self._shard_documents = _starts([shard.documents for shard in shards])  # the first document, [shards + 1]
        self._ids = document_ids  # None: all of them
        if document_ids is None:
            self._edges = self._origins = self._shard_tokens
            self.documents = int(self._shard_documents[-1])
        else:
            # piece i of this stream is document_ids[i]: it lies at [_edges[i], _edges[i + 1]) here and begins at
            # _origins[i] of the shards; 24 bytes of memory per document
            self._origins, lengths = self._spans(document_ids)
            self._edges = _starts(lengths)
            self.documents = len(document_ids)
        self.tokens = int(self._edges[-1])

    def read(self, start: int, stop: int) -> Int64Array:
        """The tokens ``[start, stop)``, int64 [stop - start]; they may span shards."""
        _check_range(start, stop, self.tokens)
        out = np.empty(stop - start, dtype=np.int64)
        for piece in _overlapping(self._edges, start, stop):
            edge = int(self._edges[piece])
            first, last = max(start, edge), min(stop, int(self._edges[piece + 1]))
            self._copy(out[first - start : last - start], first - edge + int(self._origins[piece]))
        return out

    def documents_between(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """(document ids, first tokens) of all documents that overlap ``[start, stop)``, both int64 [n].

        First tokens are positions in this stream; the first document may begin before ``start``.
        """
        _check_range(start, stop, self.tokens)
        pieces = _overlapping(self._edges, start, stop)
        if self._ids is not None:
            here = slice(pieces.start, pieces.stop)
            return self._ids[here], self._edges[here].copy()
        ids, firsts = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for number in pieces:
            base = int(self._shard_tokens[number])
            last = min(stop, int(self._shard_tokens[number + 1]))
            local_ids, local_firsts = self._shards[number].documents_between(max(start, base) - base, last - base)
            ids.append(local_ids + self._shard_documents[number])
            firsts.append(local_firsts + base)
        return np.concatenate(ids), np.concatenate(firsts)

    def document_lengths(self, start: int = 0, stop: int | None = None) -> Int64Array:
        """Tokens in each document of ``[start, stop)``, by default of all: int64 [stop - start]."""
        stop = self.documents if stop is None else stop
        if self._ids is not None:
            return np.diff(self._edges[start : stop + 1])
        return self._spans(np.arange(start, stop, dtype=np.int64))[1]

    def select(self, document_ids: npt.ArrayLike) -> TokenStream:
        """The stream of only these documents, in this order; ids are, and stay, those of the unselected stream."""
        return TokenStream(self._shards, np.asarray(document_ids, dtype=np.int64))

    def iterate_documents(self) -> Iterator[tuple[int, IntArray]]:
        """(document id, its token ids in the stored dtype), one document after the other."""
        for first in range(0, self.documents, _CHUNK):
            last = min(first + _CHUNK, self.documents)
            ids = np.arange(first, last, dtype=np.int64) if self._ids is None else self._ids[first:last]
            origins, lengths = self._spans(ids)
            shards = np.searchsorted(self._shard_documents, ids, side="right") - 1
            begins = origins - self._shard_tokens[shards]
            for document, shard, begin, length in zip(
                ids.tolist(), shards.tolist(), begins.tolist(), lengths.tolist(), strict=True
            ):
                yield document, self._shards[shard].ids[begin : begin + length]

    def _spans(self, document_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(first token in the shards, length) of each document, int64."""
        firsts = np.empty(len(document_ids), dtype=np.int64)
        lengths = np.empty(len(document_ids), dtype=np.int64)
        shard_of = np.searchsorted(self._shard_documents, document_ids, side="right") - 1
        for number in np.unique(shard_of).tolist():
            here = shard_of == number
            shard, local = self._shards[number], document_ids[here] - self._shard_documents[number]
            starts = shard.document_starts(local)
            firsts[here] = starts + self._shard_tokens[number]
            lengths[here] = shard.document_starts(local + 1) - starts
        return firsts, lengths

    def _copy(self, out: Int64Array, origin: int) -> None:
        """Fills ``out`` with the tokens of the shards from ``origin`` on."""
        for number in _overlapping(self._shard_tokens, origin, origin + len(out)):
            base = int(self._shard_tokens[number])
            first, last = max(origin, base), min(origin + len(out), int(self._shard_tokens[number + 1]))
            self._shards[number].read(out[first - origin : last - origin], first - base)


def _overlapping(edges: Int64Array, start: int, stop: int) -> range:
    """The pieces i whose ``[edges[i], edges[i + 1])`` overlap ``[start, stop)``."""
    if start == stop:
        return range(0)
    first, last = np.searchsorted(edges, [start, stop - 1], side="right") - 1
    return range(int(first), int(last) + 1)


def _starts(counts: npt.ArrayLike) -> Int64Array:
    """Where each piece starts, and the end: int64 [pieces + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.asarray(counts, dtype=np.int64))])


def _check_range(start: int, stop: int, tokens: int) -> None:
    if not 0 <= start <= stop <= tokens:
        raise IndexError(f"tokens [{start}, {stop}) of a stream of {tokens}")


def join_streams(streams: list[TokenStream]) -> TokenStream:
    """One stream after the other, as one; document ids go on counting where the stream before ends."""
    shards = [shard for stream in streams for shard in stream._shards]
    if all(stream._ids is None for stream in streams):
        return TokenStream(shards)
    ids, first = [np.empty(0, dtype=np.int64)], 0
    for stream in streams:
        stored = int(stream._shard_documents[-1])
        ids.append((np.arange(stored, dtype=np.int64) if stream._ids is None else stream._ids) + first)
        first += stored
    return TokenStream(shards, np.concatenate(ids))


def split_by_hash(stream: TokenStream, fraction: float) -> tuple[TokenStream, TokenStream]:
    """(training, validation) documents of a stream that has no validation part of its own.

    Validation gets the documents whose xxh3_64 over their stored token bytes falls below ``fraction`` · 2⁶⁴: the choice
    depends on a document's content alone, so adding or reordering documents moves none. With a fraction above 0 and at
    least two documents neither part is empty: if the hash picks none, the document with the smallest hash is held out;
    if it picks all (or there is only one), the one with the largest is kept. Reads every token once.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"a validation split of {fraction} makes no sense", "Give a share of at least 0 and below 1.")
    if fraction == 0 or stream.documents == 0:
        return stream, stream.select(np.empty(0, dtype=np.int64))
    ids = np.empty(stream.documents, dtype=np.int64)
    hashes = np.empty(stream.documents, dtype=np.uint64)
    for place, (document, tokens) in enumerate(stream.iterate_documents()):
        ids[place] = document
        hashes[place] = xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).data)
    held_out = hashes < np.uint64(hash_limit(fraction))
    if held_out.all():
        held_out[np.argmax(hashes)] = False
    elif not held_out.any() and stream.documents >= 2:
        held_out[np.argmin(hashes)] = True
    return stream.select(ids[~held_out]), stream.select(ids[held_out])


def hash_limit(fraction: float) -> int:
    """A 64-bit content hash below this belongs to the given fraction of the documents."""
    return min(int(fraction * 2**64), 2**64 - 1)


# ------------------------------------------------------------------------------------------------------------- dataset


@dataclass(frozen=True, eq=False)
class Dataset:
    """A prepared dataset or a bare Megatron corpus, opened.

    manifest: ``dataset.json``, empty for a bare corpus. text_bytes: UTF-8 bytes of the text in each split, None where
    nobody counted. tokenizer_fingerprint and eos_token_id are None for a bare corpus, which doesn't name its tokenizer.
    """

    path: Path
    name: str
    manifest: dict[str, Any]
    fingerprint: str
    tokenizer_fingerprint: str | None
    eos_token_id: int | None
    splits: dict[str, TokenStream]
    text_bytes: dict[str, int | None]

    @cached_property
    def largest_id(self) -> int:
        """The largest token id; from the manifest, or by one pass over a bare corpus (about 2 GB/s)."""
        if self.manifest:
            return int(self.manifest["largest_id"])
        return max(_largest_id(stream) for stream in self.splits.values())


def open_dataset(path: Path) -> Dataset:
    """Opens a folder with ``dataset.json``, one bare Megatron pair (``corpus``, ``corpus.bin`` or ``corpus.idx``), or a
    folder of such pairs. All documents of a bare corpus are in the split ``train``.

    Checks that each file exists with the size that the manifest or the index states; raises ``UserError`` naming the
    file, the size it should have and the size it has.
    """
    path = Path(path)
    if is_dataset(path):
        return _open_prepared(path)
    return _open_bare(path, _bare_prefixes(path))


def is_dataset(folder: Path) -> bool:
    """True for a folder that holds a finished dataset of ours."""
    return (folder / MANIFEST).is_file()


def dataset_exists(path: Path) -> bool:
    """Whether something lies there that ``open_dataset`` would open, or find damaged."""
    return path.exists() or any(path.with_name(path.name + suffix).exists() for suffix in (".bin", ".idx"))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """``dataset.json`` of a folder, None where there is none. Raises ``UserError`` if it can't be read as one."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = orjson.loads(path.read_bytes())
        version = manifest["format_version"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a dataset manifest ({error!r})", "Remove it and prepare again.") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, this arriero reads {FORMAT_VERSION}",
            "Prepare the dataset again, or use the arriero that wrote it.",
        )
    assert isinstance(manifest, dict)
    return manifest


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raises ``UserError`` unless every file that the manifest names is there with its size."""
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            _check_size(folder / f"{shard['name']}.bin", shard["bin_bytes"])
            _check_size(folder / f"{shard['name']}.idx", shard["idx_bytes"])
    for table in (*manifest["tables"], *manifest.get("lists", [])):
        _check_size(folder / table["name"], table["bytes"])


def known_files(manifest: dict[str, Any]) -> set[str]:
    """The names that a dataset's folder may hold: what the manifest names, and row indexes made for training."""
    shards = [shard["name"] for split in manifest["splits"].values() for shard in split["shards"]]
    tables = [table["name"] for table in (*manifest["tables"], *manifest.get("lists", []))]
    return {MANIFEST, INDEX_FOLDER, *tables, *(name + suffix for name in shards for suffix in (".bin", ".idx"))}


def split_entry(shards: list[ShardInfo], text_bytes: int) -> dict[str, Any]:
    """A split as the manifest describes it."""
    return {
        "documents": sum(shard.documents for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "text_bytes": text_bytes,
        "shards": [asdict(shard) for shard in shards],
    }


def _open_prepared(path: Path) -> Dataset:
    manifest = read_manifest(path)
    assert manifest is not None
    for table in (*manifest["tables"], *manifest.get("lists", [])):
        _check_size(path / table["name"], table["bytes"])
    splits = {
        name: TokenStream([_open_shard(path, shard) for shard in split["shards"]])
        for name, split in manifest["splits"].items()
    }
    if not sum(stream.tokens for stream in splits.values()):
        raise UserError(f"{path} holds no tokens", "Prepare it again from sources that have text.")
    tokenizer = manifest["tokenizer"]
    return Dataset(
        path=path,
        name=path.resolve().name,
        manifest=manifest,
        fingerprint=manifest["fingerprint"],
        tokenizer_fingerprint=tokenizer["fingerprint"],
        eos_token_id=tokenizer["eos_token_id"],
        splits=splits,
        text_bytes={name: split["text_bytes"] for name, split in manifest["splits"].items()},
    )


def _open_shard(folder: Path, entry: dict[str, Any]) -> Shard:
    """A shard that is as long as the manifest says."""
    shard = Shard(folder / entry["name"])
    expected = (entry["bin_bytes"], entry["idx_bytes"])
    if shard.sizes != expected:
        for suffix, actual, wanted in zip((".bin", ".idx"), shard.sizes, expected, strict=True):
            _expect_size(shard.file(suffix), actual, wanted)
    return shard


def _bare_prefixes(path: Path) -> list[Path]:
    if path.is_dir():
        prefixes = sorted(file.with_suffix("") for file in path.glob("*.idx"))
        if not prefixes:
            raise UserError(
                f"{path} is no dataset: it has neither {MANIFEST} nor .bin/.idx pairs",
                f"Make one with: arriero prepare TEXT --tokenizer DIR --out {path}",
            )
        return prefixes
    prefix = path.with_suffix("") if path.suffix in {".bin", ".idx"} else path
    if not any(prefix.with_name(prefix.name + suffix).exists() for suffix in (".bin", ".idx")):
        raise UserError(
            f"there is no dataset at {path}",
            f"Give a folder that `arriero prepare` made, or a Megatron pair such as {prefix}.bin and {prefix}.idx.",
        )
    return [prefix]


def _open_bare(path: Path, prefixes: list[Path]) -> Dataset:
    shards = [Shard(prefix) for prefix in prefixes]
    digest = xxhash.xxh3_128()
    for shard in shards:
        bin_bytes = shard.tokens * shard.dtype.itemsize
        digest.update(orjson.dumps([shard.prefix.name, bin_bytes]))
        with shard.file(".idx").open("rb") as file:
            while data := file.read(1 << 24):
                digest.update(data)
    stream = TokenStream(shards)
    if not stream.tokens:
        raise UserError(f"{path} holds no tokens")
    return Dataset(
        path=path,
        name=path.resolve().name if path.is_dir() else prefixes[0].name,
        manifest={},
        fingerprint=digest.hexdigest(),
        tokenizer_fingerprint=None,
        eos_token_id=None,
        splits={"train": stream},
        text_bytes={"train": None},
    )


def _largest_id(stream: TokenStream) -> int:
    largest = 0
    for shard in stream._shards:
        for first in range(0, shard.tokens, 1 << 24):
            largest = max(largest, int(shard.ids[first : first + (1 << 24)].max()))
    return largest
