from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from tokenizers import processors

from arriero.data.batches import frame
from arriero.data.plan import Progress, hash_inputs, list_preparation
from arriero.data.prepare import PrepareResult, prepare
from arriero.data.shards import Dataset, open_dataset
from arriero.data.tokenizer import BOS, EOS, Encoder, load_tokenizer, train_tokenizer
from arriero.errors import UserError

prepare_file = sys.modules["arriero.data.prepare"]


def jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def stories(count: int) -> list[str]:
    return [
        f"Story {number}: the mule carries {number * 37 % 101} sacks over pass {number}." for number in range(count)
    ]


def documents(dataset: Dataset, split: str) -> list[list[int]]:
    return [ids.tolist() for _, ids in dataset.splits[split].iterate_documents()] if split in dataset.splits else []


def decoded(out: Path, tokenizer: Any, split: str) -> list[str]:
    """The texts of a split, BOS and EOS taken off."""
    found = documents(open_dataset(out), split)
    bos = int(open_dataset(out).manifest["tokenizer"]["add_bos"])
    return [tokenizer.decode(ids[bos:-1]) for ids in found]


def content(folder: Path) -> dict[str, str]:
    return {path.name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in sorted(folder.iterdir())}


def beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}"))


# ------------------------------------------------------------------------------------------------------------ documents


def test_every_document_is_stored_once_and_whole(tmp_path: Path, tokenizer: Any) -> None:
    texts = stories(500)
    result = prepare([jsonl(tmp_path / "a.jsonl", texts)], tokenizer=tokenizer, out=tmp_path / "out")
    train, held_out = (decoded(tmp_path / "out", tokenizer, split) for split in ("train", "validation"))
    assert sorted(train + held_out) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]  # in the order of the source
    dataset = open_dataset(tmp_path / "out")
    assert (result.documents, result.validation_documents) == (500, len(held_out))
    assert result.tokens == sum(stream.tokens for stream in dataset.splits.values())
    assert result.tokens == sum(len(ids) for split in dataset.splits for ids in documents(dataset, split))
    assert dataset.text_bytes == {
        "train": sum(len(text.encode()) for text in train),
        "validation": sum(len(text.encode()) for text in held_out),
    }
    assert (result.engine, result.share_compared, result.cache_hit, result.skipped) == ("gigatoken", 1.0, False, 0)
    assert dataset.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("single", ["$A", f"{BOS} $A", f"{BOS} $A {EOS}"])
def test_exactly_one_bos_and_one_eos_whatever_the_template_does(
    tmp_path: Path, tokenizer_folder: Path, single: str
) -> None:
    """cases.md A07."""
    tokenizer = load_tokenizer(tokenizer_folder)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(BOS, bos), (EOS, eos)]
    )
    source = jsonl(tmp_path / "a.jsonl", [*stories(4), f"with {EOS} and {BOS} inside"])
    prepare(source, tokenizer=tokenizer, out=tmp_path / "on", add_bos=True, validation_split=0)
    found = documents(open_dataset(tmp_path / "on"), "train")
    assert len(found) == 5
    assert all(ids[0] == bos and ids[-1] == eos for ids in found)
    assert sum(ids.count(bos) for ids in found) == sum(ids.count(eos) for ids in found) == 5

    result = prepare(source, tokenizer=tokenizer, out=tmp_path / "auto", validation_split=0)
    assert result.add_bos == single.startswith(BOS)
    found = documents(open_dataset(tmp_path / "auto"), "train")
    assert sum(ids.count(bos) for ids in found) == 5 * result.add_bos
    assert sum(ids.count(eos) for ids in found) == 5


def test_lengths_count_the_separator(tmp_path: Path, tokenizer: Any) -> None:
    """cases.md A08: documents of 3, 5 and 8 tokens are stored as 4, 6 and 9."""
    texts = ["123 456", "123 456 789", "1 2 3 4 5"]
    plain = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    source = jsonl(tmp_path / "a.jsonl", texts)
    result = prepare(source, tokenizer=tokenizer, out=tmp_path / "out", add_bos=False, validation_split=0)
    stream = open_dataset(tmp_path / "out").splits["train"]
    lengths = stream.document_lengths()
    assert lengths.tolist() == [length + 1 for length in plain]
    ends = np.cumsum(lengths)
    flat = stream.read(0, stream.tokens)
    assert flat[ends - 1].tolist() == [tokenizer.eos_token_id] * 3
    assert (flat == tokenizer.eos_token_id).sum() == 3
    assert lengths.sum() == stream.tokens == result.tokens


def test_framing() -> None:
    ids, lengths = np.array([5, 6, 7, 8], dtype=np.uint32), np.array([3, 1])
    framed, longer = frame(ids, lengths, 1, 2, np.dtype("u2"))
    assert (framed.tolist(), longer.tolist(), framed.dtype) == ([1, 5, 6, 7, 2, 1, 8, 2], [5, 3], np.uint16)
    framed, longer = frame(ids, lengths, None, 2, np.dtype("i4"))
    assert (framed.tolist(), longer.tolist()) == ([5, 6, 7, 2, 8, 2], [4, 2])


def test_the_table_says_where_each_document_came_from(tmp_path: Path, tokenizer: Any) -> None:
    first = jsonl(tmp_path / "in/a.jsonl", ["", *stories(60), " "])
    (tmp_path / "in/b.txt").write_text("one\n==\ntwo\n==\nthree")
    prepare(
        tmp_path / "in", tokenizer=tokenizer, out=tmp_path / "out", validation_split=0.2, document_separator="\n==\n"
    )
    table = pq.read_table(tmp_path / "out/documents-00000.parquet").to_pylist()
    texts = {("a.jsonl", row): json.loads(line)["text"] for row, line in enumerate(first.read_text().splitlines(), 1)}
    texts |= {("b.txt", 1): "one", ("b.txt", 2): "two", ("b.txt", 3): "three"}
    stored = {split: decoded(tmp_path / "out", tokenizer, split) for split in ("train", "validation")}
    assert len(table) == 63
    for entry in table:
        text = texts[entry["file"], entry["row"]]
        assert stored[entry["split"]][entry["index"]] == text
        assert entry["text_bytes"] == len(text.encode())
        assert entry["xxh3"] == xxhash.xxh3_64_intdigest(text.encode())


def test_documents_that_are_lost_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    """cases.md A10 and A15."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text":""}\n{"text":"a"}\n{"text":"  "}\n{"text":""}\n{"text":"b"}\n{"txt":1}\n{"text":"\xff"}\n'
    )
    with pytest.raises(UserError, match=r"a\.jsonl line 6: field 'text' is missing"):
        prepare(path, tokenizer=tokenizer, out=tmp_path / "out")
    result = prepare(path, tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip", validation_split=0)
    reasons = {"empty": 2, "field 'text' is missing": 1, "invalid UTF-8": 1, "whitespace only": 1}
    assert (result.documents, result.skipped, result.skipped_reasons) == (2, 5, reasons)
    assert decoded(tmp_path / "out", tokenizer, "train") == ["a", "b"]
    manifest = open_dataset(tmp_path / "out").manifest
    assert manifest["skipped"] == reasons
    assert f"{path} line 6: field 'text' is missing" in manifest["examples"]
    result = prepare(path, tokenizer=tokenizer, out=tmp_path / "fixed", on_bad_input="replace", validation_split=0)
    assert (result.documents, result.replaced) == (3, 1)


def test_all_that_is_lost_or_repaired_is_listed(tmp_path: Path, tokenizer: Any) -> None:
    """The first hundred are in the manifest, all are in a file of their own."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": ""}\n{"text": "ok"}\n{"text": 1}\n' * 80 + b'{"text": "\xff"}\n')
    out = tmp_path / "out"
    result = prepare(path, tokenizer=tokenizer, out=out, on_bad_input="replace")
    listed = [json.loads(line) for line in (out / "skipped-00000.jsonl").read_text().splitlines()]
    assert (result.skipped, result.replaced, len(listed)) == (160, 1, 161)
    assert listed[0] == {"file": str(path), "place": "line 1", "reason": "empty", "done": "skipped"}
    assert listed[-1] == {"file": str(path), "place": "line 241", "reason": "invalid UTF-8", "done": "replaced"}
    wanted = [f"line {number}" for number in range(1, 241) if number % 3 != 2]
    assert [entry["place"] for entry in listed[:-1]] == wanted
    manifest = open_dataset(out).manifest
    assert len(manifest["examples"]) == 100
    assert manifest["lists"][0]["bytes"] == (out / "skipped-00000.jsonl").stat().st_size
    assert prepare(path, tokenizer=tokenizer, out=out, on_bad_input="replace").cache_hit
    prepare(jsonl(tmp_path / "b.jsonl", ["all", "good"]), tokenizer=tokenizer, out=out)
    assert not (out / "skipped-00000.jsonl").exists()


def test_files_that_cannot_be_read_are_skipped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    """A link to nothing and a pipe, which nobody may wait for."""
    folder, out = tmp_path / "in", tmp_path / "out"
    jsonl(folder / "b.jsonl", stories(3))
    (folder / "a.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"a\.txt: No such file or directory"):
        prepare(folder, tokenizer=tokenizer, out=out)
    os.mkfifo(folder / "c.txt")
    result = prepare(folder, tokenizer=tokenizer, out=out, on_bad_input="skip")
    assert (result.documents, result.skipped_reasons) == (3, {"unreadable file": 2})
    assert [json.loads(line)["file"] for line in (out / "skipped-00000.jsonl").read_text().splitlines()] == [
        str(folder / "a.txt"),
        str(folder / "c.txt"),
    ]
    (folder / "a.txt").unlink()
    (folder / "a.txt").write_text("now it can be read")
    result = prepare(folder, tokenizer=tokenizer, out=out, on_bad_input="skip")
    assert (result.documents, result.skipped, result.cache_hit) == (4, 1, False)


def test_a_document_beyond_a_million_tokens_is_kept_whole(tmp_path: Path, tokenizer: Any) -> None:
    giant = " ".join(stories(30_000))
    source = jsonl(tmp_path / "a.jsonl", ["before", giant, "after"])
    result = prepare(source, tokenizer=tokenizer, out=tmp_path / "out", validation_split=0)
    lengths = open_dataset(tmp_path / "out").splits["train"].document_lengths()
    assert (result.documents, result.skipped, len(lengths)) == (3, 0, 3)
    assert lengths[1] > 1_000_000
    assert decoded(tmp_path / "out", tokenizer, "train") == ["before", giant, "after"]


@pytest.mark.parametrize("name", ["empty.txt", "folder/empty.txt", "all.jsonl"])
def test_no_tokens_at_all_leaves_nothing_behind(tmp_path: Path, tokenizer: Any, name: str) -> None:
    """cases.md A10."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"text": ""}\n{"text": " "}\n' if name == "all.jsonl" else "")
    source = path.parent if name.startswith("folder") else path
    with pytest.raises(UserError, match=rf"0 tokens in .*{path.name}"):
        prepare(source, tokenizer=tokenizer, out=tmp_path / "made/out")
    assert list((tmp_path / "made").iterdir()) == []


def test_a_wrong_field_everywhere_names_those_that_exist(tmp_path: Path, tokenizer: Any) -> None:
    source = jsonl(tmp_path / "a.jsonl", stories(3))
    with pytest.raises(UserError, match="3 × field 'body' is missing; the fields are text"):
        prepare(source, tokenizer=tokenizer, out=tmp_path / "out", text_field="body", on_bad_input="skip")


def test_a_document_without_tokens_is_skipped(tmp_path: Path, tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("mule", "")
    result = prepare(
        jsonl(tmp_path / "a.jsonl", ["mule", "a mule"]), tokenizer=tokenizer, out=tmp_path / "out", validation_split=0
    )
    assert (result.documents, result.skipped_reasons) == (1, {"no tokens": 1})


@pytest.mark.parametrize("size", [65_536, 65_537])
def test_ids_are_stored_in_the_type_that_holds_the_vocabulary(
    tmp_path: Path, tokenizer_folder: Path, size: int
) -> None:
    """cases.md A22: the largest id is known, and the type follows the vocabulary, not the text."""
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.add_tokens([f"<{number}>" for number in range(size - len(tokenizer))])
    prepare(jsonl(tmp_path / "a.jsonl", ["a", f"<{size - 401}>"]), tokenizer=tokenizer, out=tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert dataset.manifest["dtype"] == ("uint16" if size == 65_536 else "int32")
    assert dataset.largest_id == size - 1
    assert dataset.manifest["tokenizer"]["vocab_size"] == size


# ----------------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.05, 0.5, 0.999])
def test_the_split_of_ten_documents(tmp_path: Path, tokenizer: Any, fraction: float) -> None:
    """cases.md A19."""
    result = prepare(
        jsonl(tmp_path / "a.jsonl", stories(10)), tokenizer=tokenizer, out=tmp_path / "out", validation_split=fraction
    )
    train, held_out = (decoded(tmp_path / "out", tokenizer, split) for split in ("train", "validation"))
    assert sorted(train + held_out) == sorted(stories(10))
    assert (len(held_out) >= 1) == (fraction > 0)
    assert len(train) >= 1
    assert result.validation_documents == len(held_out)
    assert ("validation" in open_dataset(tmp_path / "out").splits) == (fraction > 0)


@pytest.mark.parametrize("fraction", [1.0, 1.5, -0.1, float("nan")])
def test_nonsense_splits_are_refused(tmp_path: Path, tokenizer: Any, fraction: float) -> None:
    with pytest.raises(UserError, match="makes no sense"):
        prepare(jsonl(tmp_path / "a.jsonl", ["a"]), tokenizer=tokenizer, out=tmp_path / "o", validation_split=fraction)


@pytest.mark.parametrize(("count", "fraction"), [(1, 0.01), (1, 0.999), (2, 0.01), (2, 0.999), (300, 1e-9)])
def test_no_part_is_empty_without_need(tmp_path: Path, tokenizer: Any, count: int, fraction: float) -> None:
    result = prepare(
        jsonl(tmp_path / "a.jsonl", stories(count)), tokenizer=tokenizer, out=tmp_path / "o", validation_split=fraction
    )
    assert result.documents == count
    assert count - result.validation_documents >= 1
    assert (result.validation_documents >= 1) == (count > 1)
    if fraction == 1e-9:  # none falls below it: the smallest hash is held out
        hashes = {text: xxhash.xxh3_64_intdigest(text.encode()) for text in stories(count)}
        assert decoded(tmp_path / "o", tokenizer, "validation") == [min(hashes, key=lambda text: hashes[text])]


def test_the_split_is_stable_when_data_is_added_or_reordered(tmp_path: Path, tokenizer: Any) -> None:
    texts = stories(600)
    prepare(jsonl(tmp_path / "a.jsonl", texts[:400]), tokenizer=tokenizer, out=tmp_path / "a", validation_split=0.1)
    prepare(jsonl(tmp_path / "b.jsonl", texts[::-1]), tokenizer=tokenizer, out=tmp_path / "b", validation_split=0.1)
    train_a, held_a = (set(decoded(tmp_path / "a", tokenizer, split)) for split in ("train", "validation"))
    train_b, held_b = (set(decoded(tmp_path / "b", tokenizer, split)) for split in ("train", "validation"))
    assert held_a < held_b
    assert train_a < train_b
    assert 30 < len(held_b) < 95


# ---------------------------------------------------------------------------------------------------- repeated, changed


def test_the_same_again_touches_nothing(tmp_path: Path, tokenizer: Any, tokenizer_folder: Path) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", stories(20)), tmp_path / "out"
    first = prepare(source, tokenizer=tokenizer, out=out)
    before = {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]}
    second = prepare([source], tokenizer=tokenizer_folder, out=out)
    assert {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]} == before
    assert (first.cache_hit, second.cache_hit, second.mb_per_s) == (False, True, 0.0)
    assert replace(second, cache_hit=False, seconds=first.seconds, mb_per_s=first.mb_per_s) == first
    moved = tmp_path / "elsewhere/a.jsonl"
    moved.parent.mkdir()
    source.rename(moved)
    assert prepare(moved, tokenizer=tokenizer, out=out).cache_hit  # where the files lie doesn't matter


def test_any_change_is_another_fingerprint_and_replaces_the_old_dataset(
    tmp_path: Path, tokenizer: Any, tokenizer_folder: Path
) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", stories(20)), tmp_path / "out"
    other_tokenizer = load_tokenizer(tokenizer_folder)
    other_tokenizer.add_tokens(["sacks"])

    def run(tokenizer: Any = tokenizer, **options: Any) -> PrepareResult:
        return prepare(source, tokenizer=tokenizer, out=out, **options)

    results = [
        run(),
        run(add_bos=False),
        run(validation_split=0.3),
        run(on_bad_input="skip"),
        run(document_separator="x"),
        run(tokenizer=other_tokenizer),
    ]
    jsonl(source, stories(21))
    results.append(run())
    source = source.rename(tmp_path / "b.jsonl")
    results.append(run())
    assert not any(result.cache_hit for result in results)
    assert len({result.fingerprint for result in results}) == len(results)
    assert open_dataset(out).fingerprint == results[-1].fingerprint
    assert beside(out) == []


def test_a_dataset_that_was_cut_off_is_made_again(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """cases.md A17."""
    source, out = jsonl(tmp_path / "a.jsonl", stories(20)), tmp_path / "out"
    prepare(source, tokenizer=tokenizer, out=out)
    whole = content(out)
    path = out / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    assert not prepare(source, tokenizer=tokenizer, out=out).cache_hit
    assert "preparing again" in caplog.text
    assert content(out) == whole


def test_what_is_no_dataset_is_never_overwritten(tmp_path: Path, tokenizer: Any) -> None:
    source = jsonl(tmp_path / "a.jsonl", stories(5))
    with pytest.raises(UserError, match=r"is no dataset but holds a\.jsonl"):
        prepare(source, tokenizer=tokenizer, out=tmp_path)
    with pytest.raises(UserError, match="is a file"):
        prepare(source, tokenizer=tokenizer, out=source)
    out = tmp_path / "out"
    prepare(source, tokenizer=tokenizer, out=out)
    (out / "notes.md").write_text("mine")
    with pytest.raises(UserError, match=r"is a dataset but also holds notes\.md"):
        prepare(source, tokenizer=tokenizer, out=out, validation_split=0)
    assert (out / "notes.md").read_text() == "mine"
    (tmp_path / "new").mkdir()
    assert prepare(source, tokenizer=tokenizer, out=tmp_path / "new").documents == 5


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_file, "write_manifest", full)
    out = tmp_path / "made/out"
    with pytest.raises(UserError, match=r"out can't be written: .*No space left on device"):
        prepare(jsonl(tmp_path / "a.jsonl", stories(5)), tokenizer=tokenizer, out=out)
    assert list(out.parent.iterdir()) == []


def test_bad_options_stop_before_anything_is_made(tmp_path: Path, tokenizer: Any, tokenizer_folder: Path) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", stories(5)), tmp_path / "made/out"
    without_bos, without_eos = load_tokenizer(tokenizer_folder), load_tokenizer(tokenizer_folder)
    without_bos.bos_token = without_eos.eos_token = None
    with pytest.raises(UserError, match="has no BOS token"):
        prepare(source, tokenizer=without_bos, out=out, add_bos=True)
    with pytest.raises(UserError, match="has no EOS token"):
        prepare(source, tokenizer=without_eos, out=out)
    with pytest.raises(UserError, match=r"missing\.jsonl does not exist"):
        prepare(tmp_path / "missing.jsonl", tokenizer=tokenizer, out=out)
    with pytest.raises(UserError, match="on_bad_input is 'ignore'"):
        prepare(source, tokenizer=tokenizer, out=out, on_bad_input="ignore")
    prepare(source, tokenizer=tokenizer, out=out)
    with pytest.raises(UserError, match="is a prepared dataset, not text"):
        prepare(out, tokenizer=tokenizer, out=tmp_path / "again")
    assert prepare(source, tokenizer=without_bos, out=tmp_path / "b").add_bos is False


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", stories(5)), tmp_path / "made/out"

    def meddle(now: Progress) -> None:
        if now.stage == "writing":
            with source.open("a") as file:
                file.write('{"text": "more"}\n')

    with pytest.raises(UserError, match=r"a\.jsonl was changed while it was prepared"):
        prepare(source, tokenizer=tokenizer, out=out, progress=meddle)
    assert list(out.parent.iterdir()) == []


# ------------------------------------------------------------------------------------------------- killed, two at once

PROGRAM = """
import os, sys, time
from pathlib import Path
from arriero.data.prepare import prepare
source, tokenizer, out, die_at, together = sys.argv[1:]
sys.modules["arriero.data.batches"]._BATCH_BYTES = 2000
sys.modules["arriero.data.prepare"]._PART_BYTES = 4000
seen = []
def progress(now):
    seen.append(now.stage)
    if f"{now.stage} {seen.count(now.stage)}" == die_at:
        os.kill(os.getpid(), 9)
    if together and now.stage == "encoding":  # holds the lock until the other one says that it waits for it
        Path(together, "building").touch()
        while not Path(together, "waiting").exists():
            time.sleep(0.01)
    if together and now.stage == "waiting":
        Path(together, "waiting").touch()
print(prepare(source, tokenizer=tokenizer, out=out, progress=progress).cache_hit)
"""


def start(
    source: Path, tokenizer_folder: Path, out: Path, *, die_at: str = "", together: Path | str = ""
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, source, tokenizer_folder, out, die_at, together]
    return subprocess.Popen([str(part) for part in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("die_at", "replacing"), [("encoding 3", False), ("encoding 3", True), ("writing 2", True)])
def test_killed_and_run_again_gives_the_bytes_of_a_clean_run(
    tmp_path: Path,
    tokenizer: Any,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    die_at: str,
    replacing: bool,
) -> None:
    """cases.md A17."""
    source, out = jsonl(tmp_path / "a.jsonl", stories(300)), tmp_path / "out"
    if replacing:
        prepare(source, tokenizer=tokenizer, out=out, validation_split=0)
    process = start(source, tokenizer_folder, out, die_at=die_at)
    process.communicate(timeout=60)
    assert process.returncode == -9
    assert f".{out.name}.partial" in beside(out)
    if replacing:
        assert open_dataset(out).manifest["options"]["validation_split"] == 0  # the old one is whole until the swap
    else:
        assert not out.exists()
    monkeypatch.setattr("arriero.data.batches._BATCH_BYTES", 2000)
    assert not prepare(source, tokenizer=tokenizer, out=out).cache_hit
    assert beside(out) == []
    prepare(source, tokenizer=tokenizer, out=tmp_path / "clean")
    assert content(out) == content(tmp_path / "clean")


KILLED_EVERYWHERE = """
import functools, json, os, sys
from pathlib import Path
import gigatoken, numpy.random, pyarrow.parquet
from arriero.data.prepare import prepare
from arriero.data.tokenizer import load_tokenizer
source, tokenizer, folder, stride = sys.argv[1:]
tokenizer = load_tokenizer(tokenizer)  # once, as is what is imported late
pyarrow.array([0])
prepare_file, batches, parts, shards, sources = (
    sys.modules[f"arriero.data.{name}"] for name in ("prepare", "batches", "parts", "shards", "sources")
)
batches._BATCH_BYTES, prepare_file._PART_BYTES, parts._TABLE_ROWS = 700, 2000, 40
shards._SHARD_BYTES, sources._TABLE_ROWS = 1800, 7

def run(out, die_at):
    \"\"\"A process that prepares, and is killed at the write boundary of that number; (its exit status, boundaries,
    documents that it encoded).\"\"\"
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1], *json.loads(Path(folder, "counts").read_text() or "[0, 0]")
    counts = [0, 0]

    def at_boundary(function):
        @functools.wraps(function)
        def counted(*args, **options):
            counts[0] += 1
            Path(folder, "counts").write_text(json.dumps(counts))
            if counts[0] == die_at:
                os.kill(os.getpid(), 9)
            return function(*args, **options)
        return counted

    for name in ("fsync", "replace", "rename", "unlink", "mkdir"):
        setattr(os, name, at_boundary(getattr(os, name)))

    append = shards.ShardWriter._append
    def append_and_flush(self, ids, lengths):  # so that more is in the files than the last finished part knows of
        append(self, ids, lengths)
        self._bin.flush()
        self._spool.flush()
    shards.ShardWriter._append = at_boundary(append_and_flush)

    encode = prepare_file.Encoder.encode
    def count_and_encode(self, texts, *measured):
        counts[1] += len(texts)
        return encode(self, texts, *measured)
    prepare_file.Encoder.encode = count_and_encode

    prepare(source, tokenizer=tokenizer, out=out, validation_split=0.2, on_bad_input="skip", document_separator="==")
    Path(folder, "counts").write_text(json.dumps(counts))
    os._exit(0)

def content(out):
    return {path.name: path.read_bytes() for path in sorted(Path(out).iterdir())}

def found(out):
    \"\"\"Documents that are in finished parts.\"\"\"
    partial = out.with_name(f".{out.name}.partial")
    if any((place / "dataset.json").exists() for place in (out, partial)):
        return documents
    noted = partial / "parts.json"
    part = json.loads(noted.read_text())["part"] if noted.exists() else None
    return sum(part["documents"].values()) if part else 0

status, boundaries, documents = run(Path(folder, "clean"), 0)
assert status == 0, status
clean = content(Path(folder, "clean"))
stages = set()
for number in range(1, boundaries + 1, int(stride)):
    out = Path(folder, f"out{number}")
    assert run(out, number)[0] == 9
    kept = found(out)
    status, _, encoded = run(out, number % 5 + 2)  # is killed again, mostly
    assert status in (0, 9)
    if status == 9:
        kept_then, kept = kept, found(out)
        assert kept >= kept_then
        status, _, encoded = run(out, 0)
    assert status == 0, (number, status)
    assert encoded == documents - kept, (number, encoded, documents, kept)
    assert content(out) == clean, number
    assert not [path for path in Path(folder).iterdir() if path.name.startswith(f".out{number}.")]
    stages.add(kept)
print(json.dumps([boundaries, documents, len(clean), sorted(stages)]))
"""


def test_a_kill_at_any_write_costs_no_finished_part(tmp_path: Path, tokenizer_folder: Path) -> None:
    """cases.md A17, in every format and at each write, sync, rename and removal; mostly killed twice."""
    folder = tmp_path / "in"
    jsonl(folder / "a.jsonl", [*stories(30), "", " "])
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"text": 1}\n\nbroken\n{"text": "after these"}\n')
    (folder / "b.json").write_text(json.dumps([{"text": text} for text in ["", *stories(25)]] + [{"body": 1}]))
    (folder / "c.txt").write_text("==".join([*stories(25), " ", "last"]))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(jsonl(tmp_path / "d", stories(25)).read_bytes()))
    lines = jsonl(tmp_path / "e", ["", *stories(25)]).read_bytes()
    (folder / "e.json").write_bytes(lines + b'{"text": 1}\n' * 3)  # lines, in spite of it
    command = [sys.executable, "-c", KILLED_EVERYWHERE, folder, tokenizer_folder, tmp_path, 4]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    boundaries, documents, files, stages = json.loads(done.stdout.splitlines()[-1])
    assert documents == 132
    assert boundaries > 40
    assert files > 8  # several shards
    assert len(stages) > 3  # parts that were found finished


def test_tables_are_gone_on_with_in_their_middle(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The same for rows of a parquet file, some of them null."""
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [None if number % 9 == 4 else text for number, text in enumerate(stories(60))]
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=25)
    command = [sys.executable, "-c", KILLED_EVERYWHERE, folder, tokenizer_folder, tmp_path, 9]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    _, documents, _, stages = json.loads(done.stdout.splitlines()[-1])
    assert documents == 53
    assert len(stages) > 2


def test_an_interrupted_build_that_was_damaged_is_made_again(
    tmp_path: Path, tokenizer: Any, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", stories(300)), tmp_path / "out"
    start(source, tokenizer_folder, out, die_at="encoding 5").communicate(timeout=60)
    damaged = tmp_path / ".out.partial/train-00000.bin"
    content_then = bytearray(damaged.read_bytes())
    assert content_then
    content_then[7] ^= 1
    damaged.write_bytes(content_then)
    prepare(source, tokenizer=tokenizer, out=out)
    assert "train-00000.bin holds something else than was written" in caplog.text
    prepare(source, tokenizer=tokenizer, out=tmp_path / "clean")
    assert content(out) == content(tmp_path / "clean")


@pytest.mark.parametrize("complete", [False, True])
def test_a_swap_that_was_killed_half_way_is_ended(tmp_path: Path, tokenizer: Any, complete: bool) -> None:
    """Between the two renames there is no dataset under its name, but two beside it."""
    source, out = jsonl(tmp_path / "a.jsonl", stories(20)), tmp_path / "out"
    prepare(source, tokenizer=tokenizer, out=out, validation_split=0)
    out.rename(tmp_path / ".out.old")
    if complete:
        prepare(source, tokenizer=tokenizer, out=tmp_path / "new")
        (tmp_path / "new").rename(tmp_path / ".out.partial")
    else:
        (tmp_path / ".out.partial").mkdir()
    wanted = 0.01 if complete else 0
    assert prepare(source, tokenizer=tokenizer, out=out, validation_split=wanted).cache_hit
    assert beside(out) == []


def test_two_at_once_take_turns(tmp_path: Path, tokenizer_folder: Path) -> None:
    """cases.md A18: one builds, the other says that it waits and finds the result."""
    source, out = jsonl(tmp_path / "a.jsonl", stories(300)), tmp_path / "out"
    first = start(source, tokenizer_folder, out, together=tmp_path)
    while not (tmp_path / "building").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    second = start(source, tokenizer_folder, out, together=tmp_path)
    said = {process: process.communicate(timeout=60) for process in (first, second)}
    assert said[first][0].strip() == "False"
    assert said[second][0].strip() == "True"
    assert "another preparation into" in said[second][1]
    assert beside(out) == []


def test_tokenizing_before_preparing_blocks_nothing(tmp_path: Path, tokenizer_folder: Path) -> None:
    """cases.md A24."""
    program = """
import sys
from arriero.data.prepare import prepare
from arriero.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[2])
tokenizer(["some text"] * 200)
prepare(sys.argv[1], tokenizer=tokenizer, out=sys.argv[3])
"""
    source = jsonl(tmp_path / "a.jsonl", stories(300))
    prepare(source, tokenizer=tokenizer_folder, out=tmp_path / "here")
    plain = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    processes = {}
    for setting in ("", "true", "false"):
        command = [sys.executable, "-c", program, str(source), str(tokenizer_folder), str(tmp_path / f"out{setting}")]
        environment = {**plain, "TOKENIZERS_PARALLELISM": setting} if setting else plain
        processes[setting] = subprocess.Popen(command, env=environment)
    for setting, process in processes.items():
        assert process.wait(timeout=60) == 0
        assert content(tmp_path / f"out{setting}") == content(tmp_path / "here")


# --------------------------------------------------------------------------------------------------------------- engine


def test_a_difference_starts_again_with_tokenizers(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fast engine is swapped, late in the data and behind finished parts, for that of another tokenizer."""
    train_tokenizer(["the mule knows nothing of roads, " * 9], 300, tmp_path / "other")
    wrong = Encoder(load_tokenizer(tmp_path / "other"), text_bytes=0)._fast
    source = jsonl(tmp_path / "a.jsonl", stories(400))
    monkeypatch.setattr("arriero.data.batches._BATCH_BYTES", 2000)
    monkeypatch.setattr(prepare_file, "_PART_BYTES", 4000)

    class Faulty(Encoder):
        calls = 0

        def encode(self, texts: list[str], *measured: Any) -> Any:
            Faulty.calls += 1
            if Faulty.calls == 5 and self.engine == "gigatoken":
                self._fast = wrong
            return super().encode(texts, *measured)

    monkeypatch.setattr(prepare_file, "Encoder", Faulty)
    result = prepare(source, tokenizer=tokenizer, out=tmp_path / "out")
    monkeypatch.undo()
    assert (result.engine, result.share_compared) == ("tokenizers", 1.0)
    assert "gigatoken and tokenizers differ on" in caplog.text
    assert "from the start with tokenizers" in caplog.text
    assert "differ on" in open_dataset(tmp_path / "out").manifest["engine_reason"]
    right = prepare(source, tokenizer=tokenizer, out=tmp_path / "right")
    assert right.engine == "gigatoken"
    shards = ["train-00000.bin", "train-00000.idx", "validation-00000.bin", "validation-00000.idx"]
    assert {name: content(tmp_path / "out")[name] for name in shards} == {
        name: content(tmp_path / "right")[name] for name in shards
    }


def test_no_part_is_finished_before_it_is_proven(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison runs beside the encoding and lags behind: what a killed process leaves must not be trusted sooner."""
    monkeypatch.setattr("arriero.data.batches._BATCH_BYTES", 2000)
    monkeypatch.setattr(prepare_file, "_PART_BYTES", 4000)
    proven, parts = [0], []
    note, write = prepare_file._note_part, prepare_file.write_manifest

    class Slow(Encoder):
        def encode(self, texts: list[str], *measured: Any) -> Any:
            ids, lengths, proof = super().encode(texts, *measured)

            def prove() -> None:
                time.sleep(0.02)
                if proof is not None:
                    proof()
                proven[0] += len(texts)

            return ids, lengths, prove

    def note_part(plan: Any, folder: Path, course: Any, part: Any) -> None:
        if part is not None:
            parts.append(sum(part["documents"].values()))
            assert parts[-1] <= proven[0]
        note(plan, folder, course, part)

    def write_manifest(folder: Path, manifest: Any) -> None:
        assert proven[0] == 300
        write(folder, manifest)

    monkeypatch.setattr(prepare_file, "Encoder", Slow)
    monkeypatch.setattr(prepare_file, "_note_part", note_part)
    monkeypatch.setattr(prepare_file, "write_manifest", write_manifest)
    result = prepare(jsonl(tmp_path / "a.jsonl", stories(300)), tokenizer=tokenizer, out=tmp_path / "out")
    assert (result.engine, result.documents, proven[0]) == ("gigatoken", 300, 300)
    assert len(parts) == 3


def test_verifying_compares_everything(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what is there already, if it was compared only in part, and documents beyond what a proof takes."""
    monkeypatch.setattr("arriero.data.tokenizer._PROOF_BYTES", 1000)
    monkeypatch.setattr("arriero.data.tokenizer._PROOF_CHARACTERS", 2000)
    source, out = jsonl(tmp_path / "a.jsonl", [*stories(200), " ".join(stories(100))]), tmp_path / "out"
    first = prepare(source, tokenizer=tokenizer, out=out)
    before = content(out)
    assert 0 < first.share_compared < 0.5
    verified = prepare(source, tokenizer=tokenizer, out=out, verify=True)
    assert (verified.cache_hit, verified.share_compared, verified.engine) == (False, 1.0, "gigatoken")
    assert "preparing again: only" in caplog.text
    assert open_dataset(out).manifest["share_compared"] == 1.0
    after = content(out)
    assert before.pop("dataset.json") != after.pop("dataset.json")
    assert before == after
    for verify in (True, False):
        assert prepare(source, tokenizer=tokenizer, out=out, verify=verify).cache_hit


def test_verifying_finds_what_a_share_would_miss(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong id in the last of 500 documents."""
    monkeypatch.setattr("arriero.data.tokenizer._PROOF_BYTES", 1000)
    right = sys.modules["arriero.data.tokenizer"]._encode_fast

    def wrong(fast: Any, texts: list[str]) -> tuple[Any, Any]:
        ids, lengths = right(fast, texts)
        if texts[-1] == stories(500)[-1]:
            ids = ids.copy()
            ids[-1] ^= 1
        return ids, lengths

    monkeypatch.setattr("arriero.data.tokenizer._encode_fast", wrong)
    source = jsonl(tmp_path / "a.jsonl", stories(500))
    assert prepare(source, tokenizer=tokenizer, out=tmp_path / "share").engine == "gigatoken"
    assert prepare(source, tokenizer=tokenizer, out=tmp_path / "all", verify=True).engine == "tokenizers"


def test_the_slower_engine_is_said(tmp_path: Path, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tokenizers import normalizers

    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with caplog.at_level(logging.WARNING):
        result = prepare(jsonl(tmp_path / "a.jsonl", stories(9)), tokenizer=tokenizer, out=tmp_path / "out")
    assert result.engine == "tokenizers"
    assert "encoding with tokenizers, which is slower: Unsupported normalizer type" in caplog.text
    assert "Unsupported normalizer" in open_dataset(tmp_path / "out").manifest["engine_reason"]


def test_batches_and_shards_do_not_show_in_the_result(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl", stories(300))
    prepare(source, tokenizer=tokenizer, out=tmp_path / "large")
    monkeypatch.setattr("arriero.data.batches._BATCH_BYTES", 100)
    monkeypatch.setattr("arriero.data.parts._TABLE_ROWS", 7)
    prepare(source, tokenizer=tokenizer, out=tmp_path / "small")
    large, small = (content(tmp_path / name) for name in ("large", "small"))
    for name in ("train-00000.bin", "train-00000.idx", "validation-00000.bin", "validation-00000.idx"):
        assert large[name] == small[name]
    tables = [pq.read_table(tmp_path / name / "documents-00000.parquet") for name in ("large", "small")]
    assert tables[0].to_pylist() == tables[1].to_pylist()


def test_progress_reaches_the_end(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.data.batches._BATCH_BYTES", 2000)
    seen: list[Progress] = []
    source = jsonl(tmp_path / "a.jsonl", stories(300))
    result = prepare(source, tokenizer=tokenizer, out=tmp_path / "out", progress=seen.append)
    assert {now.stage for now in seen} == {"hashing", "encoding", "writing"}
    assert (seen[-1].bytes_done, seen[-1].bytes_total) == (source.stat().st_size, source.stat().st_size)
    assert (seen[-1].documents, seen[-1].tokens) == (result.documents, result.tokens)


def test_a_plan_writes_nothing(tmp_path: Path, tokenizer: Any) -> None:
    source = jsonl(tmp_path / "a.jsonl", stories(3))
    plan = hash_inputs(list_preparation(source, tokenizer=tokenizer))
    assert plan.input_bytes == source.stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert prepare(source, tokenizer=tokenizer, out=tmp_path / "out").fingerprint == plan.fingerprint
