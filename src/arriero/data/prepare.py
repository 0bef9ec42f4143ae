"""Text to a packed dataset: hashed inputs, one fingerprint, shards built aside and swapped in when they are complete.

read documents → encode in batches → BOS and EOS → hold out by content hash → shards, document table, manifest

The same inputs and options are a cache hit that touches nothing. A dataset is complete or absent. What is built aside
is synced in parts of ``_PART_BYTES`` of text; killed at any moment, the same command goes on after the last part that was
finished and gives the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self

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
    token_dtype,
    write_manifest,
    write_whole,
)
from arriero.data.sources import (
    Document,
    Place,
    ReadLog,
    ReadOptions,
    SourceFile,
    check_readable,
    list_files,
    read_documents,
)
from arriero.data.tokenizer import (
    Encoder,
    EngineMismatch,
    adds_bos,
    check_special_tokens,
    largest_possible_id,
    load_tokenizer,
    tokenizer_fingerprint,
)
from arriero.disk import hash_file, sync_folder
from arriero.errors import UserError

logger = logging.getLogger(__name__)

# gigatoken uses about 3.3 bytes of memory per byte of input, and gains nothing from batches beyond this.
_BATCH_BYTES = 8 << 20
# Work that a kill can cost: 1 s with gigatoken, half a minute at the 4 MB/s of `tokenizers`. Syncing is 0.2 s of it.
_PART_BYTES = 128 << 20
_TABLE_ROWS = 1 << 16  # documents per row group of the table: 2 MB of memory while they gather
TABLE = "documents-00000.parquet"
SKIPPED = "skipped-00000.jsonl"
ROWS, _PARTS = "documents.rows", "parts.json"  # of a dataset that is being built
SPLITS = ("train", "validation")


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
    unreadable: tuple[SourceFile, ...]  # which the policy allows to leave out
    inputs: tuple[dict[str, Any], ...]  # name, bytes, xxh3 of each file; a file that can't be read has no xxh3
    modified: tuple[tuple[int, int], ...]  # size and mtime of each when it was hashed
    aside: dict[str, int]
    read: ReadOptions
    tokenizer: Any
    tokenizer_entry: dict[str, Any]
    options: dict[str, Any]
    fingerprint: str
    verify: bool = False

    @property
    def add_bos(self) -> bool:
        return bool(self.tokenizer_entry["add_bos"])

    @property
    def input_bytes(self) -> int:
        return sum(entry.get("stop", entry["bytes"]) - entry.get("start", 0) for entry in self.inputs)


Report = Callable[[Progress], None]
Say = Callable[[str, int, int, int], None]  # stage, bytes of the source files done, documents, tokens
Build = Callable[
    [Plan, Path, Say], tuple[dict[str, Any], int]
]  # fills a folder; its manifest, bytes of text found there


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
    verify: bool = False,
    progress: Report | None = None,
) -> PrepareResult:
    """Prepares text for training and returns what came of it.

    sources: files, folders and globs (see ``arriero.data.sources`` for the formats). tokenizer: a Hugging Face folder or
    a tokenizer object. out: the dataset's folder; one that holds something else than a dataset is refused, another
    dataset is replaced when the new one is complete. Each document gets exactly one EOS at its end and, with
    ``add_bos``, exactly one BOS in front (None: as the tokenizer itself does for a text). validation_split: the share of
    documents to hold out by the hash of their text, 0 for none. on_bad_input: error, skip or replace. verify: compare
    everything that gigatoken encodes with ``tokenizers``, at the speed of that; a dataset that is there already, but was
    not compared in full, is prepared again.

    Two preparations into one folder take turns; the second finds the first one's result. Raises ``UserError`` for bad
    input, options or tokenizer, and for sources that give no tokens.
    """
    started = time.perf_counter()
    out = Path(out)
    refuse_foreign(out)
    plan = plan_preparation(
        sources,
        tokenizer=tokenizer,
        text_field=text_field,
        document_separator=document_separator,
        add_bos=add_bos,
        validation_split=validation_split,
        on_bad_input=on_bad_input,
        verify=verify,
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
    verify: bool = False,
    progress: Report | None = None,
) -> Plan:
    """Reads and hashes the inputs of a preparation, so that its fingerprint is known; writes nothing."""
    listed = list_preparation(
        sources,
        tokenizer=tokenizer,
        text_field=text_field,
        document_separator=document_separator,
        add_bos=add_bos,
        validation_split=validation_split,
        on_bad_input=on_bad_input,
        verify=verify,
    )
    return hash_inputs(listed, progress)


def list_preparation(
    sources: Sequence[str | Path] | str | Path,
    *,
    tokenizer: Any,
    text_field: str = "text",
    document_separator: str | None = None,
    add_bos: bool | None = None,
    validation_split: float = 0.01,
    on_bad_input: str = "error",
    verify: bool = False,
) -> Plan:
    """A plan that knows the names and sizes of its inputs but hasn't read them; its fingerprint is over these."""
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
    files, unreadable = _readable(files, on_bad_input)
    modified = tuple(_modified(file.path) for file in files)
    options = {
        "text_field": text_field,
        "document_separator": document_separator,
        "on_bad_input": on_bad_input,
        "validation_split": float(validation_split),
    }
    plan = Plan(
        files=tuple(files),
        unreadable=tuple(unreadable),
        inputs=(),
        modified=modified,
        aside={reason: count for reason, count in sorted(aside.items()) if count},
        read=read,
        tokenizer=tokenizer,
        tokenizer_entry=tokenizer_entry,
        options=options,
        fingerprint="",
        verify=verify,
    )
    sizes = [{"name": file.name, "bytes": size} for file, (size, _) in zip(files, modified, strict=True)]
    return with_inputs(plan, sizes)


def hash_inputs(listed: Plan, progress: Report | None = None) -> Plan:
    """The plan with all its files hashed and the fingerprint of its result."""
    total = sum(size for size, _ in listed.modified)
    return with_inputs(listed, list(_hash_files(listed.files, total, progress)))


def with_inputs(plan: Plan, inputs: Sequence[dict[str, Any]]) -> Plan:
    """The plan with what is known of its readable files, and the fingerprint that follows."""
    inputs = (*inputs, *({"name": file.name, "bytes": 0, "xxh3": None} for file in plan.unreadable))
    key = {
        "format_version": FORMAT_VERSION,
        "inputs": inputs,
        "options": plan.options,
        "tokenizer": {name: plan.tokenizer_entry[name] for name in ("fingerprint", "add_bos")},
    }
    fingerprint = xxhash.xxh3_128_hexdigest(orjson.dumps(key, option=orjson.OPT_SORT_KEYS))
    return replace(plan, inputs=inputs, fingerprint=fingerprint)


def _readable(files: list[SourceFile], on_bad_input: str) -> tuple[list[SourceFile], list[SourceFile]]:
    """The files that can be read and those that can't; raises for the first of these under the policy ``error``."""
    readable, unreadable = [], []
    for file in files:
        try:
            check_readable(file.path)
        except OSError as error:
            if on_bad_input == "error":
                raise UserError(
                    f"{file.path}: {error.strerror}",
                    "Check the path and its permissions, or leave it out with --on-bad-input skip.",
                ) from error
            unreadable.append(file)
        else:
            readable.append(file)
    return readable, unreadable


def _modified(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "Check the path and its permissions.") from error
    return stat.st_size, stat.st_mtime_ns


def _hash_files(files: Sequence[SourceFile], total: int, progress: Report | None) -> Iterator[dict[str, Any]]:
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
        part = {} if file.stop is None else {"start": file.start, "stop": file.stop}
        yield {"name": file.name, "bytes": size, "xxh3": digest.hexdigest(), **part}


# ----------------------------------------------------------------------------------------------------------------- run


def run_preparation(
    plan: Plan, out: Path, *, progress: Report | None = None, started: float | None = None, build: Build | None = None
) -> PrepareResult:
    """Makes the dataset of a plan in ``out``, or finds it there; ``started`` is when its clock began, ``build`` how it is
    made where not by encoding the plan's files."""
    started = time.perf_counter() if started is None else started
    build = _build if build is None else build
    say = sayer(plan, progress, started)
    out.parent.mkdir(parents=True, exist_ok=True)
    with turn(out, say):
        partial, old = (out.with_name(f".{out.name}.{state}") for state in ("partial", "old"))
        _finish_interrupted_swap(out, partial, old)
        refuse_foreign(out)
        manifest = _cached(out, plan)
        if manifest is not None:
            shutil.rmtree(partial, ignore_errors=True)
            return result_of(out, manifest, cache_hit=True, seconds=time.perf_counter() - started)
        try:
            manifest = _cached(partial, plan)  # killed when only the swap was left
            if manifest is not None:
                found = sum(split["text_bytes"] for split in manifest["splits"].values())
            else:
                manifest, found = build(plan, partial, say)
            tidy(partial, known_files(manifest))
            _swap_in(out, partial, old)
        except Exception as error:  # but an interrupt leaves what is finished, for the next time
            shutil.rmtree(partial, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise UserError(  # of reading, a UserError comes
                f"{out} can't be written: {error}", "See to the space and the permissions there.", exit_code=1
            ) from error
    return result_of(out, manifest, cache_hit=False, seconds=time.perf_counter() - started, found=found)


def sayer(plan: Plan, progress: Report | None, started: float) -> Say:
    """Reports the progress of a plan to ``progress``."""

    def say(stage: str, bytes_done: int = 0, documents: int = 0, tokens: int = 0) -> None:
        if progress is not None:
            progress(Progress(stage, bytes_done, plan.input_bytes, documents, tokens, time.perf_counter() - started))

    return say


def result_of(out: Path, manifest: dict[str, Any], *, cache_hit: bool, seconds: float, found: int = 0) -> PrepareResult:
    """What is told of a finished dataset; ``found``: bytes of text that an interrupted run had prepared."""
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
        mb_per_s=0.0 if cache_hit else (text_bytes - found) / 1e6 / seconds,
    )


def _cached(out: Path, plan: Plan) -> dict[str, Any] | None:
    manifest = read_manifest(out)
    if manifest is None or manifest["fingerprint"] != plan.fingerprint:
        return None
    if plan.verify and manifest["share_compared"] < 1:
        logger.warning("preparing again: only %.1f%% of the text was compared", 100 * manifest["share_compared"])
        return None
    try:
        check_files(out, manifest)
    except UserError as error:
        logger.warning("preparing again: %s", error.problem)
        return None
    return manifest


def refuse_foreign(out: Path) -> None:
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
def turn(out: Path, say: Say) -> Iterator[None]:
    """Holds the right to write ``out``, after waiting, which is said, for another process that holds it.

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
                    logger.warning("another preparation into %s is running; this one waits for it", out)
                    say("waiting", 0, 0, 0)
                fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def _finish_interrupted_swap(out: Path, partial: Path, old: Path) -> None:
    """Ends a swap that a killed process began. The lock is held: what lies beside ``out`` belongs to nobody alive."""
    if not out.exists():
        if old.exists() and is_dataset(partial):  # killed between the two renames: the new one is complete
            partial.rename(out)
        elif old.exists():
            old.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def tidy(folder: Path, known: set[str]) -> None:
    """Removes what was needed to build a dataset, which is complete without."""
    for path in folder.iterdir():
        if path.name not in known:
            path.unlink()


def _swap_in(out: Path, partial: Path, old: Path) -> None:
    if out.exists():
        out.rename(old)
    partial.rename(out)
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------- build


@dataclass
class Pass:
    """One pass over the sources."""

    plan: Plan
    log: ReadLog = field(default_factory=ReadLog)
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    tokens: int = 0
    largest_id: int = 0
    lowest: tuple[int, int] = (1 << 64, 0)  # (hash, place) of the document with the smallest hash
    highest: tuple[int, int] = (-1, 0)
    place: Place = field(default_factory=Place)  # of the last document that was read
    part_bytes: int = 0  # of text since the last part was finished

    @property
    def accepted(self) -> int:
        return sum(self.documents.values())


@dataclass(frozen=True)
class _Batch:
    """Documents that are encoded at once. sizes_bytes: UTF-8; hashes: xxh3_64 of the UTF-8 text, uint64."""

    documents: list[Document]
    sizes_bytes: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]


@dataclass
class Course:
    """What a build has found out that makes it start again, rarely: gigatoken differs; a split would be empty."""

    engine: str = "auto"
    difference: str = ""
    moved: dict[int, bool] = field(default_factory=dict)  # place of a document → held out or not, against its hash


class _NoWayOn(Exception):
    """What an interrupted build left is not what it says."""


@dataclass(frozen=True)
class Encoded:
    """What ``encode_all`` left in its folder: the shards by split, the rows of the table and the list of what was skipped.

    found_bytes: of text that an interrupted run had prepared.
    """

    build: Pass
    splits: dict[str, dict[str, Any]]
    encoder: Encoder
    course: Course
    found_bytes: int

    @property
    def reason(self) -> str:
        """Why not gigatoken, empty where it was."""
        return self.course.difference or self.encoder.reason


def _build(plan: Plan, folder: Path, say: Say) -> tuple[dict[str, Any], int]:
    """Builds the whole dataset in ``folder``, or goes on where an interrupted build of the same stopped; returns its
    manifest and the bytes of text that were found there.

    Where the content hash leaves a split of a small dataset empty, which shows only at the end, it is built once more.
    """
    course, part = interrupted(plan, folder)
    while True:
        made = encode_all(plan, folder, course, part, say)
        if not made.build.accepted:
            raise nothing_found(plan, made.build.log)
        moved = moved_across(plan, made.build)
        if made.course.moved or not moved:
            break
        course, part = replace(made.course, moved=moved), None
    refuse_changed(plan)
    engine = made.encoder.engine, made.reason, made.encoder.share_compared
    manifest = finish(plan, folder, made.build, made.splits, engine)
    say("writing", plan.input_bytes, made.build.accepted, made.build.tokens)
    return manifest, made.found_bytes


def encode_all(plan: Plan, folder: Path, course: Course, part: dict[str, Any] | None, say: Say) -> Encoded:
    """Encodes all files of the plan into ``folder``, or those behind a finished part; from the start again, rarely, when
    gigatoken turns out to differ."""
    while True:
        if part is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _note_part(plan, folder, course, None)
        found = sum(part["text_bytes"].values()) if part else 0
        encoder = Encoder(plan.tokenizer, engine=course.engine, compare_all=plan.verify)
        if encoder.engine != "gigatoken" and course.engine == "auto":
            logger.warning("encoding with tokenizers, which is slower: %s", encoder.reason)
        try:
            build, splits = _pass(plan, folder, encoder, course, part, say)
        except _NoWayOn as error:
            logger.warning("preparing from the start again: %s", error)
            part = None
        except EngineMismatch as error:
            logger.warning("%s; preparing again from the start with tokenizers", error)
            course, part = Course("tokenizers", str(error)), None
        else:
            return Encoded(build, splits, encoder, course, found)


def moved_across(plan: Plan, build: Pass) -> dict[int, bool]:
    """The place of the document that goes, against its hash, where a split would be empty; True into ``validation``."""
    limit = hash_limit(plan.options["validation_split"])
    if build.highest[0] < limit:
        return {build.highest[1]: False}
    if limit and build.lowest[0] >= limit and build.accepted > 1:
        return {build.lowest[1]: True}
    return {}


def finish(
    plan: Plan, folder: Path, build: Pass, splits: dict[str, dict[str, Any]], engine: tuple[str, str, float]
) -> dict[str, Any]:
    """Writes the table and then the manifest, which makes ``folder`` a dataset, and returns it.

    engine: its name, why not gigatoken, and the share of the text that was compared.
    """
    save_table(folder / ROWS, folder / TABLE, [file.name for file in plan.files])
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
        "splits": {name: entry for name, entry in splits.items() if entry["documents"]},
        "tables": [file_entry(folder / TABLE)],
        "engine": engine[0],
        "engine_reason": engine[1],
        "share_compared": round(engine[2], 6),
        "skipped": dict(sorted(build.log.skipped.items())),
        "replaced": build.log.replaced,
        "examples": build.log.examples,
        "lists": [file_entry(folder / SKIPPED)] if (folder / SKIPPED).stat().st_size else [],
    }
    write_manifest(folder, manifest)
    return manifest


def _pass(
    plan: Plan, folder: Path, encoder: Encoder, course: Course, part: dict[str, Any] | None, say: Say
) -> tuple[Pass, dict[str, Any]]:
    build = Pass(plan)
    dtype = token_dtype(plan.tokenizer_entry["vocab_size"] - 1)
    bos = plan.tokenizer_entry["bos_token_id"] if plan.add_bos else None
    eos = plan.tokenizer_entry["eos_token_id"]
    numbers = {file.name: number for number, file in enumerate(plan.files)}
    with ExitStack() as stack:
        writers = {name: stack.enter_context(ShardWriter(folder, name, dtype, keep_spools=True)) for name in SPLITS}
        table = stack.enter_context(RowFile(folder / ROWS))
        skipped = stack.enter_context(_open_cut(folder / SKIPPED, part["skipped_bytes"] if part else 0))
        build.log.each = lambda entry: _append_line(skipped, entry)
        if part is not None:
            _restore(part, build, encoder, writers, table)
            logger.warning("going on after %d documents that an interrupted preparation made", build.accepted)
        else:
            for file in plan.unreadable:
                build.log.skip("unreadable file", str(file.path))
        for batch in _batches(read_documents(plan.files, plan.read, build.log, after=build.place)):
            last = batch.documents[-1]
            build.place = Place(numbers[last.file], last.row)
            build.part_bytes += int(batch.sizes_bytes.sum())
            texts = [document.text for document in batch.documents]
            ids, lengths = encoder.encode(texts, batch.sizes_bytes.tolist(), batch.hashes)
            batch, lengths = _drop_tokenless(batch, lengths, build.log)
            if len(lengths):
                ids, lengths = frame(ids, lengths, bos, eos, dtype)
                add_documents(build, _rows(batch, numbers), ids, lengths, course.moved, writers, table)
            if build.part_bytes >= _PART_BYTES:
                build.part_bytes = 0
                _note_part(plan, folder, course, _part(build, encoder, writers, table, skipped))
            say("encoding", build.log.bytes_read(), build.accepted, build.tokens)
        say("writing", plan.input_bytes, build.accepted, build.tokens)
        return build, {name: split_entry(writer.close(), build.text_bytes[name]) for name, writer in writers.items()}


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
        log.skip("no tokens", document.file, f"row {document.row}")
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


def add_documents(
    build: Pass,
    rows: npt.NDArray[Any],
    ids: npt.NDArray[Any],
    lengths: npt.NDArray[np.int64],
    moved: dict[int, bool],
    writers: dict[str, ShardWriter],
    table: RowFile,
) -> None:
    """Counts documents, chooses their splits and writes them.

    rows: the table's, split and index still open; ids: the framed documents back to back; lengths [n].
    """
    hashes, sizes_bytes = rows["xxh3"], rows["text_bytes"]
    held_out = hashes < np.uint64(hash_limit(build.plan.options["validation_split"]))
    for place, is_held_out in moved.items():
        if 0 <= place - build.accepted < len(held_out):
            held_out[place - build.accepted] = is_held_out
    build.tokens += len(ids)
    build.largest_id = max(build.largest_id, int(ids.max()))
    low, high = int(np.argmin(hashes)), int(np.argmax(hashes))  # of copies the first, however the batches fall
    if hashes[low] < build.lowest[0]:
        build.lowest = int(hashes[low]), build.accepted + low
    if hashes[high] > build.highest[0]:
        build.highest = int(hashes[high]), build.accepted + high
    token_held_out = np.repeat(held_out, lengths) if held_out.any() else None
    rows["split"] = held_out
    for name, wanted in zip(SPLITS, (~held_out, held_out), strict=True):
        count = int(wanted.sum())
        if not count:
            continue
        if token_held_out is None:
            chosen = ids
        else:
            chosen = ids[token_held_out if name == "validation" else ~token_held_out]
        writers[name].add(chosen, lengths[wanted])
        rows["index"][wanted] = build.documents[name] + np.arange(count)
        build.documents[name] += count
        build.text_bytes[name] += int(sizes_bytes[wanted].sum())
    table.add(rows)


# ---------------------------------------------------------------------------------------------------------------- parts


def interrupted(plan: Plan, folder: Path) -> tuple[Course, dict[str, Any] | None]:
    """What an interrupted build of the same plan has decided, and its last finished part, None where there is none."""
    with suppress(FileNotFoundError, ValueError, KeyError):
        noted = json.loads((folder / _PARTS).read_bytes())
        same = {"fingerprint": plan.fingerprint, "arriero": __version__, "verify": plan.verify}
        if all(noted[name] == value for name, value in same.items()):
            return Course(noted["engine"], noted["difference"], dict(noted["moved"])), noted["part"]
    return Course(), None


def _note_part(plan: Plan, folder: Path, course: Course, part: dict[str, Any] | None) -> None:
    noted = {
        "fingerprint": plan.fingerprint,
        "arriero": __version__,
        "verify": plan.verify,
        "engine": course.engine,
        "difference": course.difference,
        "moved": list(course.moved.items()),
        "part": part,
    }
    write_whole(folder / _PARTS, json.dumps(noted).encode())  # orjson stops at 64 bits, the random state has 128


def _part(
    build: Pass, encoder: Encoder, writers: dict[str, ShardWriter], table: RowFile, skipped: IO[bytes]
) -> dict[str, Any]:
    """Where a pass stands between two batches, everything before it synced to the disk."""
    skipped.flush()
    os.fsync(skipped.fileno())
    return {
        "place": build.place,
        "documents": build.documents,
        "text_bytes": build.text_bytes,
        "tokens": build.tokens,
        "largest_id": build.largest_id,
        "lowest": build.lowest,
        "highest": build.highest,
        "log": build.log.state(),
        "engine": encoder.engine,
        "encoder": encoder.state(),
        "writers": {name: writer.checkpoint() for name, writer in writers.items()},
        "table_rows": table.checkpoint(),
        "skipped_bytes": skipped.seek(0, os.SEEK_END),
    }


def _restore(
    part: dict[str, Any], build: Pass, encoder: Encoder, writers: dict[str, ShardWriter], table: RowFile
) -> None:
    if encoder.engine != part["engine"]:
        raise _NoWayOn(f"what is there was encoded by {part['engine']}, which can't be had now")
    try:
        for name, writer in writers.items():
            writer.restore(part["writers"][name])
        table.restore(part["table_rows"])
    except (OSError, ValueError) as error:
        raise _NoWayOn(str(error)) from error
    encoder.restore(part["encoder"])
    build.log.restore(part["log"])
    build.place = Place(*part["place"])
    build.documents, build.text_bytes = part["documents"], part["text_bytes"]
    build.tokens, build.largest_id = part["tokens"], part["largest_id"]
    (low, low_place), (high, high_place) = part["lowest"], part["highest"]
    build.lowest, build.highest = (low, low_place), (high, high_place)


def _open_cut(path: Path, size: int) -> IO[bytes]:
    """The list of what was skipped, opened to be appended to, without what came after ``size`` bytes."""
    file = path.open("a+b")
    if file.seek(0, os.SEEK_END) < size:
        file.close()
        raise _NoWayOn(f"{path} has less than {size} bytes")
    file.truncate(size)
    return file


def _append_line(file: IO[bytes], entry: dict[str, str]) -> None:
    # a name that is no UTF-8 has its bytes as lone surrogates, which json escapes and orjson refuses
    file.write(json.dumps(entry).encode() + b"\n")


# ------------------------------------------------------------------------------------------------------ document table


ROW = np.dtype(
    [("split", "u1"), ("index", "<i8"), ("file", "<i4"), ("row", "<i8"), ("text_bytes", "<i8"), ("xxh3", "<u8")]
)


def _rows(batch: _Batch, numbers: dict[str, int]) -> npt.NDArray[Any]:
    rows = np.zeros(len(batch.documents), dtype=ROW)
    rows["file"] = [numbers[document.file] for document in batch.documents]
    rows["row"] = [document.row for document in batch.documents]
    rows["text_bytes"] = batch.sizes_bytes
    rows["xxh3"] = batch.hashes
    return rows


class RowFile:
    """Where each document came from, a row for each in the order of the sources: gathered in a file of plain rows that
    can be cut where a part ends, and saved as parquet, which can't, when all are there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] = path.open("a+b")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, rows: npt.NDArray[Any]) -> None:
        self._file.write(rows.tobytes())

    def checkpoint(self) -> int:
        """Syncs the rows to the disk and counts them."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END) // ROW.itemsize

    def restore(self, rows: int) -> None:
        """Cuts off what came after ``rows``. Raises ``ValueError`` if there are fewer."""
        if self._file.seek(0, os.SEEK_END) < rows * ROW.itemsize:
            raise ValueError(f"{self._path} has less than {rows} rows")
        self._file.truncate(rows * ROW.itemsize)


def read_rows(path: Path) -> Iterator[npt.NDArray[Any]]:
    """The rows of a ``RowFile``, in pieces."""
    with path.open("rb") as file:
        while data := file.read(_TABLE_ROWS * ROW.itemsize):
            yield np.frombuffer(data, dtype=ROW)


def save_table(rows_file: Path, path: Path, names: list[str]) -> None:
    """Writes a ``RowFile`` as parquet; names: those of the files, by number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.dictionary(pa.int32(), pa.string())
    columns = [("split", texts), ("index", pa.int64()), ("file", texts), ("row", pa.int64())]
    columns += [("text_bytes", pa.int64()), ("xxh3", pa.uint64())]
    schema = pa.schema(columns)
    named = np.array(names, dtype=object)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows in read_rows(rows_file):
            used, files = np.unique(rows["file"], return_inverse=True)
            coded = {"split": (rows["split"], list(SPLITS)), "file": (files, named[used].tolist())}
            arrays = [
                pa.DictionaryArray.from_arrays(coded[name][0].astype("i4"), coded[name][1])
                if name in coded
                else pa.array(rows[name])
                for name in schema.names
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def file_entry(path: Path) -> dict[str, Any]:
    """Name, size and hash of a file, which is synced to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"name": path.name, "bytes": path.stat().st_size, "xxh3": hash_file(path)}


# -------------------------------------------------------------------------------------------------------------- errors


def nothing_found(plan: Plan, log: ReadLog) -> UserError:
    names = [str(file.path) for file in (*plan.files, *plan.unreadable)]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    reasons = ", ".join(f"{count} × {reason}" for reason, count in log.skipped.items()) or "no documents"
    if log.fields and not plan.read.text_field in log.fields:
        return UserError(
            f"0 tokens in {shown}: {reasons}; the fields are {', '.join(list(log.fields)[:20])}",
            "Name the field that holds the text with --text-field.",
        )
    return UserError(f"0 tokens in {shown}: {reasons}", "Name sources that hold text.")


def refuse_changed(plan: Plan) -> None:
    for file, before in zip(plan.files, plan.modified, strict=True):
        if _modified(file.path) != before:
            raise UserError(
                f"{file.path} was changed while it was prepared", "Prepare again when it is complete.", exit_code=1
            )
