"""What a preparation is to do: files listed and hashed, options checked, and the fingerprint of what will come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from arriero.data.shards import FORMAT_VERSION, is_dataset
from arriero.data.sources import ReadOptions, SourceFile, check_readable, list_files
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
    """Where a preparation is. stage: hashing, waiting, encoding or writing; bytes are those of the source files."""

    stage: str
    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int
    seconds: float


Report = Callable[[Progress], None]


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
        return sum(entry["bytes"] for entry in self.inputs)


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
    inputs = (
        *_hash_files(files, sum(size for size, _ in modified), progress),
        *({"name": file.name, "bytes": 0, "xxh3": None} for file in unreadable),
    )
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
        unreadable=tuple(unreadable),
        inputs=inputs,
        modified=modified,
        aside={reason: count for reason, count in sorted(aside.items()) if count},
        read=read,
        tokenizer=tokenizer,
        tokenizer_entry=tokenizer_entry,
        options=options,
        fingerprint=xxhash.xxh3_128_hexdigest(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)),
        verify=verify,
    )


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


def refuse_changed(plan: Plan) -> None:
    """Raises ``UserError`` for the first file that isn't what it was when it was hashed."""
    for file, before in zip(plan.files, plan.modified, strict=True):
        if _modified(file.path) != before:
            raise UserError(
                f"{file.path} was changed while it was prepared", "Prepare again when it is complete.", exit_code=1
            )
