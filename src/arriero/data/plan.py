"""What a preparation is to do: files listed and hashed, options checked, and the fingerprint of what will come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import xxhash

from arriero.data.shards import FORMAT_VERSION, is_dataset
from arriero.data.sources import ReadLog, ReadOptions, SourceFile, check_readable, list_files
from arriero.data.tokenizer import (
    adds_bos,
    check_special_tokens,
    largest_possible_id,
    load_tokenizer,
    tokenizer_fingerprint,
)
from arriero.errors import UserError


@dataclass(frozen=True)
class Progress:
    """Where a preparation is. stage: hashing, waiting, encoding, merging or writing; bytes are those of the source files."""

    stage: str
    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int
    seconds: float


Report = Callable[[Progress], None]
Say = Callable[[str, int, int, int], None]  # stage, bytes of the source files done, documents, tokens


@dataclass(frozen=True)
class Plan:
    """What is to be prepared, with the fingerprint of its result; made by ``list_preparation`` and ``hash_inputs``."""

    files: tuple[SourceFile, ...]
    unreadable: tuple[SourceFile, ...]  # which the policy allows to leave out
    inputs: tuple[
        dict[str, Any], ...
    ]  # name, bytes, xxh3 of each file; none of one that can't be read or is on the hub
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
    def expected_bytes(self) -> float:
        """About how much text there is, infinite where a part of it is on the hub, which tells no size."""
        return float("inf") if any(file.hub is not None for file in self.files) else self.input_bytes

    @property
    def input_bytes(self) -> int:
        return sum(entry.get("stop", entry["bytes"]) - entry.get("start", 0) for entry in self.inputs)


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
    modified = tuple(_modified(file) for file in files)
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
    sizes = zip(files, modified, strict=True)
    return with_inputs(plan, [_on_hub(file) or {"name": file.name, "bytes": size} for file, (size, _) in sizes])


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
            if file.hub is None:
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


def _modified(file: SourceFile) -> tuple[int, int]:
    if file.hub is not None:  # fixed by its revision
        return 0, 0
    try:
        stat = file.path.stat()
    except OSError as error:
        raise UserError(f"{file.path}: {error.strerror}", "Check the path and its permissions.") from error
    return stat.st_size, stat.st_mtime_ns


def _hash_files(files: Sequence[SourceFile], total: int, progress: Report | None) -> Iterator[dict[str, Any]]:
    started, done = time.perf_counter(), 0
    for file in files:
        if entry := _on_hub(file):
            yield entry
            continue
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


def _on_hub(file: SourceFile) -> dict[str, Any] | None:
    """The entry of a dataset on the hub: its revision stands for its content."""
    return None if file.hub is None else {"name": file.name, "bytes": 0, "xxh3": None, "revision": file.hub.revision}


def refuse_changed(plan: Plan) -> None:
    """Raises ``UserError`` for the first file that isn't what it was when it was hashed."""
    for file, before in zip(plan.files, plan.modified, strict=True):
        if _modified(file) != before:
            raise UserError(
                f"{file.path} was changed while it was prepared", "Prepare again when it is complete.", exit_code=1
            )


def sayer(plan: Plan, progress: Report | None, started: float) -> Say:
    """Reports the progress of a plan to ``progress``; its clock began at ``started``."""

    def say(stage: str, bytes_done: int, documents: int, tokens: int) -> None:
        if progress is not None:
            progress(Progress(stage, bytes_done, plan.input_bytes, documents, tokens, time.perf_counter() - started))

    return say


def nothing_found(plan: Plan, log: ReadLog) -> UserError:
    """What to say of sources that gave no token."""
    names = [str(file.path) for file in (*plan.files, *plan.unreadable)]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    reasons = ", ".join(f"{count} × {reason}" for reason, count in log.skipped.items()) or "no documents"
    if log.fields and not plan.read.text_field in log.fields:
        return UserError(
            f"0 tokens in {shown}: {reasons}; the fields are {', '.join(list(log.fields)[:20])}",
            "Name the field that holds the text with --text-field.",
        )
    return UserError(f"0 tokens in {shown}: {reasons}", "Name sources that hold text.")
