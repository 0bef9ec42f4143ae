"""Datasets on the hub. None can be reached here: ``datasets`` streams a folder by the same code, and a server that isn't
there is the real thing."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from arriero.data import hub as hub_file
from arriero.data.hub import HubDataset, Unreachable, parse_hub, resolve, stream_rows
from arriero.data.plan import hash_inputs, list_preparation
from arriero.data.prepare import prepare
from arriero.data.shards import open_dataset
from arriero.data.shared_preparation import merge_shards, prepare_shard
from arriero.errors import UserError

pytest.importorskip("datasets", reason="the extra `hub` isn't installed: pip install 'arriero[hub]'")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def stories(count: int, name: str = "") -> list[str]:
    return [f"Story {name} {number}: {number * 37 % 101} sacks over pass {number}." for number in range(count)]


def content(folder: Path) -> dict[str, str]:
    return {path.name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in sorted(folder.iterdir())}


def lines(texts: list[Any]) -> bytes:
    return "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts)).encode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of two splits, in two files each."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "corpus/data"
    data.mkdir(parents=True)
    for number, name in enumerate(("a", "b")):
        texts: list[str | None] = [*stories(60, name), "", None]
        (data / f"train-0000{number}.jsonl.gz").write_bytes(gzip.compress(lines(texts)))
    (data / "test-00000.jsonl").write_bytes(lines(stories(20, "test")))
    return tmp_path / "corpus"


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", "http://127.0.0.1:9", raising=False)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf://owner/name", HubDataset("owner/name")),
        ("hf://datasets/owner/name", HubDataset("owner/name")),
        ("hf://owner/name:test", HubDataset("owner/name", split="test")),
        ("hf://owner/na.me/sample-10BT@v1.0:train", HubDataset("owner/na.me", "sample-10BT", "v1.0", "train")),
        (f"hf://owner/name@{COMMIT}", HubDataset("owner/name", revision=COMMIT)),
        ("hf://owner/name@refs/convert/parquet", HubDataset("owner/name", revision="refs/convert/parquet")),
        ("hf://./a/b:test", HubDataset("./a/b", split="test")),
        ("hf:///data/a", HubDataset("/data/a")),
    ],
)
def test_what_is_written_is_what_is_meant(source: str, expected: HubDataset) -> None:
    assert parse_hub(source) == expected
    assert parse_hub(expected.name) == HubDataset(expected.path, expected.config, None, expected.split)


@pytest.mark.parametrize("source", ["hf://", "hf://name", "hf://owner/name:", "hf://owner/name@", "hf://o/n:a b"])
def test_nonsense_is_refused(source: str) -> None:
    with pytest.raises(UserError, match="names no dataset on the hub"):
        parse_hub(source)


def test_a_folder_is_streamed_as_a_hub_dataset_is(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    result = prepare(
        "hf://./corpus", tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip", validation_split=0
    )
    assert (result.documents, result.skipped_reasons) == (120, {"empty": 2, "field 'text' is null": 2})
    dataset = open_dataset(tmp_path / "out")
    bos = int(dataset.manifest["tokenizer"]["add_bos"])
    found = [tokenizer.decode(ids[bos:-1]) for _, ids in dataset.splits["train"].iterate_documents()]
    assert found == [*stories(60, "a"), *stories(60, "b")]
    table = pq.read_table(tmp_path / "out/documents-00000.parquet").to_pylist()
    assert {row["file"] for row in table} == {"hf://./corpus:train"}
    assert [row["row"] for row in table] == [*range(1, 61), *range(63, 123)]
    (entry,) = dataset.manifest["inputs"]
    assert (entry["name"], entry["bytes"], entry["xxh3"]) == ("hf://./corpus:train", 0, None)
    listed = [json.loads(line) for line in (tmp_path / "out/skipped-00000.jsonl").read_text().splitlines()]
    assert [(line["file"], line["place"]) for line in listed] == [
        ("hf://./corpus:train", f"row {row}") for row in (61, 62, 123, 124)
    ]
    assert prepare(
        "hf://./corpus", tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip", validation_split=0
    ).cache_hit


def test_content_split_and_nothing_else_make_another_fingerprint(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    def fingerprint(source: str = "hf://./corpus") -> str:
        return hash_inputs(list_preparation(source, tokenizer=tokenizer)).fingerprint

    first = fingerprint()
    assert fingerprint("hf://./corpus:train") == first
    assert fingerprint("hf://./corpus:test") != first
    path = folder / "data/test-00000.jsonl"
    path.write_bytes(lines(stories(21, "test")))
    assert fingerprint() == first
    path = folder / "data/train-00001.jsonl.gz"
    path.write_bytes(gzip.compress(lines(stories(61, "b"))))
    assert fingerprint() != first


def test_a_table_beside_a_text_file_and_other_columns(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "tables").mkdir()
    pq.write_table(pa.table({"id": [1, 2, 3], "body": ["one", None, "three"]}), tmp_path / "tables/a.parquet")
    (tmp_path / "b.txt").write_text("four")
    sources = ["hf://./tables", tmp_path / "b.txt"]
    with pytest.raises(UserError, match=r"hf://\./tables:train row 1: field 'text' is missing .*id, body"):
        prepare(sources, tokenizer=tokenizer, out=tmp_path / "out")
    result = prepare(sources, tokenizer=tokenizer, out=tmp_path / "out", text_field="body", on_bad_input="skip")
    assert (result.documents, result.skipped) == (3, 1)


def test_what_is_not_there_is_said(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="there is no split 'nope'"):
        resolve(parse_hub("hf://./corpus:nope"))
    with pytest.raises(UserError, match=r"hf://\./missing:train"):
        resolve(parse_hub("hf://./missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"hf://\./empty:train"):
        resolve(parse_hub("hf://./empty"))


def test_shards_take_a_hub_dataset_whole(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "c.jsonl").write_bytes(lines(stories(200, "c")))
    sources = [tmp_path / "c.jsonl", "hf://./corpus"]
    for number in range(3):
        prepare_shard(sources, f"{number}/3", tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip")
    merge_shards(sources, tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip")
    prepare(sources, tokenizer=tokenizer, out=tmp_path / "one", on_bad_input="skip")
    assert content(tmp_path / "out") == content(tmp_path / "one")
    assert prepare_shard(sources, "0/3", tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip").cache_hit


KILLED = """
import os, sys
from arriero.data.prepare import prepare
sys.modules["arriero.data.batches"]._BATCH_BYTES = 500
sys.modules["arriero.data.prepare"]._PART_BYTES = 1500
die_at, tokenizer, out = int(sys.argv[1]), *sys.argv[2:]
calls = 0
def progress(now):
    global calls
    calls += now.stage == "encoding"
    if calls == die_at:
        os.kill(os.getpid(), 9)
prepare("hf://./corpus", tokenizer=tokenizer, out=out, on_bad_input="skip", validation_split=0.2, progress=progress)
print(calls)
"""


def test_killed_in_the_middle_it_goes_on(
    folder: Path, tmp_path: Path, tokenizer: Any, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", KILLED, "8", tokenizer_folder, "out"]
    killed = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    seen = []
    monkeypatch.setattr(
        "arriero.data.sources.stream_rows", lambda *given, after: seen.append(after) or stream_rows(*given, after=after)
    )
    prepare("hf://./corpus", tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip", validation_split=0.2)
    assert seen[0] > 50
    prepare("hf://./corpus", tokenizer=tokenizer, out=tmp_path / "one", on_bad_input="skip", validation_split=0.2)
    assert content(tmp_path / "out") == content(tmp_path / "one")


# ---------------------------------------------------------------------------------------------------------- no network


def test_a_hub_that_does_not_answer_is_said(tokenizer: Any, tmp_path: Path, nobody_answers: None) -> None:
    with pytest.raises(Unreachable, match=r"hf://owner/name:train can't be reached"):
        list_preparation("hf://owner/name", tokenizer=tokenizer)


def test_a_commit_needs_no_network_until_it_is_read(
    tokenizer: Any, tmp_path: Path, nobody_answers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)  # or five attempts, 20 s
    source = f"hf://owner/name@{COMMIT}"
    plan = hash_inputs(list_preparation(source, tokenizer=tokenizer))
    assert plan.inputs == ({"name": "hf://owner/name:train", "bytes": 0, "xxh3": None, "revision": COMMIT},)
    assert plan.fingerprint != hash_inputs(list_preparation(source.replace("0", "f"), tokenizer=tokenizer)).fingerprint
    with pytest.raises(Unreachable, match=r"hf://owner/name:train can't be reached"):
        prepare(source, tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip")
    assert not (tmp_path / "out").exists()


def test_a_prepared_commit_is_a_cache_hit_without_network(
    folder: Path, tokenizer: Any, tmp_path: Path, nobody_answers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``datasets`` opens a folder where it would fetch that commit."""
    load, asked = hub_file._import_datasets, []

    class Fetched:
        def __init__(self, hub: HubDataset) -> None:
            self._datasets = load(hub)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._datasets, name)

        def load_dataset(self, *given: Any, split: str, revision: str, streaming: bool) -> Any:
            asked.append((*given, split, revision, streaming))
            return self._datasets.load_dataset(str(folder), split=split, streaming=streaming)

    monkeypatch.setattr(hub_file, "_import_datasets", Fetched)
    given = {"tokenizer": tokenizer, "out": tmp_path / "out", "validation_split": 0}
    source = f"hf://owner/name/config@{COMMIT}:test"
    assert prepare(source, **given).documents == 20
    assert asked == [("owner/name", "config", "test", COMMIT, True)]
    monkeypatch.setitem(sys.modules, "datasets", None)  # nor the package
    monkeypatch.setattr(hub_file, "_import_datasets", load)
    assert prepare(source, **given).cache_hit


def test_a_line_that_breaks_leaves_what_is_finished(
    folder: Path, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a shorter dataset, whatever the policy for bad input."""
    monkeypatch.setattr("arriero.data.batches._BATCH_BYTES", 500)
    monkeypatch.setattr(sys.modules["arriero.data.prepare"], "_PART_BYTES", 1500)
    load = hub_file._import_datasets

    class Breaking:
        """``datasets`` with a line that goes dead after 100 rows."""

        def __init__(self, hub: HubDataset) -> None:
            self._datasets = load(hub)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._datasets, name)

        def load_dataset(self, *given: Any, **options: Any) -> Any:
            def broken(row: dict[str, Any], number: int) -> dict[str, Any]:
                if number == 100:
                    raise ConnectionResetError("the line is dead")
                return row

            return self._datasets.load_dataset(*given, **options).map(broken, with_indices=True)

    monkeypatch.setattr(hub_file, "_import_datasets", Breaking)
    with pytest.raises(Unreachable, match="can't be reached: the line is dead"):
        prepare("hf://./corpus", tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip")
    assert (tmp_path / ".out.partial/parts.json").exists()
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(hub_file, "_import_datasets", load)
    prepare("hf://./corpus", tokenizer=tokenizer, out=tmp_path / "out", on_bad_input="skip")
    prepare("hf://./corpus", tokenizer=tokenizer, out=tmp_path / "one", on_bad_input="skip")
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_without_the_extra_its_installation_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'arriero\[hub\]'"):
        resolve(parse_hub("hf://./corpus"))
    with pytest.raises(UserError, match=r"pip install 'arriero\[hub\]'"):
        next(stream_rows(parse_hub(f"hf://owner/name@{COMMIT}"), "text"))
