"""The counts against plain ones over the documents themselves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import arriero.data.stats
from arriero.data.prepare import prepare
from arriero.data.shards import MANIFEST, ShardWriter, open_dataset
from arriero.data.stats import PERCENTILES, dataset_stats
from arriero.errors import UserError

WORDS = ["the", "arriero", "loads", "mule", "before", "dawn", "and", "knows", "road", "better", "than", "he", "does"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Two files; every 7th document is a copy of the one before, the longest is the 102nd of b.jsonl."""
    folder = tmp_path_factory.mktemp("stats")
    rng = np.random.default_rng(0)
    texts: list[str] = []
    for number in range(400):
        text = " ".join(rng.choice(WORDS, rng.integers(1, 200 if number != 301 else 3_000)))
        texts.append(texts[-1] if number % 7 == 6 else text + (" mule" * 4_000 if number == 301 else ""))
    for name, part in (("a.jsonl", texts[:200]), ("b.jsonl", texts[200:])):
        (folder / name).write_text("\n".join(json.dumps({"text": text}) for text in part))
    prepare(folder, tokenizer=tokenizer, out=folder / "out", validation_split=0.1)
    return folder


def test_the_counts_are_those_of_the_documents(folder: Path) -> None:
    found = dataset_stats(folder / "out")
    texts = [
        json.loads(line)["text"] for name in ("a.jsonl", "b.jsonl") for line in (folder / name).read_text().splitlines()
    ]
    dataset = open_dataset(folder / "out")
    assert set(found) == {"train", "validation"}
    assert sum(split.duplicates for split in found.values()) == 400 - len(set(texts)) > 50
    for name, split in found.items():
        documents = [ids.tobytes() for _, ids in dataset.splits[name].iterate_documents()]
        lengths = sorted(len(ids) for _, ids in dataset.splits[name].iterate_documents())
        assert (split.documents, split.tokens) == (len(lengths), sum(lengths))
        assert split.duplicates == len(documents) - len(set(documents))
        assert split.duplicate_share == split.duplicates / split.documents
        assert split.bytes_per_token == dataset.text_bytes[name] / split.tokens  # type: ignore[operator]
        assert (split.shortest, split.longest) == (lengths[0], lengths[-1])
        assert split.percentiles == {p: lengths[-(-p * len(lengths) // 100) - 1] for p in PERCENTILES}
        for part in split.histogram:
            inside = [length for length in lengths if part.shortest <= length <= part.longest]
            assert (part.documents, part.tokens) == (len(inside), sum(inside))
        assert sum(part.documents for part in split.histogram) == len(lengths)


def test_the_longest_are_named(folder: Path) -> None:
    longest = [document for split in dataset_stats(folder / "out").values() for document in split.longest_documents]
    assert len(longest) == 10
    first = max(longest, key=lambda document: document.tokens)
    assert (first.file, first.row) == ("b.jsonl", 102)
    for document in longest:
        assert document.file is not None
        assert document.row is not None
        line = (folder / document.file).read_text().splitlines()[document.row - 1]
        assert len(json.loads(line)["text"].encode()) == document.text_bytes


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1)), min_size=1, max_size=60),
    chunk=st.integers(1, 70),
)
def test_a_bare_corpus_in_chunks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, documents: list[tuple[int, int]], chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("bare")
    lengths = np.array([length for length, _ in documents])
    with ShardWriter(folder, "corpus", np.dtype("<u2"), max_tokens=200) as writer:
        writer.add(np.repeat([token for _, token in documents], lengths), lengths)
        writer.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arriero.data.stats, "_CHUNK", chunk)
        split = dataset_stats(folder, longest=3)["train"]
    assert (split.documents, split.tokens) == (len(documents), int(lengths.sum()))
    assert (split.text_bytes, split.bytes_per_token) == (None, None)
    assert split.duplicates == sum(count - 1 for count in Counter(documents).values())
    longest = sorted(enumerate(lengths.tolist()), key=lambda item: (-item[1], item[0]))[:3]
    assert [(document.index, document.tokens) for document in split.longest_documents] == longest
    assert all(document.file is None for document in split.longest_documents)


def test_a_table_of_another_dataset_is_refused(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "c.txt").write_text("one document")
    prepare(tmp_path / "c.txt", tokenizer=tokenizer, out=tmp_path / "out", validation_split=0)
    table = "documents-00000.parquet"
    data = (folder / "out" / table).read_bytes()
    (tmp_path / "out" / table).write_bytes(data)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    manifest["tables"][0]["bytes"] = len(data)
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="doesn't list the documents"):
        dataset_stats(tmp_path / "out")
