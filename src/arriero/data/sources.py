"""Documents from files, folders and globs, in one fixed order, with every lost document counted.

What counts as a document: a text file (or each piece of it between separators), a line of a ``.jsonl``, an element of a
JSON array, a row of a parquet or Arrow table or of a dataset on the hub. Every file format may be compressed with gzip or zstd.

What happens to the text, and nothing else does: CRLF becomes LF; U+FEFF, the byte-order mark, is dropped wherever it
stands (so files may be concatenated); empty and whitespace-only documents are skipped and counted. Strings are never
reinterpreted. Whatever is wrong with a document follows ``ReadOptions.on_bad_input``:

``error``    stop, naming the file and the line, row or byte
``skip``     leave that document out, and count it under its reason
``replace``  invalid UTF-8 and lone surrogates become U+FFFD; what can't be repaired is skipped and counted
"""

from __future__ import annotations

import codecs
import errno
import glob
import gzip
import io
import json
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import zstandard

from arriero.data.hub import PREFIX, HubDataset, parse_hub, resolve, stream_rows
from arriero.errors import UserError

Policy = str
POLICIES = ("error", "skip", "replace")

_LINES = {".jsonl", ".ndjson", ".jsonlines"}
_TABLES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".ipc": "arrow", ".feather": "arrow"}
_COMPRESSED = {".gz", ".zst"}
# A folder gives up only what is known to be text; a file or glob that is named takes any other ending as text too.
_TEXT_ENDINGS = """
    .adoc .asm .bash .bat .c .cc .clj .cmake .cpp .cs .css .cxx .dart .el .erl .ex .f90 .go .h .hh .hpp .hs .htm .html .ini
    .java .jl .js .jsx .kt .lisp .log .lua .m .markdown .md .ml .org .php .pl .pm .ps1 .py .pyi .pyx .r .rb .rs .rst .scala
    .scm .sh .sql .swift .tcl .tex .text .toml .ts .tsx .txt .v .vim .xml .yaml .yml .zig
"""
_TEXT = frozenset(_TEXT_ENDINGS.split())
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"
_BUFFER_BYTES = 1 << 20
_TABLE_ROWS = 256  # rows taken from a table at once: enough to amortise the call, few enough for documents of megabytes
_EXAMPLES = 100


class Document(NamedTuple):
    """One text and where it came from."""

    text: str
    file: str  # the name of its SourceFile
    row: int  # from 1: line of a jsonl, element of an array, row of a table, piece of a text file


@dataclass(frozen=True)
class SourceFile:
    """A file to read. ``name`` is its path below the source it was found in; ``format`` is text, lines, json, parquet,
    arrow, or hub for a dataset on the hub, which has no path. Of a file of lines, ``start`` and ``stop`` may choose those that begin in ``[start, stop)``, in bytes."""

    path: Path
    name: str
    format: str
    start: int = 0
    stop: int | None = None
    hub: HubDataset | None = None

    @property
    def shown(self) -> str:
        """Where it lies."""
        return self.name if self.hub is not None else str(self.path)

    @property
    def size_bytes(self) -> int:
        """Of what is to be read, on the disk; 0 of what isn't there, or is on the hub."""
        if self.stop is not None:
            return self.stop - self.start
        return self.path.stat().st_size - self.start if self.hub is None and self.path.exists() else 0


@dataclass(frozen=True)
class ReadOptions:
    """How to read. ``document_separator`` splits text files; the pieces between separators are the documents."""

    text_field: str = "text"
    document_separator: str | None = None
    on_bad_input: Policy = "error"

    def __post_init__(self) -> None:
        if self.on_bad_input not in POLICIES:
            raise UserError(f"on_bad_input is {self.on_bad_input!r}", f"Choose one of {', '.join(POLICIES)}.")
        if self.document_separator == "":
            raise UserError(
                "the document separator is empty", "Leave it out, or give the text that separates documents."
            )


class Place(NamedTuple):
    """A document that was read: the number of its file, from 0, and its row there. (0, 0) is before the first."""

    file: int = 0
    row: int = 0


class Note(NamedTuple):
    """Documents (mostly one) that were left out or repaired. file: its path; done: skipped or replaced."""

    file: str
    place: str  # in the file; empty where it is the whole file
    reason: str
    done: str
    documents: int = 1


@dataclass
class ReadLog:
    """What happened while reading: filled by ``read_documents``."""

    skipped: Counter[str] = field(default_factory=Counter)  # reason → documents
    replaced: int = 0  # documents that were repaired with U+FFFD
    examples: list[str] = field(default_factory=list)  # the first hundred of both, with their place
    fields: dict[str, None] = field(default_factory=dict)  # names that records without the text field do have
    _done_bytes: int = 0
    _position: Callable[[], int] | None = None
    each: Callable[[Note], None] | None = None  # is given every one of both
    _muted: bool = False  # while what is counted already is read again

    def skip(self, reason: str, file: str, place: str = "", count: int = 1) -> None:
        self.take(Note(file, place, reason, "skipped", count))

    def repair(self, reason: str, file: str, place: str) -> None:
        self.take(Note(file, place, reason, "replaced"))

    def take(self, note: Note) -> None:
        if self._muted:
            return
        if note.done == "skipped":
            self.skipped[note.reason] += note.documents
        else:
            self.replaced += note.documents
        if len(self.examples) < _EXAMPLES:
            repaired = ", replaced" if note.done == "replaced" else ""
            self.examples.append(f"{f'{note.file} {note.place}'.rstrip()}: {note.reason}{repaired}")
        if self.each is not None:
            self.each(note)

    def state(self) -> dict[str, Any]:
        """What has been counted, for JSON."""
        return {"skipped": dict(self.skipped), "replaced": self.replaced, "examples": list(self.examples)}

    def restore(self, state: dict[str, Any]) -> None:
        """Counts on from a ``state``."""
        self.skipped, self.replaced, self.examples = Counter(state["skipped"]), state["replaced"], state["examples"]

    def bytes_read(self) -> int:
        """How far reading has come in the source files, in their bytes on disk."""
        return self._done_bytes + (self._position() if self._position else 0)


# --------------------------------------------------------------------------------------------------------------- files


def list_files(
    sources: Sequence[str | Path], *, is_dataset: Callable[[Path], bool] = lambda folder: False
) -> tuple[list[SourceFile], Counter[str]]:
    """(files to read, what was left aside by reason). ``is_dataset`` tells prepared datasets from folders of text.

    Files come in the order of the sources; those of a folder (searched to any depth) or glob are sorted by name, so the
    file system's own order never shows. Hidden files, prepared datasets and files whose ending isn't known as text are
    left aside in folders; where a folder holds parquet or Arrow tables only those are taken, since the rest describes
    them. A file that is reached twice is read once; files of one name go by their whole path.
    """
    if not sources:
        raise UserError("no source was given", "Name files, folders or globs that hold the text.")
    found: dict[str, SourceFile] = {}
    aside: Counter[str] = Counter()
    for source in sources:
        if str(source).startswith(PREFIX):
            hub = resolve(parse_hub(str(source)))
            files = [SourceFile(Path(hub.name), hub.name, "hub", hub=hub)]
        else:
            files = list(_files_of(str(source), aside, is_dataset))
        if not files:
            raise UserError(
                f"{source} holds no file that is known as text ({_describe(aside)})",
                "Name the files themselves, for example with a glob such as 'corpus/*.dat'.",
            )
        for file in files:
            if found.setdefault(os.path.realpath(file.path), file) is not file:
                aside["reached twice"] += 1
    names = Counter(file.name for file in found.values())
    return [
        file if names[file.name] == 1 else replace(file, name=file.path.as_posix()) for file in found.values()
    ], aside


def _files_of(source: str, aside: Counter[str], is_dataset: Callable[[Path], bool]) -> Iterator[SourceFile]:
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _files_in(path, aside, is_dataset)
    elif path.exists():
        yield SourceFile(path, path.name, _format_of(path) or "text")
    elif glob.has_magic(source):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207
        if not matches:
            raise UserError(f"no file matches {source}", "Check the pattern, and quote it so that the shell leaves it.")
        fixed = Path(*_before_magic(path.parts))
        for match in matches:
            if match.is_dir():
                aside["folder that a glob matches"] += 1
            else:
                yield SourceFile(match, match.relative_to(fixed).as_posix(), _format_of(match) or "text")
    else:
        raise UserError(f"{source} does not exist", "Give files, folders or globs that hold the text.")


def _before_magic(parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def _files_in(folder: Path, aside: Counter[str], is_dataset: Callable[[Path], bool]) -> Iterator[SourceFile]:
    if is_dataset(folder):
        raise UserError(f"{folder} is a prepared dataset, not text", "Train on it as it is, or name the original text.")
    parts = sorted(child.parent.name for child in folder.glob("*/state.json"))
    if (folder / "dataset_dict.json").is_file() and len(parts) > 1:
        raise UserError(
            f"{folder} is a Hugging Face dataset with the parts {', '.join(parts)}",
            f"Name one of them: {folder / parts[0]}.",
        )
    names = sorted(_walk(folder, aside, is_dataset), key=lambda path: path.as_posix())
    tables = [path for path in names if _format_of(path) in {"parquet", "arrow"}]
    for path in tables or names:
        format = _format_of(path)
        if format is not None:
            yield SourceFile(path, path.relative_to(folder).as_posix(), format)
        else:
            aside[f"{path.suffix or 'no'} ending"] += 1
    if tables:
        aside["beside tables"] += len(names) - len(tables)


def _walk(folder: Path, aside: Counter[str], is_dataset: Callable[[Path], bool]) -> Iterator[Path]:
    seen: set[str] = set()  # links may lead back up
    for root, folders, files in os.walk(folder, followlinks=True):
        here = Path(root)
        real = os.path.realpath(root)
        if real in seen or (here != folder and is_dataset(here)):
            folders.clear()
            aside["prepared dataset"] += real not in seen
            continue
        seen.add(real)
        aside["hidden"] += sum(name.startswith(".") for name in (*folders, *files))
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (here / name for name in files if not name.startswith("."))


def _format_of(path: Path) -> str | None:
    """text, lines, json, parquet or arrow by the name's ending; None for one that isn't known."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if suffix in _LINES:
        return "lines"
    if suffix == ".json":
        return "json"
    return _TABLES.get(suffix) or ("text" if suffix in _TEXT else None)


def _describe(aside: Counter[str]) -> str:
    return ", ".join(f"{count} × {reason}" for reason, count in aside.items() if count) or "it is empty"


# ----------------------------------------------------------------------------------------------------------- documents


def read_documents(
    files: Sequence[SourceFile], options: ReadOptions, log: ReadLog, *, after: Place | None = None
) -> Iterator[Document]:
    """Every document of the files, in order; see the module's text for what is changed, skipped and refused.

    ``log`` is filled on the way. ``after``: only the documents behind this one, for a log that has counted what comes
    before; a JSON lines file is passed over at 2 GB/s, other formats are parsed. Raises ``UserError`` naming file and
    place under the policy ``error``.
    """
    after = after or Place()
    for file in files[: after.file]:
        log._done_bytes += file.size_bytes
    for number, file in enumerate(files[after.file :]):
        for document in _read_file(file, options, log, 0 if number else after.row):
            text = document.text
            if "\r" in text or "\ufeff" in text:
                text = text.replace("\r\n", "\n").replace("\ufeff", "")
                document = document._replace(text=text)
            if not text or text.isspace():
                log.skip("whitespace only" if text else "empty", file.shown, _place(file, document.row))
                continue
            yield document
        log._position = None
        log._done_bytes += file.size_bytes


def is_divisible(file: SourceFile) -> bool:
    """Whether a part of it can be read by ``start`` and ``stop``: a file of lines that isn't compressed."""
    if file.format != "lines":
        return False
    with file.path.open("rb") as content:
        head = content.read(4)
    return not head.startswith(_GZIP) and head != _ZSTD


def check_readable(path: Path) -> os.stat_result:
    """Raises ``OSError`` unless it is a file that can be read: a pipe would be waited for without end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "It is no regular file")
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return found


def _place(file: SourceFile, row: int) -> str:
    word = {"text": "document", "lines": "line", "json": "element"}.get(file.format, "row")
    return f"{word} {row}"


def _read_file(file: SourceFile, options: ReadOptions, log: ReadLog, after_row: int) -> Iterator[Document]:
    reader = _Reader(file, options, log, after_row)
    if file.hub is not None:
        yield from _read_hub(file.hub, reader)
        return
    formats = {"text": _read_text, "lines": _read_lines, "json": _read_json}
    read = _behind(formats.get(file.format, _read_table)) if after_row else formats.get(file.format, _read_table)
    try:
        check_readable(file.path)
        with file.path.open("rb", buffering=0) as raw:
            if file.stop is None:
                log._position = raw.tell
            else:
                start, stop = file.start, file.stop
                log._position = lambda: min(max(raw.tell(), start), stop) - start
            stream, compressed = _decompressed(raw)
            try:
                if stream.peek(1):
                    yield from read(stream, reader)
                else:
                    reader.skip_always("empty file", "")
            except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
                reader.reject(f"damaged {compressed} file", "", str(error) or "it ends too early")
    except OSError as error:
        reader.reject("unreadable file", "", error.strerror or str(error))


_Read = Callable[[io.BufferedReader, "_Reader"], Iterator[Document]]


def _behind(read: _Read) -> _Read:
    """Reads only what comes behind the reader's ``after_row``, which is a document that was yielded before.

    What is logged up to there has been logged before.
    """

    def read_on(stream: io.BufferedReader, reader: _Reader) -> Iterator[Document]:
        reader.log._muted = True
        for document in read(stream, reader):
            if document.row > reader.after_row:
                yield document
            elif document.row == reader.after_row:
                reader.log._muted = False

    return read_on


@dataclass(frozen=True)
class _Reader:
    """A file being read, and what to do about what is wrong in it."""

    file: SourceFile
    options: ReadOptions
    log: ReadLog
    after_row: int = 0

    def document(self, text: str, row: int) -> Document:
        return Document(text, self.file.name, row)

    def skip_always(self, reason: str, place: str, count: int = 1) -> None:
        self.log.skip(reason, self.file.shown, place, count)

    def reject(self, reason: str, place: str, detail: str = "", remedy: str = "", count: int = 1) -> None:
        """Raises under the policy ``error``, else counts the lost documents."""
        if self.options.on_bad_input == "error":
            where = f"{self.file.shown} {place}".rstrip()
            raise UserError(
                f"{where}: {reason}{f' ({detail})' if detail else ''}",
                remedy or "Mend the file, or leave out what is wrong in it with --on-bad-input skip.",
            )
        self.skip_always(reason, place, count)

    def reject_encoding(self, reason: str, place: str, detail: str) -> bool:
        """True where the policy is to repair, which is then counted."""
        if self.options.on_bad_input == "replace":
            self.log.repair(reason, self.file.shown, place)
            return True
        self.reject(reason, place, detail, "Mend the file, or use --on-bad-input replace (U+FFFD) or skip.")
        return False


# -------------------------------------------------------------------------------------------------------- compression


def _decompressed(raw: io.FileIO) -> tuple[io.BufferedReader, str]:
    """(the file's content, the compression's name), told by its first bytes: a wrong ending misleads nobody."""
    head = raw.read(4)
    raw.seek(0)
    if head.startswith(_GZIP):
        content: io.RawIOBase = _Gzip(raw)
    elif head == _ZSTD:
        content = _Zstd(raw)
    else:
        return io.BufferedReader(raw, _BUFFER_BYTES), ""
    return io.BufferedReader(content, _BUFFER_BYTES), "gzip" if head.startswith(_GZIP) else "zstd"


class _Gzip(io.RawIOBase):
    """Decompressed bytes of a gzip file of any number of members."""

    def __init__(self, raw: io.FileIO) -> None:
        self._file = gzip.GzipFile(fileobj=io.BufferedReader(raw, _BUFFER_BYTES))

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        view = memoryview(target)
        data = self._file.read1(len(view))
        view[: len(data)] = data
        return len(data)


class _Zstd(io.RawIOBase):
    """Decompressed bytes of a zstd file of any number of frames. The library's own reader takes a file that is cut off
    for a complete one, so the end of the last frame is checked here."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            if not self._compressed:
                self._compressed = self._raw.read(_BUFFER_BYTES // 8)
                if not self._compressed:
                    if self._frame is not None:
                        raise EOFError("it ends too early")
                    return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(self._compressed))
            self._compressed = b""
            if self._frame.eof:
                self._compressed = self._frame.unused_data
                self._frame = None
        view = memoryview(target)
        size = min(len(view), len(self._ready))
        view[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


# ---------------------------------------------------------------------------------------------------------------- text


def _read_text(stream: io.BufferedReader, reader: _Reader) -> Iterator[Document]:
    separator = reader.options.document_separator
    pieces: Iterable[tuple[int, bytes]] = _pieces(stream, separator) if separator else [(0, stream.read())]
    for row, (offset, data) in enumerate(pieces, 1):
        text = _decode(data, offset, reader)
        if text is not None:
            yield reader.document(text, row)


def _decode(data: bytes, offset: int, reader: _Reader) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = ", the file looks like UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        place, detail = f"byte {offset + error.start}", f"0x{data[error.start]:02x} can't stand here{hint}"
        return data.decode("utf-8", "replace") if reader.reject_encoding("invalid UTF-8", place, detail) else None


def _pieces(stream: io.BufferedReader, separator: str) -> Iterator[tuple[int, bytes]]:
    """(byte offset, bytes) between the separators. A line break in the separator also matches CRLF.

    Cutting bytes is safe: no UTF-8 character contains the bytes of another. A separator at the very end ends the last
    document and begins none.
    """
    normalised = separator.replace("\r\n", "\n").encode()
    pattern = re.compile(re.escape(normalised).replace(b"\\\n", b"\r?\n"))
    longest = len(normalised) + normalised.count(b"\n")
    offset, rest, searched = 0, b"", 0  # where `rest` begins in the file, what is not yet cut, how far it is searched
    while data := stream.read(_BUFFER_BYTES):
        rest += data
        begin = 0
        for match in pattern.finditer(rest, searched):
            yield offset + begin, rest[begin : match.start()]
            begin = match.end()
        offset, rest = offset + begin, rest[begin:]
        searched = max(0, len(rest) - longest + 1)
    if rest:
        yield offset, rest


# ---------------------------------------------------------------------------------------------------------------- json


def _read_lines(stream: io.BufferedReader, reader: _Reader) -> Iterator[Document]:
    name, field, loads = reader.file.name, reader.options.text_field, orjson.loads
    text: Any
    reader.log._muted = False  # nothing is logged of lines that are passed over
    passed = _pass_lines(stream, reader.file.start) if reader.file.start else 0
    lines = stream if reader.file.stop is None else _lines_before(stream, reader.file.stop)
    begin = max(passed, reader.after_row)
    for row, line in enumerate(islice(lines, begin - passed, None), begin + 1):
        try:
            text = loads(line)[field]
        except (ValueError, KeyError, TypeError):
            text = None
        if type(text) is not str:  # blank, bad, or a number such as NaN that orjson refuses: looked at closely
            text = _text_of_line(line, row, reader)
            if text is None:
                continue
        yield Document(text, name, row)


def _pass_lines(stream: io.BufferedReader, start: int) -> int:
    """Reads up to the first line that begins at byte ``start`` or later; returns how many lines begin before."""
    lines, left = 1, start - 1  # a line begins at 0; the others behind each line break before start - 1
    while left and (data := stream.read(min(left, _BUFFER_BYTES))):
        lines += data.count(b"\n")
        left -= len(data)
    stream.readline()
    return lines


def _lines_before(stream: io.BufferedReader, stop: int) -> Iterator[bytes]:
    """The lines that begin before byte ``stop``."""
    position = stream.tell()
    while position < stop and (line := stream.readline()):
        position += len(line)
        yield line


def _text_of_line(line: bytes, row: int, reader: _Reader) -> str | None:
    """The text in a line; None for a blank line, which is no document, and for a bad one, which is counted."""
    line = line.removeprefix(_BOM).strip()
    if not line:
        return None
    place = f"line {row}"
    try:
        content = line.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"0x{line[error.start]:02x} can't stand at byte {error.start} of the line"
        if not reader.reject_encoding("invalid UTF-8", place, detail):
            return None
        content = line.decode("utf-8", "replace")
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        reader.reject("broken JSON", place, _short(str(error)))
        return None
    return _text_of_record(record, place, reader)


def _text_of_record(record: Any, place: str, reader: _Reader) -> str | None:
    field, log = reader.options.text_field, reader.log
    if not isinstance(record, dict):
        reader.reject("not a JSON object", place, f"it is {_json_type(record)}")
    elif field not in record:
        if len(log.fields) < _EXAMPLES:
            log.fields.update(dict.fromkeys(record))
        _reject_field(record, place, reader)
    elif record[field] is None:
        reader.reject(f"field {field!r} is null", place)
    elif not isinstance(record[field], str):
        reader.reject(f"field {field!r} is no string", place, f"it is {_json_type(record[field])}")
    else:
        return _without_surrogates(record[field], place, reader)
    return None


def _reject_field(fields: Iterable[str], place: str, reader: _Reader) -> None:
    reader.reject(
        f"field {reader.options.text_field!r} is missing",
        place,
        f"the fields are {', '.join(fields) or 'none'}",
        "Name the field that holds the text with --text-field, or leave such rows out with --on-bad-input skip.",
    )


def _without_surrogates(text: str, place: str, reader: _Reader) -> str | None:
    """Half a UTF-16 pair, written as ``\\ud800`` in JSON, stands for no character and has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        detail = f"U+{ord(text[error.start]):04X} at character {error.start}"
        if not reader.reject_encoding("lone surrogate", place, detail):
            return None
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    return text


def _read_json(stream: io.BufferedReader, reader: _Reader) -> Iterator[Document]:
    """A JSON array of objects, read piece by piece; a ``.json`` that holds a line or an object at a time works too."""
    head = stream.peek(_BUFFER_BYTES).removeprefix(_BOM).lstrip()
    first_line = head.split(b"\n", 1)[0]
    if head[:1] == b"{" and _is_json(first_line):
        yield from _read_lines(stream, reader)
        return
    row = 0
    try:
        for row, record in enumerate(_json_values(stream), 1):
            text = _text_of_record(record, f"element {row}", reader)
            if text is not None:
                yield reader.document(text, row)
    except (ValueError, RecursionError) as error:  # no way to tell where the next element begins
        reader.reject("broken JSON", f"after element {row}", _short(str(error)))


def _json_values(stream: io.BufferedReader) -> Iterator[Any]:
    """The elements of one array, or objects that follow one another. Bytes that are no UTF-8 become lone surrogates,
    which are then judged in the element they belong to. Memory: the largest element, not the file."""
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    parse = json.JSONDecoder().raw_decode
    between = re.compile(r"[ \t\r\n]*")
    buffer, position, size, ended = "", 0, _BUFFER_BYTES // 4, False

    def more() -> bool:
        """Reads on, ever larger pieces for a large element; False at the end of the file."""
        nonlocal buffer, position, size, ended
        if ended:
            return False
        data = stream.read(size)
        ended = not data
        buffer, position = buffer[position:] + decode(data, ended), 0
        size = max(size, 2 * len(buffer))
        return True

    def next_character() -> str:
        nonlocal position
        while True:
            end = between.match(buffer, position)
            assert end is not None
            position = end.end()
            if position < len(buffer) or not more():
                return buffer[position : position + 1]

    if next_character() == "\ufeff":
        position += 1
    in_array = next_character() == "["
    position += in_array
    count = 0
    while character := next_character():
        if in_array and character == "]":
            position += 1
            if rest := next_character():
                raise ValueError(f"{rest!r} after the end of the array")
            return
        if in_array and count:
            if character != ",":
                raise ValueError(f"expected a comma, got {character!r}")
            position += 1
            next_character()
        while True:
            try:
                value, end = parse(buffer, position)
            except json.JSONDecodeError as error:
                # broken for good, unless what is missing may only not have been read yet
                open_end = error.msg.startswith("Unterminated string") or error.pos >= len(buffer) - 16
                if not (open_end and more()):
                    raise
            else:
                break
        position = end
        count += 1
        yield value
    if in_array:
        raise ValueError("the array has no end")


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def _read_hub(hub: HubDataset, reader: _Reader) -> Iterator[Document]:
    """What goes wrong between here and the hub is no bad input: it stops the reading under every policy."""
    rows = stream_rows(hub, reader.options.text_field, after=reader.after_row)
    for row, record in enumerate(rows, reader.after_row + 1):
        text = _text_of_record(record, f"row {row}", reader)
        if text is not None:
            yield reader.document(text, row)


# -------------------------------------------------------------------------------------------------------------- tables


def _read_table(stream: io.BufferedReader, reader: _Reader) -> Iterator[Document]:
    import pyarrow as pa

    row = 0
    try:
        with _random_access(stream, reader.file.path) as table:
            for column in _text_columns(table, reader):
                for cell in _cells(column):
                    row += 1
                    text = _decode_cell(cell, row, reader) if isinstance(cell, bytes) else cell
                    if text is not None:
                        yield reader.document(text, row)
                    elif cell is None:
                        reader.reject(f"field {reader.options.text_field!r} is null", f"row {row}")
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the second for the name of a column
        reader.reject(f"damaged {reader.file.format} file", f"after row {row}" if row else "", _short(str(error)))


@contextmanager
def _random_access(stream: io.BufferedReader, path: Path) -> Iterator[Any]:
    """An Arrow file of the content. Tables are read from their end, so a compressed one is unpacked to the disk."""
    import pyarrow as pa

    if isinstance(stream.raw, io.FileIO):
        with pa.memory_map(str(path)) as table:
            yield table
        return
    with tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(stream, unpacked, _BUFFER_BYTES)
        unpacked.seek(0)
        with pa.PythonFile(unpacked) as table:
            yield table


def _text_columns(table: Any, reader: _Reader) -> Iterator[Any]:
    """The text column of a table as Arrow arrays of at most ``_TABLE_ROWS``; nothing where it has none."""
    log, field = reader.log, reader.options.text_field
    if reader.file.format == "parquet":
        import pyarrow.parquet as pq

        file = pq.ParquetFile(table)
        if _check_column(file.schema_arrow, file.metadata.num_rows, reader):
            size_bytes, rows, done = reader.file.path.stat().st_size, max(1, file.metadata.num_rows), 0
            log._position = lambda: size_bytes * done // rows
            for batch in file.iter_batches(batch_size=_TABLE_ROWS, columns=[field]):
                yield batch.column(0)
                done += batch.num_rows
        return
    schema, batches = _arrow_batches(table)
    for batch in batches:
        log._position = table.tell
        if _check_column(schema, batch.num_rows, reader):
            column = batch.column(schema.get_field_index(field))
            yield from (column.slice(start, _TABLE_ROWS) for start in range(0, len(column), _TABLE_ROWS))


def _arrow_batches(file: Any) -> tuple[Any, Iterator[Any]]:
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(file)
    except pa.ArrowInvalid:  # Hugging Face writes the streaming form, others the file form, both named .arrow
        file.seek(0)
        stream = pa.ipc.open_stream(file)
        return stream.schema, iter(stream)
    return table.schema, (table.get_batch(number) for number in range(table.num_record_batches))


def _check_column(schema: Any, rows: int, reader: _Reader) -> bool:
    import pyarrow as pa

    field = reader.options.text_field
    if schema.get_field_index(field) < 0:
        reader.log.fields.update(dict.fromkeys(schema.names))
        _reject_rows(rows, f"field {field!r} is missing", f"the fields are {', '.join(schema.names)}", reader)
        return False
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    textual = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    if any(is_kind(kind) for is_kind in (*textual, *binary)):
        return True
    _reject_rows(rows, f"field {field!r} is no string", f"it is a column of {kind}", reader)
    return False


def _reject_rows(rows: int, reason: str, detail: str, reader: _Reader) -> None:
    reader.reject(
        reason,
        "",
        detail,
        "Name the column that holds the text with --text-field, or leave such rows out with --on-bad-input skip.",
        rows,
    )


def _cells(column: Any) -> list[str | bytes | None]:
    """The cells of a column; all as bytes where a string of it is not valid UTF-8, which Arrow doesn't check."""
    import pyarrow as pa

    try:
        # offsets of a damaged file point outside of it, which Arrow doesn't look at: reading them ends the process
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):  # comes after the offsets, and is judged for each cell
            raise
    try:
        cells: list[str | bytes | None] = column.to_pylist()
    except UnicodeDecodeError:
        plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        raw = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
        cells = plain.cast(raw[plain.type]).to_pylist()
    return cells


def _decode_cell(data: bytes, row: int, reader: _Reader) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"0x{data[error.start]:02x} can't stand at byte {error.start} of the text"
        replace = reader.reject_encoding("invalid UTF-8", f"row {row}", detail)
        return data.decode("utf-8", "replace") if replace else None
