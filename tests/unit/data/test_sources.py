from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.data.sources import Document, Note, ReadLog, ReadOptions, list_files, read_documents
from arriero.errors import UserError


def read(*sources: Path | str, **options: Any) -> tuple[list[Document], ReadLog]:
    log = ReadLog()
    files, _ = list_files(sources)
    return list(read_documents(files, ReadOptions(**options), log)), log


def texts(*sources: Path | str, **options: Any) -> list[str]:
    return [document.text for document in read(*sources, **options)[0]]


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# ------------------------------------------------------------------------------------------------------------- formats

STORIES = ["Once upon a time\nthere was a mule.", "它不肯走。", 'A "quoted" \\ line\t😀']


def write_parquet(path: Path, values: list[Any], type: pa.DataType | None = None) -> None:
    table = pa.table({"other": list(range(len(values))), "text": pa.array(values, type=type)})
    pq.write_table(table, path, row_group_size=2)


def write_arrow(path: Path, values: list[Any], *, stream: bool) -> None:
    table = pa.table({"text": values, "n": list(range(len(values)))})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS: dict[str, Callable[[Path], None]] = {
    "a.jsonl": lambda path: path.write_bytes(lines(*({"text": text, "n": 1} for text in STORIES))) and None,
    "a.ndjson": lambda path: (
        path.write_bytes(lines(*({"text": text} for text in STORIES)).replace(b"\n", b"\r\n")) and None
    ),
    "array.json": lambda path: path.write_text(json.dumps([{"text": text} for text in STORIES], indent=2)) and None,
    "lines.json": lambda path: path.write_bytes(lines(*({"text": text} for text in STORIES))) and None,
    "pretty.json": lambda path: path.write_text("\n".join(json.dumps({"text": t}, indent=1) for t in STORIES)) and None,
    "a.parquet": lambda path: write_parquet(path, STORIES),
    "large.parquet": lambda path: write_parquet(path, STORIES, pa.large_string()),
    "dictionary.parquet": lambda path: write_parquet(path, STORIES, pa.dictionary(pa.int32(), pa.string())),
    "binary.parquet": lambda path: write_parquet(path, [text.encode() for text in STORIES]),
    "stream.arrow": lambda path: write_arrow(path, STORIES, stream=True),
    "file.arrow": lambda path: write_arrow(path, STORIES, stream=False),
}


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_plain_and_compressed(tmp_path: Path, name: str, compression: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    if compression:
        content = path.read_bytes()
        half = len(content) // 2  # two members, two frames: concatenated files are one
        compress = gzip.compress if compression == ".gz" else zstandard.ZstdCompressor().compress
        path = put(Path(f"{path}{compression}"), compress(content[:half]) + compress(content[half:]))
    documents, log = read(path)
    assert [document.text for document in documents] == STORIES
    assert {document.file for document in documents} == {path.name}
    if name != "pretty.json":
        assert [document.row for document in documents] == [1, 2, 3]
    assert not log.skipped
    assert log.bytes_read() == path.stat().st_size


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_a_text_file_is_a_document(tmp_path: Path, compression: str) -> None:
    text = "def load():\n    return 1\n" * 100_000
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[compression]
    path = put(tmp_path / f"a.py{compression}", compress(text.encode()))
    assert read(path)[0] == [Document(text, path.name, 1)]


def test_a_separator_splits_text_files(tmp_path: Path) -> None:
    separator = "\n---\n"
    pieces = ["eins", "zwei\n", "", "drei " * 700_000, "vier"]
    path = put(tmp_path / "a.txt", separator.join(pieces).encode())
    documents, log = read(path, document_separator=separator)
    assert [document.text for document in documents] == ["eins", "zwei\n", "drei " * 700_000, "vier"]
    assert [document.row for document in documents] == [1, 2, 4, 5]
    assert log.skipped == {"empty": 1}


@given(
    pieces=st.lists(st.text(st.sampled_from("a=\r\n字"), max_size=6), min_size=1, max_size=6),
    separator=st.sampled_from(["=", "==", "\n", "\n\n", "=\n=", "字"]),
    buffer_bytes=st.integers(1, 9),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_separators_are_found_across_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pieces: list[str], separator: str, buffer_bytes: int
) -> None:
    whole = separator.join(pieces).replace("\r\n", "\n").replace("\n", "\r\n") + "end"
    monkeypatch.setattr("arriero.data.sources._BUFFER_BYTES", buffer_bytes)
    found = texts(put(tmp_path / "a.txt", whole.encode()), document_separator=separator)
    expected = [piece for piece in whole.replace("\r\n", "\n").split(separator) if piece.strip()]
    assert found == expected


# --------------------------------------------------------------------------------------------------------------- files


def test_folders_give_known_text_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ["z.txt", "a/2.md", "a/1.py", "b.jsonl", ".hidden.txt", ".git/config.txt", "picture.png", "data/x.txt"]:
        put(tmp_path / name, lines({"text": name}) if name.endswith("jsonl") else name.encode())
    put(tmp_path / "data/dataset.json", b"{}")
    files, aside = list_files([tmp_path], is_dataset=lambda folder: (folder / "dataset.json").exists())
    assert [file.name for file in files] == ["a/1.py", "a/2.md", "b.jsonl", "z.txt"]
    assert {reason: count for reason, count in aside.items() if count} == {
        "hidden": 2,
        ".png ending": 1,
        "prepared dataset": 1,
    }


def test_sources_keep_their_order_and_a_file_is_read_once(tmp_path: Path) -> None:
    for name in "cab":
        put(tmp_path / f"{name}.txt", name.encode())
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    assert texts(tmp_path / "c.txt", tmp_path / "*.txt") == ["c", "a", "b"]
    assert list_files([tmp_path / "c.txt", tmp_path])[1]["reached twice"] == 2


def test_globs_reach_into_folders_and_take_any_ending(tmp_path: Path) -> None:
    put(tmp_path / "x/one.dat", b"one")
    put(tmp_path / "x/y/two.dat", b"two")
    files, _ = list_files([f"{tmp_path}/**/*.dat"])
    assert [file.name for file in files] == ["x/one.dat", "x/y/two.dat"]
    assert texts(f"{tmp_path}/**/*.dat") == ["one", "two"]
    assert list_files([f"{tmp_path}/x/*"])[1] == {"folder that a glob matches": 1}


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, two = put(tmp_path / "x/a.txt", b"one"), put(tmp_path / "y/a.txt", b"two")
    put(tmp_path / "y/b.txt", b"three")
    documents, _ = read(tmp_path / "x", tmp_path / "y")
    assert [(document.text, document.file) for document in documents] == [
        ("one", one.as_posix()),
        ("two", two.as_posix()),
        ("three", "b.txt"),
    ]


def test_a_link_that_leads_back_up_ends(tmp_path: Path) -> None:
    put(tmp_path / "a/b.txt", b"b")
    (tmp_path / "a/up").symlink_to(tmp_path)
    assert texts(tmp_path) == ["b"]


def test_a_folder_of_tables_gives_only_its_tables(tmp_path: Path) -> None:
    """A download of the hub holds a README beside its parquet files."""
    put(tmp_path / "README.md", b"about")
    put(tmp_path / "dataset_infos.json", b"{}")
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data/train-00000-of-00001.parquet", STORIES)
    assert texts(tmp_path) == STORIES
    assert list_files([tmp_path])[1]["beside tables"] == 2


def test_a_saved_hugging_face_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    for number in (1, 0):
        write_arrow(folder / f"data-0000{number}-of-00002.arrow", [f"{number}a", f"{number}b"], stream=True)
    put(folder / "state.json", b'{"_data_files": []}')
    put(folder / "dataset_info.json", b"{}")
    assert texts(folder) == ["0a", "0b", "1a", "1b"]
    put(tmp_path / "dataset_dict.json", b"{}")
    put(tmp_path / "test/state.json", b"{}")
    with pytest.raises(UserError, match="with the parts test, train"):
        list_files([tmp_path])


def test_sources_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl does not exist"):
        list_files([tmp_path / "nowhere.jsonl"])
    with pytest.raises(UserError, match="no file matches"):
        list_files([f"{tmp_path}/*.txt"])
    with pytest.raises(UserError, match=r"holds no file that is known as text \(it is empty"):
        list_files([tmp_path])
    with pytest.raises(UserError, match="no source was given"):
        list_files([])


def test_options_are_checked() -> None:
    with pytest.raises(UserError, match="on_bad_input is 'ignore'"):
        ReadOptions(on_bad_input="ignore")
    with pytest.raises(UserError, match="separator is empty"):
        ReadOptions(document_separator="")


# ---------------------------------------------------------------------------------------------------------- what is done


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_line_breaks_and_byte_order_marks_do_not_matter(tmp_path: Path, name: str) -> None:
    """cases.md A13."""

    def variant(number: int, text: str, bom: bool, line_break: str = "\n") -> str:
        path = tmp_path / str(number) / name
        content = json.dumps({"text": text}).replace("\n", line_break) if name == "a.jsonl" else text
        put(path, (b"\xef\xbb\xbf" if bom else b"") + content.encode() + line_break.encode())
        return texts(path)[0].rstrip("\n")

    plain = variant(0, "one\ntwo", bom=False)
    assert plain == "one\ntwo"
    assert variant(1, "one\r\ntwo", bom=False, line_break="\r\n") == plain
    assert variant(2, "one\ntwo", bom=True) == plain
    assert variant(3, "one\r\ntwo", bom=True, line_break="\r\n") == plain


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_mark_in_the_middle_of_concatenated_files_is_dropped(tmp_path: Path, name: str) -> None:
    parts = (
        [b'{"text": "one"}\n', b'\xef\xbb\xbf{"text": "two"}\n']
        if name == "a.jsonl"
        else [b"one\n", b"\xef\xbb\xbftwo"]
    )
    found = texts(put(tmp_path / name, b"".join(parts)))
    assert found == (["one", "two"] if name == "a.jsonl" else ["one\ntwo"])


def test_empty_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    """cases.md A10."""
    path = put(tmp_path / "a.jsonl", lines(*({"text": text} for text in ["", "a", "   ", "", "b"])))
    documents, log = read(path)
    assert [(document.text, document.row) for document in documents] == [("a", 2), ("b", 5)]
    assert log.skipped == {"empty": 2, "whitespace only": 1}
    assert log.examples[0] == f"{path} line 1: empty"


def test_an_empty_file_is_counted(tmp_path: Path) -> None:
    documents, log = read(put(tmp_path / "a.txt", b""), put(tmp_path / "b.jsonl", b""), put(tmp_path / "c.txt", b"c"))
    assert [document.text for document in documents] == ["c"]
    assert log.skipped == {"empty file": 2}


def test_strings_are_never_reinterpreted(tmp_path: Path) -> None:
    """cases.md A16."""
    strings = ["2024-01-01", "123", "true", "null", '{"a":1}', "1e5", "NaN", " x ", "\x00\x1f"]
    assert texts(put(tmp_path / "a.jsonl", lines(*({"text": text} for text in strings)))) == strings


# ------------------------------------------------------------------------------------------------------------ bad input

MIXED = [
    b'{"text":"a"}',
    b'{"txt":"b"}',
    b'{"text":null}',
    b'{"text":5}',
    b'{"text":"c","meta":{"x":1}}',
    b'{"text":"d","meta":"s","score":NaN}',
    b"",
    b"not json",
    b'["text"]',
    b'{"text":"e","text":"f"}',
]


def test_mixed_lines_are_kept_or_counted(tmp_path: Path) -> None:
    """cases.md A15."""
    path = put(tmp_path / "a.jsonl", b"\n".join(MIXED))
    documents, log = read(path, on_bad_input="skip")
    assert [(document.text, document.row) for document in documents] == [("a", 1), ("c", 5), ("d", 6), ("f", 10)]
    assert log.skipped == {
        "field 'text' is missing": 1,
        "field 'text' is null": 1,
        "field 'text' is no string": 1,
        "broken JSON": 1,
        "not a JSON object": 1,
    }
    assert f"{path} line 8: broken JSON" in log.examples


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (1, r"a\.jsonl line 2: field 'text' is missing \(the fields are txt\)"),
        (2, r"a\.jsonl line 2: field 'text' is null"),
        (3, r"a\.jsonl line 2: field 'text' is no string \(it is a number\)"),
        (7, r"a\.jsonl line 2: broken JSON"),
        (8, r"a\.jsonl line 2: not a JSON object \(it is an array\)"),
    ],
)
def test_the_first_bad_line_is_named(tmp_path: Path, bad: int, message: str) -> None:
    path = put(tmp_path / "a.jsonl", b"\n".join([MIXED[0], MIXED[bad]]))
    with pytest.raises(UserError, match=message):
        read(path)


def test_another_field_can_be_named(tmp_path: Path) -> None:
    assert texts(put(tmp_path / "a.jsonl", lines({"body": "x", "text": 1})), text_field="body") == ["x"]


def test_a_table_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", STORIES)
    with pytest.raises(UserError, match=r"field 'body' is missing \(the fields are other, text\)"):
        read(tmp_path / "a.parquet", text_field="body")
    _, log = read(tmp_path / "a.parquet", text_field="body", on_bad_input="skip")
    assert log.skipped == {"field 'body' is missing": 3}
    assert list(log.fields) == ["other", "text"]


def test_a_column_of_numbers_is_refused_and_nulls_are_counted(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["a", None, "b"])
    with pytest.raises(UserError, match=r"a\.parquet row 2: field 'text' is null"):
        read(tmp_path / "a.parquet")
    documents, log = read(tmp_path / "a.parquet", on_bad_input="skip")
    assert [(document.text, document.row) for document in documents] == [("a", 1), ("b", 3)]
    assert log.skipped == {"field 'text' is null": 1}
    with pytest.raises(UserError, match=r"field 'other' is no string \(it is a column of int64"):
        read(tmp_path / "a.parquet", text_field="other")
    write_parquet(tmp_path / "null.parquet", [None, None])
    _, log = read(tmp_path / "null.parquet", on_bad_input="skip")
    assert log.skipped == {"field 'text' is null": 2}


def test_invalid_utf8_in_a_text_file(tmp_path: Path) -> None:
    """cases.md A14."""
    path = put(tmp_path / "a.txt", b"A\xc9B\nC")
    with pytest.raises(UserError, match=r"a\.txt byte 1: invalid UTF-8 \(0xc9"):
        read(path)
    documents, log = read(path, on_bad_input="replace")
    assert [document.text for document in documents] == ["A\ufffdB\nC"]
    assert (log.replaced, dict(log.skipped)) == (1, {})
    documents, log = read(path, on_bad_input="skip")
    assert (documents, dict(log.skipped)) == ([], {"invalid UTF-8": 1})


def test_a_bad_byte_is_placed_in_the_whole_file(tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", b"one\r\n==\r\ntwo\xff\r\n==\r\nthree")
    with pytest.raises(UserError, match="byte 12: invalid UTF-8"):
        read(path, document_separator="\n==\n")
    assert texts(path, document_separator="\n==\n", on_bad_input="skip") == ["one", "three"]


def test_utf16_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="looks like UTF-16"):
        read(put(tmp_path / "a.txt", "hello".encode("utf-16")))


def test_one_bad_line_of_a_hundred(tmp_path: Path) -> None:
    """cases.md A14."""
    content = [json.dumps({"text": f"line {number}"}).encode() for number in range(100)]
    content[41] = b'{"text": "A\xc9B"}'
    path = put(tmp_path / "a.jsonl", b"\n".join(content))
    with pytest.raises(UserError, match=r"line 42: invalid UTF-8 \(0xc9 can't stand at byte 11"):
        read(path)
    documents, log = read(path, on_bad_input="skip")
    assert (len(documents), dict(log.skipped)) == (99, {"invalid UTF-8": 1})
    documents, log = read(path, on_bad_input="replace")
    assert (len(documents), documents[41].text, log.replaced) == (100, "A\ufffdB", 1)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_lone_surrogates(tmp_path: Path, name: str) -> None:
    objects = rb'{"text":"x\ud800y"}', rb'{"text":"\ud83d\ude00"}'
    path = put(tmp_path / name, b"\n".join(objects) if name == "a.jsonl" else b"[" + b",".join(objects) + b"]")
    with pytest.raises(UserError, match=r"1: lone surrogate \(U\+D800 at character 1"):
        read(path)
    assert texts(path, on_bad_input="replace") == ["x\ufffdy", "😀"]
    documents, log = read(path, on_bad_input="skip")
    assert ([document.text for document in documents], dict(log.skipped)) == (["😀"], {"lone surrogate": 1})


def test_invalid_utf8_in_tables(tmp_path: Path) -> None:
    data = pa.array([b"good", b"b\xffd", b"fine"], pa.binary())
    broken = pa.StringArray.from_buffers(3, data.buffers()[1], data.buffers()[2])
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"row 2: invalid UTF-8 \(0xff can't stand at byte 1"):
        read(tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", on_bad_input="skip") == ["good", "fine"]
    assert texts(tmp_path / "a.parquet", on_bad_input="replace") == ["good", "b\ufffdd", "fine"]


@pytest.mark.parametrize("compression", ["gz", "zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.json", "a.parquet"])
def test_a_compressed_file_that_is_cut_off(tmp_path: Path, name: str, compression: str) -> None:
    if name == "a.parquet":
        write_parquet(tmp_path / name, [f"story {number}" for number in range(5000)])
        content = (tmp_path / name).read_bytes()
    else:
        objects = [json.dumps({"text": f"{number} {number * 7919 % 104729}"}) for number in range(60_000)]
        content = ("\n".join(objects) if name == "a.jsonl" else f"[{','.join(objects)}]").encode()
    compress = gzip.compress if compression == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    whole = compress(content)
    path = put(tmp_path / f"{name}.{compression}", whole[: len(whole) * 2 // 3])
    with pytest.raises(UserError, match=rf"{name}\.{compression}: damaged (gzip|zstd) file"):
        read(path)
    documents, log = read(path, on_bad_input="skip")
    assert sum(log.skipped.values()) == 1
    assert (len(documents) > 1000) == (name in {"a.jsonl", "a.json"})
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    with pytest.raises(UserError, match=r"damaged|invalid UTF-8|broken JSON"):
        read(put(path, bytes(damaged)))


def test_the_first_bytes_tell_the_compression_not_the_name(tmp_path: Path) -> None:
    assert texts(put(tmp_path / "plain.txt.gz", b"plain")) == ["plain"]
    assert texts(put(tmp_path / "packed.txt", gzip.compress(b"packed"))) == ["packed"]
    assert texts(put(tmp_path / "swapped.txt.gz", zstandard.ZstdCompressor().compress(b"swapped"))) == ["swapped"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_that_is_none(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / name, b"certainly not a table, but long enough to look at" * 10)
    with pytest.raises(UserError, match=rf"{name}: (damaged|unreadable)"):
        read(path)
    _, log = read(path, on_bad_input="skip")
    assert sum(log.skipped.values()) == 1


def test_a_broken_array_keeps_what_came_before(tmp_path: Path) -> None:
    path = put(tmp_path / "a.json", b'[{"text":"a"},{"text":"b"} {"text":"c"}]')
    with pytest.raises(UserError, match="after element 2: broken JSON"):
        read(path)
    documents, log = read(path, on_bad_input="skip")
    assert ([document.text for document in documents], dict(log.skipped)) == (["a", "b"], {"broken JSON": 1})
    assert read(put(tmp_path / "b.json", b'[{"text":"a"}'), on_bad_input="skip")[1].skipped == {"broken JSON": 1}


# --------------------------------------------------------------------------------------------------------------- fuzzed


@given(
    records=st.lists(
        st.dictionaries(
            st.sampled_from(["text", "a", "字"]),
            st.text(max_size=30) | st.integers() | st.none() | st.lists(st.floats(allow_nan=False), max_size=3),
            max_size=3,
        ),
        max_size=12,
    ),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    buffer_bytes=st.integers(4, 64),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arrays_in_pieces_equal_arrays_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    records: list[dict[str, Any]],
    indent: int | None,
    ascii_only: bool,
    buffer_bytes: int,
) -> None:
    monkeypatch.setattr("arriero.data.sources._BUFFER_BYTES", buffer_bytes)
    content = json.dumps(records, indent=indent, ensure_ascii=ascii_only)
    path = put(tmp_path / "a.json", content.encode("utf-8", "surrogatepass"))
    documents, log = read(path, on_bad_input="skip")
    strings = [record["text"] for record in records if isinstance(record.get("text"), str)]
    cleaned = [text.replace("\r\n", "\n").replace("\ufeff", "") for text in strings]
    assert [document.text for document in documents] == [text for text in cleaned if text.strip()]
    assert len(documents) + sum(log.skipped.values()) == len(records)


@given(
    content=st.binary(max_size=200)
    | st.lists(
        st.sampled_from([*MIXED, b"\xff", b"\xef\xbb\xbf", b"{", b"[", b"]", b",", b'"', b"\x1f\x8b\x08", b"PAR1"])
    ).map(b"\n".join),
    name=st.sampled_from(["a.txt", "a.jsonl", "a.json", "a.parquet", "a.arrow", "a.jsonl.gz", "a.txt.zst"]),
    policy=st.sampled_from(["error", "skip", "replace"]),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_input_ends_in_a_traceback(tmp_path: Path, content: bytes, name: str, policy: str) -> None:
    path = put(tmp_path / name, content)
    try:
        documents, log = read(path, on_bad_input=policy)
    except UserError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert (str(path) in refusal and policy == "error") or not refusal
    if not refusal:
        assert documents or log.skipped or not content.strip(b"\xef\xbb\xbf \t\r\n\x0b\x0c[]{}")
        for document in documents:
            document.text.encode()


def _arrow_bytes(texts: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema({"text": pa.string()})) as writer:
        writer.write_table(pa.table({"text": texts}), max_chunksize=2)
    return sink.getvalue().to_pybytes()


def _parquet_bytes(texts: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    "txt": lambda texts: "=".join(texts).encode(),
    "jsonl": lambda texts: lines(*({"text": text} for text in texts)),
    "json": lambda texts: json.dumps([{"text": text} for text in texts]).encode(),
    "parquet": _parquet_bytes,
    "arrow": _arrow_bytes,
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@given(
    texts=st.lists(st.text("aß字= \n", max_size=9).map(lambda text: text.replace("=", "")), min_size=1, max_size=7),
    format=st.sampled_from(sorted(FORMATS)),
    compression=st.sampled_from(sorted(COMPRESSIONS)),
    mutation=st.sampled_from(["none", "cut", "flip", "insert", "remove", "twice"]),
    where=st.floats(0, 1),
    value=st.integers(1, 255),
    outside=st.booleans(),
    policy=st.sampled_from(["error", "skip", "replace"]),
)
@settings(
    max_examples=600, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damaged_files_of_every_format(
    tmp_path: Path,
    texts: list[str],
    format: str,
    compression: str,
    mutation: str,
    where: float,
    value: int,
    outside: bool,
    policy: str,
) -> None:
    """Damage to the content and to its compression: a UserError under ``error``, else all that is lost is counted."""
    content = FORMATS[format](texts)
    if outside:
        content = COMPRESSIONS[compression](content)
    at = int(where * max(0, len(content) - 1))
    if content:
        content = {
            "none": content,
            "cut": content[:at],
            "flip": content[:at] + bytes([content[at] ^ value]) + content[at + 1 :],
            "insert": content[:at] + bytes([value]) + content[at:],
            "remove": content[:at] + content[at + 1 :],
            "twice": content + content,
        }[mutation]
    if not outside:
        content = COMPRESSIONS[compression](content)
    path = put(tmp_path / f"a.{format}{compression}", content)
    listed: list[Note] = []
    log = ReadLog(each=listed.append)
    options = ReadOptions(on_bad_input=policy, document_separator="=")
    try:
        documents = list(read_documents(list_files([path])[0], options, log))
    except UserError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert policy == "error"
        assert str(path) in refusal
        assert mutation != "none"
        return
    assert log.skipped.total() + log.replaced == sum(note.documents for note in listed)
    for document in documents:
        document.text.encode()
    if mutation == "none":
        assert [document.text for document in documents] == [text for text in texts if text.strip()]
        # an empty piece at the very end of a text is the end of the one before
        wanted = len(texts) - (format == "txt" and not texts[-1])
        assert len(documents) + log.skipped.total() == max(wanted, not content or wanted == 0)


def test_offsets_that_point_outside_a_table(tmp_path: Path) -> None:
    """Found by the fuzz above: Arrow reads on in somebody else's memory, and the process ends."""
    content = _arrow_bytes(["abc", "def"])
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 3, 6))
    wrong = b"".join(number.to_bytes(4, "little") for number in (0, 1 << 30, 1 << 30))
    assert content.count(offsets) == 1
    path = put(tmp_path / "a.arrow", content.replace(offsets, wrong))
    with pytest.raises(UserError, match=r"a\.arrow.*: damaged arrow file"):
        read(path)
    documents, log = read(path, on_bad_input="skip")
    assert (documents, dict(log.skipped)) == ([], {"damaged arrow file": 1})


def test_a_column_whose_name_is_no_utf8(tmp_path: Path) -> None:
    """Found by the fuzz above."""
    path = put(tmp_path / "a.parquet", _parquet_bytes(["a"]).replace(b"text", b"te\xf4t"))
    documents, log = read(path, on_bad_input="skip")
    assert (documents, sum(log.skipped.values())) == ([], 1)
