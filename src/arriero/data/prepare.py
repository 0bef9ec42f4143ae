"""Text to a packed dataset: hashed inputs, one fingerprint, shards built aside and swapped in when they are complete.

read documents → encode in batches → BOS and EOS → hold out by content hash → shards, document table, manifest
       (a thread)        (a thread) └▶ proof against tokenizers (a thread), passed before a part or the whole is complete

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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from arriero.__version__ import __version__
from arriero.data.batches import encoded_batches
from arriero.data.hub import Unreachable
from arriero.data.parts import NoWayOn, Unfinished
from arriero.data.plan import Plan, Report, Say, hash_inputs, list_preparation, nothing_found, refuse_changed, sayer
from arriero.data.shards import (
    FORMAT_VERSION,
    check_files,
    hash_limit,
    is_dataset,
    known_files,
    read_manifest,
    token_dtype,
    write_manifest,
    write_whole,
)
from arriero.data.sources import ReadLog
from arriero.data.tokenizer import (
    Encoder,
    EngineMismatch,
    Proof,
)
from arriero.disk import sync_folder
from arriero.errors import UserError

logger = logging.getLogger(__name__)

# Work that a kill can cost: 1 s with gigatoken, half a minute at the 4 MB/s of `tokenizers`. Syncing is 0.2 s of it.
_PART_BYTES = 128 << 20
_PARTS = "parts.json"  # of a dataset that is being built

Build = Callable[
    [Plan, Path, Say], tuple[dict[str, Any], int]
]  # fills a folder; its manifest, bytes of text found there


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

    sources: files, folders, globs and datasets on the hub (see ``arriero.data.sources`` for the formats). tokenizer: a Hugging Face folder or
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
    return run_preparation(hash_inputs(listed, progress), out, progress=progress, started=started)


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
        except Unreachable:  # what is finished stays for the next time, as after an interrupt
            raise
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise UserError(  # of reading, a UserError comes
                f"{out} can't be written: {error}", "See to the space and the permissions there.", exit_code=1
            ) from error
    return result_of(out, manifest, cache_hit=False, seconds=time.perf_counter() - started, found=found)


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
class Course:
    """What a build has found out that makes it start again, rarely: gigatoken differs; a split would be empty."""

    engine: str = "auto"
    difference: str = ""
    moved: dict[int, bool] = field(default_factory=dict)  # place of a document → held out or not, against its hash


@dataclass(frozen=True)
class Made:
    """What ``encode_sources`` wrote. entries: the manifest's splits, tables and lists; found_bytes: of text that an
    interrupted run had prepared."""

    written: Unfinished
    entries: dict[str, Any]
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
        made = encode_sources(plan, folder, course, part, say, plan.expected_bytes)
        if not made.written.accepted:
            raise nothing_found(plan, made.written.log)
        moved = moved_across(plan, made.written.accepted, made.written.lowest, made.written.highest)
        if made.course.moved or not moved:
            break
        course, part = replace(made.course, moved=moved), None
    refuse_changed(plan)
    engine = made.encoder.engine, made.reason, made.encoder.share_compared
    manifest = complete(plan, folder, made.written, made.entries, engine)
    say("writing", plan.input_bytes, made.written.accepted, made.written.tokens)
    return manifest, made.found_bytes


def encode_sources(
    plan: Plan,
    folder: Path,
    course: Course,
    part: dict[str, Any] | None,
    say: Say,
    text_bytes: float,
    *,
    as_table: bool = True,
) -> Made:
    """Encodes all files of the plan into ``folder``, or what comes behind a finished part; from the start again, rarely,
    when gigatoken turns out to differ. text_bytes: see ``Encoder``; as_table: see ``Unfinished.finish``."""
    while True:
        if part is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _note_part(plan, folder, course, None)
        found = sum(part["text_bytes"].values()) if part else 0
        encoder = Encoder(plan.tokenizer, text_bytes=text_bytes, engine=course.engine, compare_all=plan.verify)
        if encoder.engine != "gigatoken" and course.engine == "auto":
            logger.warning("encoding with tokenizers, which is slower: %s", encoder.reason)
        try:
            written, entries = _pass(plan, folder, encoder, course, part, say, as_table)
        except NoWayOn as error:
            logger.warning("preparing from the start again: %s", error)
            part = None
        except EngineMismatch as error:
            logger.warning("%s; preparing again from the start with tokenizers", error)
            course, part = Course("tokenizers", str(error)), None
        else:
            return Made(written, entries, encoder, course, found)


def moved_across(plan: Plan, documents: int, lowest: tuple[int, int], highest: tuple[int, int]) -> dict[int, bool]:
    """The place of the document that goes, against its hash, where a split would be empty; True into ``validation``.

    lowest, highest: (hash, place) of the documents with the smallest and the largest hash.
    """
    limit = hash_limit(plan.options["validation_split"])
    if highest[0] < limit:
        return {highest[1]: False}
    if limit and lowest[0] >= limit and documents > 1:
        return {lowest[1]: True}
    return {}


def complete(
    plan: Plan, folder: Path, written: Unfinished, entries: dict[str, Any], engine: tuple[str, str, float]
) -> dict[str, Any]:
    """Writes the manifest, which makes ``folder`` a dataset, and returns it.

    engine: its name, why not gigatoken, and the share of the text that was compared.
    """
    manifest = {
        "format_version": FORMAT_VERSION,
        "fingerprint": plan.fingerprint,
        "arriero": __version__,
        "tokenizer": plan.tokenizer_entry,
        "inputs": plan.inputs,
        "left_aside": plan.aside,
        "options": plan.options,
        "dtype": token_dtype(plan.tokenizer_entry["vocab_size"] - 1).name,
        "largest_id": written.largest_id,
        "splits": entries["splits"],
        "tables": entries["tables"],
        "engine": engine[0],
        "engine_reason": engine[1],
        "share_compared": round(engine[2], 6),
        "skipped": dict(sorted(written.log.skipped.items())),
        "replaced": written.log.replaced,
        "examples": written.log.examples,
        "lists": entries["lists"],
    }
    write_manifest(folder, manifest)
    return manifest


def _pass(
    plan: Plan, folder: Path, encoder: Encoder, course: Course, part: dict[str, Any] | None, say: Say, as_table: bool
) -> tuple[Unfinished, dict[str, Any]]:
    """Reads, encodes and writes all that comes behind ``part``. A part, and the whole, ends only when its proofs have
    passed: what a killed process leaves as finished is proven."""
    reading = ReadLog()
    with ExitStack() as stack:
        building = stack.enter_context(begin(plan, folder, course.moved))
        if part is not None:
            _go_on(part, building, encoder)
        else:
            for file in plan.unreadable:
                building.log.skip("unreadable file", str(file.path))
        proofs = stack.enter_context(_Proofs())
        encoded = encoded_batches(plan.files, plan.read, reading, encoder, after=building.place)
        for batch in stack.enter_context(closing(encoded)):
            proofs.add(batch.proof, at_once=plan.verify)
            building.add(batch)
            if building.part_bytes >= _PART_BYTES:
                proofs.settle()
                _note_part(plan, folder, course, {"engine": encoder.engine, **building.part()})
            say("encoding", batch.batch.bytes_read, building.accepted, building.tokens)
        say("writing", plan.input_bytes, building.accepted, building.tokens)
        building.log.fields = reading.fields
        entries = building.finish(as_table=as_table)
        proofs.settle()
    return building, entries


def begin(plan: Plan, folder: Path, moved: dict[int, bool]) -> Unfinished:
    """The dataset of a plan, still empty."""
    return Unfinished(
        folder,
        [file.name for file in plan.files],
        dtype=token_dtype(plan.tokenizer_entry["vocab_size"] - 1),
        bos=plan.tokenizer_entry["bos_token_id"] if plan.add_bos else None,
        eos=plan.tokenizer_entry["eos_token_id"],
        held_out_below=hash_limit(plan.options["validation_split"]),
        moved=moved,
    )


def _go_on(part: dict[str, Any], building: Unfinished, encoder: Encoder) -> None:
    if encoder.engine != part["engine"]:
        raise NoWayOn(f"what is there was encoded by {part['engine']}, which can't be had now")
    building.restore(part)
    encoder.restore(part["encoder"])
    logger.warning("going on after %d documents that an interrupted preparation made", building.accepted)


class _Proofs:
    """Comparisons with `tokenizers` that run beside the encoding, in a thread of their own, without the interpreter's
    lock. Memory: a few hundred bytes of text per kilobyte between two calls of ``settle``, which ends every part."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="arriero-proof")
        self._open: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def add(self, proof: Proof | None, *, at_once: bool) -> None:
        """Raises ``EngineMismatch`` if this proof, where it is to be had at once, or one before it has failed."""
        while self._open and self._open[0].done():
            self._open.popleft().result()
        if proof is not None:
            self._open.append(self._thread.submit(proof))
        if at_once:
            self.settle()

    def settle(self) -> None:
        """Waits for every proof; raises ``EngineMismatch`` if one failed."""
        while self._open:
            self._open.popleft().result()


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
    write_whole(folder / _PARTS, json.dumps(noted).encode())  # orjson stops below 2^64, the smallest hash of nothing
