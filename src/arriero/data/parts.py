"""A dataset that is being built in a folder of its own: shards, document table, list of what was skipped, and counts.

What has been added is synced in parts. A process that dies leaves the last finished part, and whoever comes next cuts the
files back to it and goes on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from arriero.data.batches import Batch, Encoded, frame
from arriero.data.shards import ShardWriter, split_entry
from arriero.data.sources import Note, Place, ReadLog
from arriero.disk import hash_file

SPLITS = ("train", "validation")
_TABLE = "documents-00000.parquet"
_SKIPPED = "skipped-00000.jsonl"
ROWS = "documents.rows"  # until the table is saved
_TABLE_ROWS = 1 << 16  # documents per row group of the table: 2 MB of memory while they gather


class NoWayOn(Exception):
    """What an interrupted build left is not what it says."""


class Unfinished:
    """One pass over the sources, written as it comes.

    files: the names of the source files by number. held_out_below: documents whose hash is below go to validation.
    moved: place of a document → held out or not, against its hash. Leaving the ``with`` block closes the files as
    they are.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[str],
        *,
        dtype: np.dtype[Any],
        bos: int | None,
        eos: int,
        held_out_below: int,
        moved: dict[int, bool],
    ) -> None:
        self._folder, self._files = folder, files
        self._dtype, self._bos, self._eos = dtype, bos, eos
        self._held_out_below, self._moved = np.uint64(held_out_below), moved
        self.log = ReadLog(each=self._list)
        self.documents = dict.fromkeys(SPLITS, 0)
        self.text_bytes = dict.fromkeys(SPLITS, 0)  # UTF-8
        self.tokens = 0
        self.largest_id = 0
        self.lowest: tuple[int, int] = (1 << 64, 0)  # (hash, place) of the document with the smallest hash
        self.highest: tuple[int, int] = (-1, 0)
        self.place = Place()  # of the last document
        self.part_bytes = 0  # of text since the last part
        self._encoder: dict[str, Any] = {}
        with ExitStack() as stack:
            self._writers = {
                name: stack.enter_context(ShardWriter(folder, name, dtype, keep_spools=True)) for name in SPLITS
            }
            self._table = stack.enter_context(_Table(folder / ROWS))
            self._skipped = stack.enter_context((folder / _SKIPPED).open("a+b"))
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def accepted(self) -> int:
        """Documents that have been written."""
        return sum(self.documents.values())

    def add(self, encoded: Encoded) -> None:
        """Writes a batch, framed by BOS and EOS and divided between the splits."""
        batch, ids, lengths = encoded.batch, encoded.ids, encoded.lengths
        self._encoder = encoded.encoder
        for note in batch.notes:
            self.log.take(note)
        if not len(lengths):
            return
        self.place = Place(int(batch.files[-1]), int(batch.rows[-1]))
        self.part_bytes += int(batch.sizes_bytes.sum())
        if not lengths.all():
            batch, lengths = self._drop_tokenless(batch, lengths)
            if not len(lengths):
                return
        self.add_framed(batch, *frame(ids, lengths, self._bos, self._eos, self._dtype))

    def add_framed(self, batch: Batch, ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        """Writes documents that have their BOS and EOS, of which there is at least one, divided between the splits."""
        held_out = batch.hashes < self._held_out_below
        for place, is_held_out in self._moved.items():
            if 0 <= place - self.accepted < len(held_out):
                held_out[place - self.accepted] = is_held_out
        self._count(batch, ids)
        self._write(batch, ids, lengths, held_out)

    def _drop_tokenless(self, batch: Batch, lengths: npt.NDArray[np.int64]) -> tuple[Batch, npt.NDArray[np.int64]]:
        """A normalizer may leave nothing of a text; a document of an EOS alone would teach nothing."""
        kept = lengths > 0
        for place in np.flatnonzero(~kept).tolist():
            self.log.skip("no tokens", self._files[batch.files[place]], f"row {batch.rows[place]}")
        return batch.only(kept), lengths[kept]

    def _count(self, batch: Batch, ids: npt.NDArray[Any]) -> None:
        self.tokens += len(ids)
        self.largest_id = max(self.largest_id, int(ids.max()))
        low, high = int(np.argmin(batch.hashes)), int(np.argmax(batch.hashes))
        if batch.hashes[low] < self.lowest[0]:  # of copies the first one, however the batches fall
            self.lowest = int(batch.hashes[low]), self.accepted + low
        if batch.hashes[high] > self.highest[0]:
            self.highest = int(batch.hashes[high]), self.accepted + high

    def _write(
        self,
        batch: Batch,
        ids: npt.NDArray[Any],
        lengths: npt.NDArray[np.int64],
        held_out: npt.NDArray[np.bool_],
    ) -> None:
        index = np.empty(len(lengths), dtype=np.int64)  # of each document within its split
        token_held_out = np.repeat(held_out, lengths) if held_out.any() else None
        for name, wanted in zip(SPLITS, (~held_out, held_out), strict=True):
            count = int(wanted.sum())
            if not count:
                continue
            if token_held_out is None:
                chosen = ids
            else:
                chosen = ids[token_held_out if name == "validation" else ~token_held_out]
            self._writers[name].add(chosen, lengths[wanted])
            index[wanted] = self.documents[name] + np.arange(count)
            self.documents[name] += count
            self.text_bytes[name] += int(batch.sizes_bytes[wanted].sum())
        self._table.add(batch, held_out, index)

    def _list(self, note: Note) -> None:
        # a name that is no UTF-8 has its bytes as lone surrogates, which json escapes and orjson refuses
        entry = {"file": note.file, "place": note.place, "reason": note.reason, "done": note.done}
        self._skipped.write(json.dumps(entry).encode() + b"\n")

    def part(self) -> dict[str, Any]:
        """Ends a part: syncs everything to the disk; returns where the pass stands, for JSON and ``restore``."""
        self.part_bytes = 0
        self._skipped.flush()
        os.fsync(self._skipped.fileno())
        return {
            "place": self.place,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "tokens": self.tokens,
            "largest_id": self.largest_id,
            "lowest": self.lowest,
            "highest": self.highest,
            "log": self.log.state(),
            "encoder": self._encoder,
            "writers": {name: writer.checkpoint() for name, writer in self._writers.items()},
            "table_rows": self._table.checkpoint(),
            "skipped_bytes": self._skipped.seek(0, os.SEEK_END),
        }

    def restore(self, part: dict[str, Any]) -> None:
        """Cuts the files back to where the part ended and goes on from there. Raises ``NoWayOn`` if it isn't there."""
        try:
            for name, writer in self._writers.items():
                writer.restore(part["writers"][name])
            self._table.restore(part["table_rows"])
            if self._skipped.seek(0, os.SEEK_END) < part["skipped_bytes"]:
                raise ValueError(f"{self._folder / _SKIPPED} has less than {part['skipped_bytes']} bytes")
        except (OSError, ValueError) as error:
            raise NoWayOn(str(error)) from error
        self._skipped.truncate(part["skipped_bytes"])
        self.log.restore(part["log"])
        self.place = Place(*part["place"])
        self.documents, self.text_bytes = part["documents"], part["text_bytes"]
        self.tokens, self.largest_id = part["tokens"], part["largest_id"]
        (low, low_place), (high, high_place) = part["lowest"], part["highest"]
        self.lowest, self.highest = (low, low_place), (high, high_place)

    def append_list(self, path: Path) -> None:
        """Takes over a list of what was skipped, which is counted already."""
        with path.open("rb") as listed:
            shutil.copyfileobj(listed, self._skipped)

    def finish(self, *, as_table: bool = True) -> dict[str, Any]:
        """Completes the files, synced to the disk; returns the manifest's ``splits``, ``tables`` and ``lists``. Without
        ``as_table`` the table stays plain rows, which ``read_rows`` reads."""
        splits = {name: split_entry(writer.close(), self.text_bytes[name]) for name, writer in self._writers.items()}
        table = self._folder / (_TABLE if as_table else ROWS)
        self._table.checkpoint()
        if as_table:
            _save_table(self._folder / ROWS, table, self._files)
        self._skipped.flush()
        lists = [_file_entry(self._folder / _SKIPPED)] if self._skipped.seek(0, os.SEEK_END) else []
        return {
            "splits": {name: entry for name, entry in splits.items() if entry["documents"]},
            "tables": [_file_entry(table)],
            "lists": lists,
        }


def _file_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"name": path.name, "bytes": path.stat().st_size, "xxh3": hash_file(path)}


# ------------------------------------------------------------------------------------------------------ document table


_ROW = np.dtype(
    [("split", "u1"), ("index", "<i8"), ("file", "<i4"), ("row", "<i8"), ("text_bytes", "<i8"), ("xxh3", "<u8")]
)


class _Table:
    """Where each document came from, a row for each in the order of the sources: gathered in a file of plain rows that
    can be cut where a part ends, and saved as parquet, which can't, when all are there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] = path.open("a+b")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, batch: Batch, held_out: npt.NDArray[np.bool_], index: npt.NDArray[np.int64]) -> None:
        rows = np.empty(len(index), dtype=_ROW)
        rows["split"] = held_out
        rows["index"] = index
        rows["file"] = batch.files
        rows["row"] = batch.rows
        rows["text_bytes"] = batch.sizes_bytes
        rows["xxh3"] = batch.hashes
        self._file.write(rows.tobytes())

    def checkpoint(self) -> int:
        """Syncs the rows to the disk and counts them."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END) // _ROW.itemsize

    def restore(self, rows: int) -> None:
        """Cuts off what came after ``rows``. Raises ``ValueError`` if there are fewer."""
        if self._file.seek(0, os.SEEK_END) < rows * _ROW.itemsize:
            raise ValueError(f"{self._path} has less than {rows} rows")
        self._file.truncate(rows * _ROW.itemsize)


def read_rows(path: Path) -> Iterator[npt.NDArray[Any]]:
    """The plain rows of a table, in pieces: split, index, file, row, text_bytes, xxh3."""
    with path.open("rb") as file:
        while data := file.read(_TABLE_ROWS * _ROW.itemsize):
            yield np.frombuffer(data, dtype=_ROW)


def _save_table(rows_file: Path, path: Path, files: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.dictionary(pa.int32(), pa.string())
    columns = [("split", texts), ("index", pa.int64()), ("file", texts), ("row", pa.int64())]
    columns += [("text_bytes", pa.int64()), ("xxh3", pa.uint64())]
    schema = pa.schema(columns)
    names = np.array(files, dtype=object)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows in read_rows(rows_file):
            used, places = np.unique(rows["file"], return_inverse=True)
            coded = {"split": (rows["split"], list(SPLITS)), "file": (places, names[used].tolist())}
            arrays = [
                pa.DictionaryArray.from_arrays(coded[name][0].astype("i4"), coded[name][1])
                if name in coded
                else pa.array(rows[name])
                for name in schema.names
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
