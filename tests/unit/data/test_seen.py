"""Which documents were seen, and when, against a plain count over every row."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.config.schema import Data
from arriero.config.schema import Source as SourceConfig
from arriero.data.loader import TrainingData, open_sources
from arriero.data.seen import documents_in, positions_of_rows, rows_of_document, seen_by_source
from arriero.data.shards import ShardWriter, split_entry, write_manifest


def write(folder: Path, lengths: list[int]) -> Path:
    """A dataset of documents of these lengths."""
    folder.mkdir()
    with ShardWriter(folder, "train", np.dtype("<u2")) as writer:
        writer.add(np.arange(sum(lengths)) % 60_000, np.array(lengths))
        shards = writer.close()
    entry = split_entry(shards, text_bytes=sum(lengths))
    manifest = {"format_version": 1, "fingerprint": "f", "largest_id": 60_000, "splits": {"train": entry}, "tables": []}
    write_manifest(folder, manifest | {"tokenizer": {"fingerprint": "t", "eos_token_id": 0}})
    return folder


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@settings(max_examples=30, deadline=None)
@given(
    a=st.lists(st.integers(1, 20), min_size=3, max_size=15),
    b=st.lists(st.integers(1, 20), min_size=3, max_size=15),
    seq_len=st.integers(2, 9),
    position=st.integers(0, 120),
)
def test_seen_equals_a_plain_count(packing: str, a: list[int], b: list[int], seq_len: int, position: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        configs = tuple(
            SourceConfig(path=str(write(Path(scratch) / name, [*lengths, 12])), weight=weight)
            for name, lengths, weight in (("a", a, 0.7), ("b", b, 0.3))
        )
        data = TrainingData(
            open_sources(Data(sources=configs, seq_len=seq_len, packing=packing, validation_split=0)), seed=5
        )
        refs = data.mixture.rows_at(0, position)
        seen = seen_by_source(data, position)
        for number, source in enumerate(data.sources):
            passes: set[tuple[int, int]] = set()
            mine = refs.source == number
            for epoch, row in zip(refs.epoch[mine].tolist(), refs.row[mine].tolist(), strict=True):
                passes |= {(epoch, document) for document in source.training[row].documents.tolist()}
            times = Counter(document for _, document in passes)
            found = seen[source.name]
            assert found.rows == int(mine.sum())
            assert found.documents_seen == len(times)
            assert found.max_times == max(times.values(), default=0)
            for document in range(min(4, source.training.stream.documents)):
                rows = rows_of_document(source.training, document)
                inside = [r for r in range(len(source.training)) if document in source.training[r].documents]
                assert rows.tolist() == inside
                assert documents_in(source.training, np.array(inside, dtype=np.int64))[document] == bool(inside)
                came = list(positions_of_rows(data, number, rows, position))
                assert came == [
                    (p, int(refs.epoch[p])) for p in range(position) if mine[p] and int(refs.row[p]) in inside
                ]
