from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arriero.data.batches import Batch, Encoded, encoded_batches
from arriero.data.sources import Note, Place, ReadLog, ReadOptions, SourceFile, list_files, read_documents
from arriero.data.tokenizer import Encoder
from arriero.errors import UserError

batches_file = sys.modules["arriero.data.batches"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SourceFile]:
    """Three files of 90 texts with bad lines before, between and behind them."""
    monkeypatch.setattr(batches_file, "_BATCH_BYTES", 300)
    for name in "abc":
        lines = [json.dumps({"text": f"{name} {number} of the mules" * 3}) for number in range(30)]
        for place in (30, 29, 12, 11, 0):
            lines.insert(place, "broken")
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, '{"text": ""}', '{"text": 1}', ""]))
    return list_files([tmp_path])[0]


def read(files: list[SourceFile], encoder: Encoder, after: Place = Place()) -> list[Encoded]:
    options = ReadOptions(on_bad_input="skip")
    return list(encoded_batches(files, options, ReadLog(), encoder, after=after))


def rows(batches: list[Encoded]) -> list[tuple[int, int]]:
    return [pair for found in batches for pair in zip(found.batch.files, found.batch.rows, strict=True)]


def notes(batches: list[Encoded]) -> list[Note]:
    return [note for found in batches for note in found.batch.notes]


def test_everything_comes_once_and_in_order(files: list[SourceFile], tokenizer: Any) -> None:
    log = ReadLog()
    listed: list[Note] = []
    log.each = listed.append
    wanted = list(read_documents(files, ReadOptions(on_bad_input="skip"), log))
    found = read(files, Encoder(tokenizer, text_bytes=0))
    assert len(found) > 12
    assert rows(found) == [("abc".index(document.file[0]), document.row) for document in wanted]
    assert notes(found) == listed
    ids, lengths, _ = Encoder(tokenizer, text_bytes=0).encode(
        [document.text for document in wanted], [1] * len(wanted), np.zeros(len(wanted), dtype=np.uint64)
    )
    assert np.concatenate([each.ids for each in found]).tolist() == ids.tolist()
    assert np.concatenate([each.lengths for each in found]).tolist() == lengths.tolist()
    positions = [each.batch.bytes_read for each in found]
    assert positions == sorted(positions)
    assert positions[-1] == sum(file.path.stat().st_size for file in files)


def test_going_on_behind_any_batch_gives_the_rest(files: list[SourceFile], tokenizer: Any) -> None:
    """What was skipped behind the last document of a batch is counted with what comes after it, also at the very end."""
    found = read(files, Encoder(tokenizer, text_bytes=0))
    places = [number for number, each in enumerate(found) if len(each.batch.rows)]
    assert len(found[-1].batch.notes) == 3
    for number in places:
        batch = found[number].batch
        encoder = Encoder(tokenizer, text_bytes=0)
        encoder.restore(found[number].encoder)
        rest = read(files, encoder, Place(int(batch.files[-1]), int(batch.rows[-1])))
        assert rows(rest) == rows(found[number + 1 :]), number
        assert notes(rest) == notes(found[number + 1 :]), number
        assert rest[-1].encoder == found[-1].encoder


def test_a_file_of_bad_lines_is_passed_on_in_pieces(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list must not gather in memory."""
    monkeypatch.setattr(batches_file, "_BATCH_NOTES", 10)
    lines = ["{}"] * 55 + ['{"text": "one"}'] + ["{}"] * 38
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = read(list_files([tmp_path])[0], Encoder(tokenizer, text_bytes=0))
    assert [len(each.batch.notes) for each in found] == [10] * 5 + [5, 10, 10, 10, 8]
    assert [len(each.batch.rows) for each in found] == [0] * 5 + [1, 0, 0, 0, 0]
    assert [note.place for note in notes(found)] == [f"line {row}" for row in range(1, 95) if row != 56]


def test_an_error_comes_behind_what_stands_before_it(files: list[SourceFile], tokenizer: Any) -> None:
    files[0].path.write_text(files[0].path.read_text().replace("broken\n", "", 1))
    ahead = encoded_batches(files, ReadOptions(), ReadLog(), Encoder(tokenizer, text_bytes=0), after=Place())
    found = [next(ahead)]
    with pytest.raises(UserError, match=r"a\.jsonl line 12: broken JSON"):
        next(ahead)
    assert rows(found) == [(0, row) for row in range(1, 8)]
    assert list(ahead) == []


def test_reading_runs_ahead_by_a_few_batches_and_ends_when_nobody_waits(
    files: list[SourceFile], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    batch = batches_file._Gathered.batch

    def counted(self: Any, bytes_read: int) -> Batch:
        made.append(bytes_read)
        return batch(self, bytes_read)

    monkeypatch.setattr(batches_file._Gathered, "batch", counted)
    encoder = Encoder(tokenizer, text_bytes=0)
    with closing(encoded_batches(files, ReadOptions(on_bad_input="skip"), ReadLog(), encoder, after=Place())) as ahead:
        for taken in range(1, 6):
            next(ahead)
            time.sleep(0.1)
            assert len(made) <= taken + 4  # one in each queue, one in the hands of each thread
    assert len(made) <= 5 + 4 + 2  # two more may be on their way while the threads end
    assert not [thread for thread in threading.enumerate() if thread.name == "arriero-prepare"]
