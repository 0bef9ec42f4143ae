"""Text to a packed dataset: hashed inputs, one fingerprint, shards built aside and swapped in when they are complete.

read documents → encode in batches → BOS and EOS → hold out by content hash → shards, document table, manifest

The same inputs and options are a cache hit that touches nothing. Killed at any moment, the same command gives the same
bytes: a dataset is complete or absent.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from arriero.__version__ import __version__
from arriero.data.shards import (
    FORMAT_VERSION,
    ShardWriter,
    check_files,
    hash_limit,
    is_dataset,
    known_files,
    read_manifest,
    split_entry,
    sync_folder,
    token_dtype,
    write_manifest,
)
from arriero.data.sources import Document, ReadLog, ReadOptions, SourceFile, list_files, read_documents
from arriero.data.tokenizer import (
    Encoder,
    EngineMismatch,
    adds_bos,
    check_special_tokens,
    largest_possible_id,
    load_tokenizer,
    tokenizer_fingerprint,
)
from arriero.errors import UserError

logger = logging.getLogger(__name__)

# gigatoken uses about 3.3 bytes of memory per byte of input, and gains nothing from batches beyond this.
_BATCH_BYTES = 8 << 20
_TABLE_ROWS = 1 << 16  # documents per row group of the table: 2 MB of memory while they gather
_TABLE = "documents-00000.parquet"
_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Progress:
    """Where a preparation is. stage: hashing, waiting, encoding or writing; bytes are those of the source files."""

    stage: str
    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class PrepareResult:
    """What a preparation made, or found made. Counts are over all splits, BOS and EOS included."""

    path: Path
    fingerprint: str
    cache_hit: bool
    documents: int
    validation_documents: int
    tokens: int
    text_bytes: int  # UTF-8
    skipped: int
    skipped_reasons: dict[str, int]
    replaced: int
    engine: str
    share_compared: float
    add_bos: bool
    seconds: float
    mb_per_s: float  # of text, 0 for a cache hit


@dataclass(frozen=True)
class Plan:
    """What is to be prepared, with the fingerprint of its result; made by ``plan_preparation``."""

    files: tuple[SourceFile, ...]
    inputs: tuple[dict[str, Any], ...]  # name, bytes, xxh3 of each file
    modified: tuple[tuple[int, int], ...]  # size and mtime of each when it was hashed
    aside: dict[str, int]
    read: ReadOptions
    tokenizer: Any
    tokenizer_entry: dict[str, Any]
    options: dict[str, Any]
    fingerprint: str

    @property
    def add_bos(self) -> bool:
        return bool(self.tokenizer_entry["add_bos"])

    @property
    def input_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.inputs)


Report = Callable[[Progress], None]


def prepare(
    sources: Sequence[str | Path] | str | Path,
    *,
    tokenizer: Any,
    out: str | Path,
    text_field: str = "text",
    document_separator: str | None = None,
    add_bos: bool | None = None,
    validation_split: float = 0.01,
    on_bad_input: str = "error",
    progress: Report | None = None,
) -> PrepareResult:
    """Prepares text for training and returns what came of it.

    sources: files, folders and globs (see ``arriero.data.sources`` for the formats). tokenizer: a Hugging Face folder or
    a tokenizer object. out: the dataset's folder; one that holds something else than a dataset is refused, another
    dataset is replaced when the new one is complete. Each document gets exactly one EOS at its end and, with
    ``add_bos``, exactly one BOS in front (None: as the tokenizer itself does for a text). validation_split: the share of
    documents to hold out by the hash of their text, 0 for none. on_bad_input: error, skip or replace.

    Two preparations into one folder take turns; the second finds the first one's result. Raises ``UserError`` for bad
    input, options or tokenizer, and for sources that give no tokens.
    """
    started = time.perf_counter()
    out = Path(out)
    _refuse_foreign(out)
    plan = plan_preparation(
        sources,
        tokenizer=tokenizer,
        text_field=text_field,
        document_separator=document_separator,
        add_bos=add_bos,
        validation_split=validation_split,
        on_bad_input=on_bad_input,
        progress=progress,
    )
    return run_preparation(plan, out, progress=progress, started=started)


# ---------------------------------------------------------------------------------------------------------------- plan


def plan_preparation(
    sources: Sequence[str | Path] | str | Path,
    *,
    tokenizer: Any,
    text_field: str = "text",
    document_separator: str | None = None,
    add_bos: bool | None = None,
    validation_split: float = 0.01,
    on_bad_input: str = "error",
    progress: Report | None = None,
) -> Plan:
    """Reads and hashes the inputs of a preparation, so that its fingerprint is known; writes nothing."""
    if not 0 <= validation_split < 1:
        raise UserError(
            f"a validation split of {validation_split} makes no sense",
            "Give a share of the documents of at least 0 (nothing held out) and below 1, such as 0.01.",
        )
    read = ReadOptions(text_field, document_separator, on_bad_input)
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    check_special_tokens(tokenizer)
    if add_bos and tokenizer.bos_token_id is None:
        raise UserError("BOS is asked for, but the tokenizer has no BOS token", "Leave out --add-bos.")
    tokenizer_entry = {
        "fingerprint": tokenizer_fingerprint(tokenizer),
        "vocab_size": largest_possible_id(tokenizer) + 1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "add_bos": adds_bos(tokenizer) if add_bos is None else add_bos,
    }
    listed = [sources] if isinstance(sources, str | Path) else sources
    files, aside = list_files(listed, is_dataset=is_dataset)
    modified = tuple(_modified(file.path) for file in files)
    inputs = tuple(_hash_files(files, sum(size for size, _ in modified), progress))
    options = {
        "text_field": text_field,
        "document_separator": document_separator,
        "on_bad_input": on_bad_input,
        "validation_split": float(validation_split),
    }
    key = {
        "format_version": FORMAT_VERSION,
        "inputs": inputs,
        "options": options,
        "tokenizer": {name: tokenizer_entry[name] for name in ("fingerprint", "add_bos")},
    }
    return Plan(
        files=tuple(files),
        inputs=inputs,
        modified=modified,
        aside={reason: count for reason, count in sorted(aside.items()) if count},
        read=read,
        tokenizer=tokenizer,
        tokenizer_entry=tokenizer_entry,
        options=options,
        fingerprint=xxhash.xxh3_128_hexdigest(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)),
    )


def _modified(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "Check the path and its permissions.") from error
    return stat.st_size, stat.st_mtime_ns


def _hash_files(files: list[SourceFile], total: int, progress: Report | None) -> Iterator[dict[str, Any]]:
    started, done = time.perf_counter(), 0
    for file in files:
        digest, size = xxhash.xxh3_128(), 0
        try:
            with file.path.open("rb", buffering=0) as raw:
                while data := raw.read(1 << 22):
                    digest.update(data)
                    size += len(data)
                    if progress is not None:
                        progress(Progress("hashing", done + size, total, 0, 0, time.perf_counter() - started))
        except OSError as error:
            raise UserError(f"{file.path}: {error.strerror}", "Check its permissions, or leave it out.") from error
        done += size
        yield {"name": file.name, "bytes": size, "xxh3": digest.hexdigest()}


# ----------------------------------------------------------------------------------------------------------------- run


def run_preparation(
    plan: Plan, out: Path, *, progress: Report | None = None, started: float | None = None
) -> PrepareResult:
    """Makes the dataset of a plan in ``out``, or finds it there; ``started`` is when its clock began."""
    started = time.perf_counter() if started is None else started

    def say(stage: str, bytes_done: int = 0, documents: int = 0, tokens: int = 0) -> None:
        if progress is not None:
            progress(Progress(stage, bytes_done, plan.input_bytes, documents, tokens, time.perf_counter() - started))

    def wait() -> None:
        logger.warning("another preparation into %s is running; this one waits for it", out)
        say("waiting")

    out.parent.mkdir(parents=True, exist_ok=True)
    with _turn(out, wait):
        partial, old = (out.with_name(f".{out.name}.{state}") for state in ("partial", "old"))
        _finish_interrupted_swap(out, partial, old)
        _refuse_foreign(out)
        manifest = _cached(out, plan.fingerprint)
        if manifest is not None:
            return _result(out, manifest, cache_hit=True, seconds=time.perf_counter() - started)
        try:
            manifest = _build(plan, partial, say)
            _swap_in(out, partial, old)
        except OSError as error:  # of reading, a UserError comes
            raise UserError(
                f"{out} can't be written: {error}", "See to the space and the permissions there.", exit_code=1
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return _result(out, manifest, cache_hit=False, seconds=time.perf_counter() - started)


def _result(out: Path, manifest: dict[str, Any], *, cache_hit: bool, seconds: float) -> PrepareResult:
    splits = manifest["splits"]
    text_bytes = sum(split["text_bytes"] for split in splits.values())
    return PrepareResult(
        path=out,
        fingerprint=manifest["fingerprint"],
        cache_hit=cache_hit,
        documents=sum(split["documents"] for split in splits.values()),
        validation_documents=splits["validation"]["documents"] if "validation" in splits else 0,
        tokens=sum(split["tokens"] for split in splits.values()),
        text_bytes=text_bytes,
        skipped=sum(manifest["skipped"].values()),
        skipped_reasons=manifest["skipped"],
        replaced=manifest["replaced"],
        engine=manifest["engine"],
        share_compared=manifest["share_compared"],
        add_bos=manifest["tokenizer"]["add_bos"],
        seconds=seconds,
        mb_per_s=0.0 if cache_hit else text_bytes / 1e6 / seconds,
    )


def _cached(out: Path, fingerprint: str) -> dict[str, Any] | None:
    manifest = read_manifest(out)
    if manifest is None or manifest["fingerprint"] != fingerprint:
        return None
    try:
        check_files(out, manifest)
    except UserError as error:
        logger.warning("preparing again: %s", error.problem)
        return None
    return manifest


def _refuse_foreign(out: Path) -> None:
    """Nothing is ever overwritten but a dataset of ours that holds nothing else."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file", "Name a folder for the dataset.")
    names = {path.name for path in out.iterdir()}
    manifest = read_manifest(out)
    foreign = sorted(names if manifest is None else names - known_files(manifest))
    if foreign:
        what = "is no dataset but holds" if manifest is None else "is a dataset but also holds"
        raise UserError(f"{out} {what} {', '.join(foreign[:5])}", "Name a new folder, or move these away.")


@contextmanager
def _turn(out: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Holds the right to write ``out``; calls ``wait`` before waiting for another process that holds it.

    The lock dies with its process. Its file is removed at the end, so whoever gets it must see that it is still there.
    """
    path = out.with_name(f".{out.name}.lock")
    waited = False
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waited:
                    waited = True
                    wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def _finish_interrupted_swap(out: Path, partial: Path, old: Path) -> None:
    """Ends what a killed process began. The lock is held, so what lies beside ``out`` belongs to nobody alive."""
    if not out.exists():
        if old.exists() and is_dataset(partial):  # killed between the two renames: the new one is complete
            partial.rename(out)
        elif old.exists():
            old.rename(out)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _swap_in(out: Path, partial: Path, old: Path) -> None:
    if out.exists():
        out.rename(old)
    partial.rename(out)
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------- build


@dataclass
class _Build:
    """One pass over the sources."""

    plan: Plan
    log: ReadLog = field(default_factory=ReadLog)
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SPLITS, 0))
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SPLITS, 0))
    tokens: int = 0
    largest_id: int = 0
    lowest: tuple[int, int] = (1 << 64, 0)  # (hash, place) of the document with the smallest hash
    highest: tuple[int, int] = (-1, 0)

    @property
    def accepted(self) -> int:
        return sum(self.documents.values())


@dataclass(frozen=True)
class _Batch:
    """Documents that are encoded at once. sizes_bytes: UTF-8; hashes: xxh3_64 of the UTF-8 text, uint64."""

    documents: list[Document]
    sizes_bytes: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]


Say = Callable[[str, int, int, int], None]


def _build(plan: Plan, folder: Path, say: Say) -> dict[str, Any]:
    """Builds the whole dataset in ``folder`` and returns its manifest.

    Passes are repeated from the start, rarely: when gigatoken turns out to differ, and when the content hash leaves a
    split of a small dataset empty, which shows only at the end.
    """
    engine, difference = "auto", ""
    moved: dict[int, bool] = {}  # place of a document → whether it is held out, against its hash
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        encoder = Encoder(plan.tokenizer, engine=engine)
        if encoder.engine != "gigatoken" and engine == "auto":
            logger.warning("encoding with tokenizers, which is slower: %s", encoder.reason)
        try:
            build, entries = _pass(plan, folder, encoder, moved, say)
        except EngineMismatch as error:
            logger.warning("%s; preparing again from the start with tokenizers", error)
            engine, difference = "tokenizers", str(error)
            continue
        if not build.accepted:
            raise _nothing(plan, build.log)
        if not build.documents["train"]:
            moved = {build.highest[1]: False}
        elif plan.options["validation_split"] and not build.documents["validation"] and build.accepted > 1:
            moved = {build.lowest[1]: True}
        else:
            break
    _refuse_changed(plan)
    manifest = {
        "format_version": FORMAT_VERSION,
        "fingerprint": plan.fingerprint,
        "arriero": __version__,
        "tokenizer": plan.tokenizer_entry,
        "inputs": plan.inputs,
        "left_aside": plan.aside,
        "options": plan.options,
        "dtype": token_dtype(plan.tokenizer_entry["vocab_size"] - 1).name,
        "largest_id": build.largest_id,
        "splits": {name: entry for name, entry in entries["splits"].items() if entry["documents"]},
        "tables": entries["tables"],
        "engine": encoder.engine,
        "engine_reason": difference or encoder.reason,
        "share_compared": round(encoder.share_compared, 6),
        "skipped": dict(sorted(build.log.skipped.items())),
        "replaced": build.log.replaced,
        "examples": build.log.examples,
    }
    say("writing", plan.input_bytes, build.accepted, build.tokens)
    write_manifest(folder, manifest)
    return manifest


def _pass(
    plan: Plan, folder: Path, encoder: Encoder, moved: dict[int, bool], say: Say
) -> tuple[_Build, dict[str, Any]]:
    build = _Build(plan)
    dtype = token_dtype(plan.tokenizer_entry["vocab_size"] - 1)
    limit = np.uint64(hash_limit(plan.options["validation_split"]))
    bos = plan.tokenizer_entry["bos_token_id"] if plan.add_bos else None
    eos = plan.tokenizer_entry["eos_token_id"]
    with ExitStack() as stack:
        writers = {name: stack.enter_context(ShardWriter(folder, name, dtype)) for name in _SPLITS}
        table = stack.enter_context(_table(folder / _TABLE))
        for batch in _batches(read_documents(plan.files, plan.read, build.log)):
            texts = [document.text for document in batch.documents]
            ids, lengths = encoder.encode(texts, batch.sizes_bytes.tolist())
            batch, lengths = _drop_tokenless(batch, lengths, build.log)
            if not len(lengths):
                continue
            ids, lengths = frame(ids, lengths, bos, eos, dtype)
            held_out = batch.hashes < limit
            for place, is_held_out in moved.items():
                if 0 <= place - build.accepted < len(held_out):
                    held_out[place - build.accepted] = is_held_out
            _count(build, batch, ids)
            _write(build, batch, ids, lengths, held_out, writers, table)
            say("encoding", build.log.bytes_read(), build.accepted, build.tokens)
        say("writing", plan.input_bytes, build.accepted, build.tokens)
        splits = {name: split_entry(writer.close(), build.text_bytes[name]) for name, writer in writers.items()}
    return build, {"splits": splits, "tables": [_table_entry(folder / _TABLE)]}


def _batches(documents: Iterable[Document]) -> Iterator[_Batch]:
    """Batches of about ``_BATCH_BYTES`` of text, at least one document each."""
    batch: list[Document] = []
    sizes: list[int] = []
    hashes: list[int] = []
    total = 0
    for document in documents:
        data = document.text.encode()
        batch.append(document)
        sizes.append(len(data))
        hashes.append(xxhash.xxh3_64_intdigest(data))
        total += len(data)
        if total >= _BATCH_BYTES:
            yield _Batch(batch, np.array(sizes, dtype=np.int64), np.array(hashes, dtype=np.uint64))
            batch, sizes, hashes, total = [], [], [], 0
    if batch:
        yield _Batch(batch, np.array(sizes, dtype=np.int64), np.array(hashes, dtype=np.uint64))


def _drop_tokenless(
    batch: _Batch, lengths: npt.NDArray[np.int64], log: ReadLog
) -> tuple[_Batch, npt.NDArray[np.int64]]:
    """A normalizer may leave nothing of a text; a document of an EOS alone would teach nothing."""
    if lengths.all():
        return batch, lengths
    kept = lengths > 0
    for place in np.flatnonzero(~kept).tolist():
        document = batch.documents[place]
        log.skip("no tokens", f"{document.file} row {document.row}")
    documents = [document for document, keep in zip(batch.documents, kept.tolist(), strict=True) if keep]
    return _Batch(documents, batch.sizes_bytes[kept], batch.hashes[kept]), lengths[kept]


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


def _count(build: _Build, batch: _Batch, ids: npt.NDArray[Any]) -> None:
    build.tokens += len(ids)
    build.largest_id = max(build.largest_id, int(ids.max()))
    low, high = int(np.argmin(batch.hashes)), int(np.argmax(batch.hashes))
    build.lowest = min(build.lowest, (int(batch.hashes[low]), build.accepted + low))
    build.highest = max(build.highest, (int(batch.hashes[high]), build.accepted + high))


def _write(
    build: _Build,
    batch: _Batch,
    ids: npt.NDArray[Any],
    lengths: npt.NDArray[np.int64],
    held_out: npt.NDArray[np.bool_],
    writers: dict[str, ShardWriter],
    table: _Table,
) -> None:
    index = np.empty(len(lengths), dtype=np.int64)  # of each document within its split
    token_held_out = np.repeat(held_out, lengths) if held_out.any() else None
    for name, wanted in zip(_SPLITS, (~held_out, held_out), strict=True):
        count = int(wanted.sum())
        if not count:
            continue
        if token_held_out is None:
            chosen = ids
        else:
            chosen = ids[token_held_out if name == "validation" else ~token_held_out]
        writers[name].add(chosen, lengths[wanted])
        index[wanted] = build.documents[name] + np.arange(count)
        build.documents[name] += count
        build.text_bytes[name] += int(batch.sizes_bytes[wanted].sum())
    table.add(batch, held_out, index)


# ------------------------------------------------------------------------------------------------------ document table


class _Table:
    """``documents-00000.parquet``: where each document came from, a row for each in the order of the sources."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._columns: dict[str, list[Any]] = {name: [] for name in writer.schema.names}

    def add(self, batch: _Batch, held_out: npt.NDArray[np.bool_], index: npt.NDArray[np.int64]) -> None:
        self._columns["split"] += [_SPLITS[number] for number in held_out.tolist()]
        self._columns["index"] += index.tolist()
        self._columns["file"] += [document.file for document in batch.documents]
        self._columns["row"] += [document.row for document in batch.documents]
        self._columns["text_bytes"] += batch.sizes_bytes.tolist()
        self._columns["xxh3"] += batch.hashes.tolist()
        if len(self._columns["row"]) >= _TABLE_ROWS:
            self.flush()

    def flush(self) -> None:
        import pyarrow as pa

        if self._columns["row"]:
            self._writer.write_table(pa.table(self._columns, schema=self._writer.schema))
            self._columns = {name: [] for name in self._columns}


@contextmanager
def _table(path: Path) -> Iterator[_Table]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = pa.dictionary(pa.int32(), pa.string())
    columns = [("split", names), ("index", pa.int64()), ("file", names), ("row", pa.int64())]
    columns += [("text_bytes", pa.int64()), ("xxh3", pa.uint64())]
    with pq.ParquetWriter(path, pa.schema(columns), compression="zstd") as writer:
        table = _Table(writer)
        yield table
        table.flush()


def _table_entry(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while data := file.read(1 << 22):
            digest.update(data)
    return {"name": path.name, "bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


# -------------------------------------------------------------------------------------------------------------- errors


def _nothing(plan: Plan, log: ReadLog) -> UserError:
    names = [str(file.path) for file in plan.files]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    reasons = ", ".join(f"{count} × {reason}" for reason, count in log.skipped.items()) or "no documents"
    if log.fields and not plan.read.text_field in log.fields:
        return UserError(
            f"0 tokens in {shown}: {reasons}; the fields are {', '.join(list(log.fields)[:20])}",
            "Name the field that holds the text with --text-field.",
        )
    return UserError(f"0 tokens in {shown}: {reasons}", "Name sources that hold text.")


def _refuse_changed(plan: Plan) -> None:
    for file, before in zip(plan.files, plan.modified, strict=True):
        if _modified(file.path) != before:
            raise UserError(
                f"{file.path} was changed while it was prepared", "Prepare again when it is complete.", exit_code=1
            )
