"""Several machines' shares of a preparation, merged, against one machine's."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
import zstandard

from arriero.data.plan import Progress, list_preparation
from arriero.data.prepare import prepare
from arriero.data.shards import open_dataset
from arriero.data.shared_preparation import ShardNumber, _chosen, merge_shards, parse_shard, prepare_shard
from arriero.data.sources import ReadLog, ReadOptions, SourceFile, read_documents
from arriero.errors import UserError

COUNT = 3
OPTIONS: dict[str, Any] = {"on_bad_input": "skip", "validation_split": 0.2, "document_separator": "=="}


def stories(count: int, name: str = "") -> list[str]:
    return [f"Story {name} {number}: {number * 37 % 101} sacks over pass {number}." for number in range(count)]


def jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def content(folder: Path) -> dict[str, str]:
    return {path.name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in sorted(folder.iterdir())}


def beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}"))


def shard_all(source: Any, out: Path, tokenizer: Any, numbers: tuple[int, ...] = (2, 0, 1), **options: Any) -> None:
    for number in numbers:
        prepare_shard(source, f"{number}/{COUNT}", tokenizer=tokenizer, out=out, **options)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches, parts and shard files in a few kilobytes."""
    monkeypatch.setattr("arriero.data.batches._BATCH_BYTES", 700)
    monkeypatch.setattr(sys.modules["arriero.data.prepare"], "_PART_BYTES", 2000)
    monkeypatch.setattr("arriero.data.parts._TABLE_ROWS", 40)
    monkeypatch.setattr("arriero.data.shards._SHARD_BYTES", 1800)
    monkeypatch.setattr("arriero.data.shared_preparation._MERGE_TOKENS", 300)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Every format, plain and compressed, bad lines among good ones; edges of the shares fall inside of files."""
    folder = tmp_path / "in"
    lines = [json.dumps({"text": text}) for text in stories(90, "a")]
    for place, bad in ((3, "broken"), (30, ""), (44, '{"text": 1}'), (60, '{"body": "b"}'), (80, '{"text": " "}')):
        lines.insert(place, bad)
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(lines) + "\r\n")
    (folder / "b.json").write_text(json.dumps([{"text": text} for text in ["", *stories(25, "b")]] + [{"body": 1}]))
    (folder / "c.txt").write_text("==".join([*stories(25, "c"), " ", "last"]))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(jsonl(tmp_path / "d", stories(60, "d")).read_bytes()))
    packed = zstandard.ZstdCompressor().compress(jsonl(tmp_path / "e", stories(60, "e")).read_bytes())
    (folder / "e.jsonl").write_bytes(packed)  # in spite of its name
    jsonl(folder / "f.jsonl", [*stories(70, "f"), "ends\u2028here"])
    (folder / "g.txt").write_text("")
    (folder / "h.jsonl").write_bytes(b'{"text": "cut \xff"}\n{"text": "no line break at the end"}')
    return folder


# ---------------------------------------------------------------------------------------------------------- the same bytes


def test_merged_shards_have_the_bytes_of_one_machine(
    tmp_path: Path, tokenizer: Any, corpus: Path, small_parts: None
) -> None:
    whole = prepare(corpus, tokenizer=tokenizer, out=tmp_path / "one", **OPTIONS)
    out = tmp_path / "out"
    shard_all(corpus, out, tokenizer, **OPTIONS)
    merged = merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS)
    assert content(out) == content(tmp_path / "one")
    assert beside(out) == []
    manifest = open_dataset(out).manifest
    assert len(manifest["splits"]["train"]["shards"]) > 2
    assert manifest["splits"]["validation"]["documents"] > 20
    assert {"broken JSON", "empty", "whitespace only", "empty file", "invalid UTF-8"} <= manifest["skipped"].keys()
    assert (merged.documents, merged.tokens, merged.skipped) == (whole.documents, whole.tokens, whole.skipped)
    assert (merged.engine, merged.share_compared, merged.cache_hit) == ("gigatoken", whole.share_compared, False)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_any_number_of_machines(tmp_path: Path, tokenizer: Any, corpus: Path, small_parts: None, count: int) -> None:
    """More shards than files leave some without a document."""
    prepare(corpus, tokenizer=tokenizer, out=tmp_path / "one", **OPTIONS)
    out = tmp_path / "out"
    results = [
        prepare_shard(corpus, f"{number}/{count}", tokenizer=tokenizer, out=out, **OPTIONS) for number in range(count)
    ]
    assert (min(result.documents for result in results) == 0) == (count == 40)
    merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS)
    assert content(out) == content(tmp_path / "one")


def test_tables_lie_in_one_shard_each(tmp_path: Path, tokenizer: Any, small_parts: None) -> None:
    for name in "abcd":
        texts = [None if number % 9 == 4 else text for number, text in enumerate(stories(50, name))]
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": texts}), tmp_path / f"in/{name}.parquet")
    prepare(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / "one", on_bad_input="skip")
    shard_all(tmp_path / "in", tmp_path / "out", tokenizer, on_bad_input="skip")
    merge_shards(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip")
    assert content(tmp_path / "out") == content(tmp_path / "one")


@pytest.mark.parametrize("fraction", [0.0, 1e-12, 1 - 1e-12])
def test_no_part_is_empty_without_need(tmp_path: Path, tokenizer: Any, small_parts: None, fraction: float) -> None:
    """The one document that crosses over is chosen among all, and of copies it is the first, on any machine."""
    source = jsonl(tmp_path / "a.jsonl", stories(20) * 3)
    prepare(source, tokenizer=tokenizer, out=tmp_path / "one", validation_split=fraction)
    shard_all(source, tmp_path / "out", tokenizer, validation_split=fraction)
    merge_shards(source, tokenizer=tokenizer, out=tmp_path / "out", validation_split=fraction)
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_the_proof_is_counted_as_one_machine_counts_it(
    tmp_path: Path, tokenizer: Any, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes reach into the second shard; each shard compares its own beginning besides."""
    source = jsonl(tmp_path / "a.jsonl", stories(1000))
    size = source.stat().st_size
    monkeypatch.setattr("arriero.data.tokenizer._PROOF_BYTES", size // 2)
    whole = prepare(source, tokenizer=tokenizer, out=tmp_path / "one")
    assert 0.4 < whole.share_compared < 0.9
    shard_all(source, tmp_path / "out", tokenizer)
    notes = [json.loads(path.read_text()) for path in tmp_path.glob(".out.shards/*/shard.json")]
    assert [note["share_compared"] for note in notes] == [1.0] * COUNT
    merge_shards(source, tokenizer=tokenizer, out=tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_each_line_is_read_by_one_shard(tmp_path: Path) -> None:
    """Random lines and edges, also on line breaks and in the middle of a character."""
    draw = random.Random(0)
    options, path = ReadOptions(on_bad_input="skip"), tmp_path / "a.jsonl"
    for _ in range(200):
        texts = ["é" * draw.randrange(12) for _ in range(draw.randrange(1, 12))]
        lines = [json.dumps({"text": text}, ensure_ascii=False) if text else draw.choice(["", "bad"]) for text in texts]
        path.write_bytes("\n".join(lines).encode() + draw.choice([b"", b"\n", b"\n\n"]))
        whole, size = ReadLog(), path.stat().st_size
        expected = list(read_documents([SourceFile(path, "a", "lines")], options, whole))
        edges = sorted({0, size, *(draw.randrange(size + 1) for _ in range(draw.randrange(4)))})
        spans = [SourceFile(path, "a", "lines", *edge) for edge in pairwise(edges)]
        logs = [ReadLog() for _ in spans]
        found = [
            document for span, log in zip(spans, logs, strict=True) for document in read_documents([span], options, log)
        ]
        assert found == expected, (lines, edges)
        assert sum((log.skipped for log in logs), Counter()) == whole.skipped
        assert [line for log in logs for line in log.examples] == whole.examples
        assert sum(log.bytes_read() for log in logs) == size


def test_shares_are_equal_stretches(tmp_path: Path, tokenizer: Any) -> None:
    source = jsonl(tmp_path / "a.jsonl", stories(3000))
    listed = list_preparation(source, tokenizer=tokenizer)
    spans = [_chosen(listed, ShardNumber(number, 7)).files[0] for number in range(7)]
    size = source.stat().st_size
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == size
    assert all(size // 7 <= (span.stop or 0) - span.start <= size // 7 + 1 for span in spans)


# ------------------------------------------------------------------------------------------------- killed and repeated


PROGRAM = """
import os, sys
from arriero.data.shared_preparation import merge_shards, prepare_shard
source, tokenizer, out, what, die_at = sys.argv[1:]
sys.modules["arriero.data.batches"]._BATCH_BYTES = 700
sys.modules["arriero.data.prepare"]._PART_BYTES = 2000
sys.modules["arriero.data.shards"]._SHARD_BYTES = 1800
sys.modules["arriero.data.shared_preparation"]._MERGE_TOKENS = 300
seen = []
def progress(now):
    seen.append(now.stage)
    if f"{now.stage} {seen.count(now.stage)}" == die_at:
        os.kill(os.getpid(), 9)
options = dict(tokenizer=tokenizer, out=out, progress=progress, on_bad_input="skip", validation_split=0.2,
               document_separator="==")
if what == "merge":
    merge_shards(source, **options)
else:
    prepare_shard(source, what, **options)
print(seen.count("encoding"))
"""


def start(corpus: Path, tokenizer_folder: Path, out: Path, what: str, die_at: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, corpus, tokenizer_folder, out, what, die_at]
    return subprocess.Popen([str(part) for part in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_killed_shards_and_merges_go_on(
    tmp_path: Path, tokenizer: Any, tokenizer_folder: Path, corpus: Path, small_parts: None
) -> None:
    """Three at once, as three machines would; one of them is killed after some parts, and so is the merge."""
    prepare(corpus, tokenizer=tokenizer, out=tmp_path / "one", **OPTIONS)
    out = tmp_path / "out"
    first = [
        start(corpus, tokenizer_folder, out, f"{number}/{COUNT}", "encoding 8" if number == 1 else "")
        for number in range(COUNT)
    ]
    outputs = [process.communicate(timeout=120) for process in first]
    assert [process.returncode for process in first] == [0, -9, 0], outputs
    with pytest.raises(UserError, match=r"shard 1/3 isn't finished"):
        merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS)
    assert not out.exists()
    again = start(corpus, tokenizer_folder, out, f"1/{COUNT}")
    said, complaint = again.communicate(timeout=120)
    assert again.returncode == 0, complaint
    assert "going on after" in complaint
    merge = start(corpus, tokenizer_folder, out, "merge", "merging 7")
    assert merge.communicate(timeout=120)
    assert merge.returncode == -9
    assert not out.exists()
    assert int(said) > 0
    for number in range(COUNT):  # a job that is put into the queue again finds its shard
        assert prepare_shard(corpus, f"{number}/{COUNT}", tokenizer=tokenizer, out=out, **OPTIONS).cache_hit
    merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS)
    assert content(out) == content(tmp_path / "one")
    assert beside(out) == []


def test_what_is_merged_is_a_cache_hit_for_all(tmp_path: Path, tokenizer: Any, corpus: Path) -> None:
    out = tmp_path / "out"
    shard_all(corpus, out, tokenizer, **OPTIONS)
    merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS).cache_hit
    assert prepare(corpus, tokenizer=tokenizer, out=out, **OPTIONS).cache_hit
    assert prepare_shard(corpus, "1/3", tokenizer=tokenizer, out=out, **OPTIONS).cache_hit
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert beside(out) == []
    other = {**OPTIONS, "validation_split": 0.3}
    with pytest.raises(UserError, match="no shards lie beside the dataset, which isn't that of these inputs"):
        merge_shards(corpus, tokenizer=tokenizer, out=out, **other)
    assert not prepare_shard(corpus, "1/3", tokenizer=tokenizer, out=out, **other).cache_hit
    (corpus / "f.jsonl").write_bytes((corpus / "f.jsonl").read_bytes().replace(b"Story f 7:", b"Story f 8:"))
    results = [prepare_shard(corpus, f"{number}/3", tokenizer=tokenizer, out=out, **OPTIONS) for number in range(3)]
    assert not all(result.cache_hit for result in results)  # those that read the file


# -------------------------------------------------------------------------------------------------------------- refused


def test_a_missing_shard_is_named(tmp_path: Path, tokenizer: Any, corpus: Path) -> None:
    with pytest.raises(UserError, match=r"there is no shard in .*\.out\.shards"):
        merge_shards(corpus, tokenizer=tokenizer, out=tmp_path / "out", **OPTIONS)
    shard_all(corpus, tmp_path / "out", tokenizer, (0,), **OPTIONS)
    with pytest.raises(UserError, match=r"shard 1/3, 2/3 isn't finished"):
        merge_shards(corpus, tokenizer=tokenizer, out=tmp_path / "out", **OPTIONS)
    prepare_shard(corpus, "1/2", tokenizer=tokenizer, out=tmp_path / "out", **OPTIONS)
    with pytest.raises(UserError, match=r"holds shards of 2 and of 3"):
        merge_shards(corpus, tokenizer=tokenizer, out=tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("what", ["option", "file", "tokenizer"])
def test_a_shard_of_something_else_is_refused(
    tmp_path: Path, tokenizer: Any, tokenizer_folder: Path, corpus: Path, what: str
) -> None:
    out, options, given = tmp_path / "out", dict(OPTIONS), tokenizer
    shard_all(corpus, out, tokenizer, (0, 2), **OPTIONS)
    if what == "option":
        options["validation_split"] = 0.1
    elif what == "tokenizer":
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["normalizer"] = {"type": "NFC"}
        changed = tmp_path / "changed"
        changed.mkdir()
        (changed / "tokenizer.json").write_text(json.dumps(state))
        (changed / "tokenizer_config.json").write_bytes((tokenizer_folder / "tokenizer_config.json").read_bytes())
        given = changed
    else:
        jsonl(corpus / "z.jsonl", ["one more"])
    shard_all(corpus, out, given, (1,), **options)
    theirs = list_preparation(corpus, tokenizer=given, **options).fingerprint
    if what == "file":
        (corpus / "z.jsonl").unlink()
    ours = list_preparation(corpus, tokenizer=tokenizer, **OPTIONS).fingerprint
    with pytest.raises(UserError, match=f"shard 1/3 was made from other inputs.*{theirs}.*{ours}"):
        merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS)


def test_an_input_that_changed_meanwhile_is_refused(tmp_path: Path, tokenizer: Any, corpus: Path) -> None:
    out = tmp_path / "out"
    shard_all(corpus, out, tokenizer, **OPTIONS)
    changed = corpus / "c.txt"
    data, stamp = changed.read_bytes(), changed.stat().st_mtime_ns
    changed.write_bytes(data.replace(b"last", b"LAST"))  # as long as before
    with pytest.raises(UserError, match=r"c\.txt was changed since shard ./3 was made of it: its xxh3 was \w+ and is"):
        merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS)
    changed.write_bytes(data)  # a copy with another time is the same file
    os.utime(changed, ns=(stamp + 10**9, stamp + 10**9))
    assert merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS).documents


def test_a_file_that_changed_between_two_shards_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", stories(100)), tmp_path / "out"
    shard_all(source, out, tokenizer, (0, 1))
    source.write_bytes(source.read_bytes().replace(b"Story  99:", b"Story  98:"))
    shard_all(source, out, tokenizer, (2,))
    with pytest.raises(UserError, match=r"had xxh3 \w+ for shard 0/3 and \w+ for shard 2/3"):
        merge_shards(source, tokenizer=tokenizer, out=out)


def test_a_damaged_shard_is_refused(tmp_path: Path, tokenizer: Any, corpus: Path) -> None:
    out = tmp_path / "out"
    shard_all(corpus, out, tokenizer, **OPTIONS)
    damaged = tmp_path / ".out.shards/1-of-3/train-00000.bin"
    data = bytearray(damaged.read_bytes())
    data[5] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(UserError, match=r"train-00000\.bin isn't what shard 1/3 wrote"):
        merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS)
    assert not out.exists()
    damaged.write_bytes(data[:-2])
    assert not prepare_shard(corpus, "1/3", tokenizer=tokenizer, out=out, **OPTIONS).cache_hit
    assert merge_shards(corpus, tokenizer=tokenizer, out=out, **OPTIONS).documents


def test_no_tokens_at_all_is_said_at_the_merge(tmp_path: Path, tokenizer: Any) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"body": "a"}\n' * 30)
    shard_all(source, out, tokenizer, on_bad_input="skip")
    with pytest.raises(UserError, match=r"0 tokens in .*30 × field 'text' is missing; the fields are body"):
        merge_shards(source, tokenizer=tokenizer, out=out, on_bad_input="skip")


@pytest.mark.parametrize("text", ["3/3", "1", "a/3", "-1/3", "0/0", "1/2/3"])
def test_nonsense_numbers_are_refused(tmp_path: Path, tokenizer: Any, text: str) -> None:
    with pytest.raises(UserError, match="there is no shard"):
        parse_shard(text)


def test_bad_input_stops_a_shard_and_leaves_nothing(tmp_path: Path, tokenizer: Any) -> None:
    source = jsonl(tmp_path / "a.jsonl", stories(90))
    source.write_text(source.read_text() + "broken\n")
    for number in (0, 1):
        prepare_shard(source, f"{number}/3", tokenizer=tokenizer, out=tmp_path / "out")
    with pytest.raises(UserError, match=r"a\.jsonl line 91: broken JSON"):
        prepare_shard(source, "2/3", tokenizer=tokenizer, out=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / ".out.shards").iterdir()) == ["0-of-3", "1-of-3"]


# --------------------------------------------------------------------------------------------------------------- engine


def test_a_difference_in_one_shard_makes_all_use_tokenizers(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", stories(90)), tmp_path / "out"
    right = sys.modules["arriero.data.tokenizer"]._encode_fast

    def wrong(fast: Any, texts: list[str]) -> tuple[Any, Any]:
        ids, lengths = right(fast, texts)
        for place in (place for place, text in enumerate(texts) if "Story  45:" in text):
            ids = ids.copy()
            ids[lengths[:place].sum()] ^= 1
        return ids, lengths

    monkeypatch.setattr("arriero.data.tokenizer._encode_fast", wrong)
    shard_all(source, out, tokenizer)
    with pytest.raises(
        UserError, match=r"shard 1/3 was encoded by tokenizers \(gigatoken and .* 0/3, 2/3 by gigatoken"
    ):
        merge_shards(source, tokenizer=tokenizer, out=out)
    results = [prepare_shard(source, f"{number}/3", tokenizer=tokenizer, out=out) for number in range(3)]
    assert [(result.engine, result.cache_hit) for result in results] == [
        ("tokenizers", False), ("tokenizers", True), ("tokenizers", False),
    ]  # fmt: skip
    assert "as shard 1/3 does: gigatoken and tokenizers differ on" in caplog.text
    merge_shards(source, tokenizer=tokenizer, out=out)
    prepare(source, tokenizer=tokenizer, out=tmp_path / "one")
    assert content(out) == content(tmp_path / "one")
    assert open_dataset(out).manifest["engine"] == "tokenizers"


def test_shards_can_be_verified(tmp_path: Path, tokenizer: Any, small_parts: None, monkeypatch: Any) -> None:
    monkeypatch.setattr("arriero.data.tokenizer._PROOF_BYTES", 500)
    source, out = jsonl(tmp_path / "a.jsonl", stories(90)), tmp_path / "out"
    shard_all(source, out, tokenizer)
    with pytest.raises(UserError, match=r"of shard 0/3 only .*% of the text was compared"):
        merge_shards(source, tokenizer=tokenizer, out=out, verify=True)
    shard_all(source, out, tokenizer, verify=True)
    assert merge_shards(source, tokenizer=tokenizer, out=out, verify=True).share_compared == 1.0
    prepare(source, tokenizer=tokenizer, out=tmp_path / "one", verify=True)
    assert content(out) == content(tmp_path / "one")


def test_progress_of_a_shard_and_a_merge_reaches_the_end(
    tmp_path: Path, tokenizer: Any, corpus: Path, small_parts: None, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(COUNT):
        seen: list[Progress] = []
        prepare_shard(
            corpus, f"{number}/{COUNT}", tokenizer=tokenizer, out=tmp_path / "out", progress=seen.append, **OPTIONS
        )
        done = [now.bytes_done for now in seen if now.stage in ("encoding", "writing")]
        assert done == sorted(done)
        assert done[-1] == seen[-1].bytes_total < sum(path.stat().st_size for path in corpus.iterdir())
    seen = []
    with caplog.at_level(logging.WARNING):
        merge_shards(corpus, tokenizer=tokenizer, out=tmp_path / "out", progress=seen.append, **OPTIONS)
    assert [now.stage for now in seen] == [*["merging"] * (len(seen) - 1), "writing"]
    assert seen[-2].bytes_done == seen[-2].bytes_total
