from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from transformers import default_data_collator

from arriero.data import create_pretrain_dataset
from arriero.data.prepare import prepare
from arriero.data.pretrain import PretrainRows
from arriero.data.shards import open_dataset
from arriero.data.tokenizer import load_tokenizer
from arriero.errors import UserError

SEQ_LEN = 32


def write(path: Path, first: int, last: int) -> str:
    lines = [
        json.dumps({"text": f"Story {n}: the mule carries {n * 37 % 101} sacks over pass {n}."})
        for n in range(first, last)
    ]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("corpus") / "stories.jsonl", 0, 400)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def create(
    corpus: Any, cache: Path, tokenizer: Any, *, split: str = "90,10", seed: int = 1234, rank: int = -1
) -> tuple[PretrainRows, PretrainRows]:
    return create_pretrain_dataset(rank, corpus, split, cache, seed, tokenizer, SEQ_LEN)


def ids_of(rows: PretrainRows) -> list[list[int]]:
    """Every row without its padding."""
    return [item["input_ids"][item["attention_mask"].bool()].tolist() for item in (rows[i] for i in range(len(rows)))]


def documents(rows: PretrainRows, eos: int) -> set[tuple[int, ...]]:
    """The documents of rows that are in the stream's order."""
    found, document = set(), []
    for token in (token for row in ids_of(rows) for token in row):
        document.append(token)
        if token == eos:
            found.add(tuple(document))
            document = []
    assert not document
    return found


def test_the_articles_snippet(corpus: str, cache: Path, tokenizer: Any) -> None:
    train_dataset, eval_dataset = create(corpus, cache, tokenizer)
    for local_rank in (-1, 0):
        if local_rank == -1:
            samplers: Any = (RandomSampler(train_dataset), SequentialSampler(eval_dataset))
        else:
            options: Any = {"num_replicas": 2, "rank": 1}
            samplers = (DistributedSampler(train_dataset, **options), DistributedSampler(eval_dataset, **options))
        for dataset, sampler in zip((train_dataset, eval_dataset), samplers, strict=True):
            loader = DataLoader(dataset, collate_fn=default_data_collator, sampler=sampler, batch_size=4)
            batch = next(iter(loader))
            assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(
                ("input_ids", "labels", "attention_mask"), (4, SEQ_LEN)
            )
            assert all(value.dtype == torch.int64 for value in batch.values())
            assert ((batch["labels"] == batch["input_ids"]) | (batch["labels"] == -100)).all()


def test_the_rows_hold_every_token_once(corpus: str, cache: Path, tokenizer: Any) -> None:
    """cases.md A11: every row has the same length, and only the last one is padded."""
    rows = create(corpus, cache, tokenizer)
    (folder,) = (path.parent for path in cache.glob("*/dataset.json"))
    for dataset, split in zip(rows, ("train", "validation"), strict=True):
        stream = open_dataset(folder).splits[split]
        assert len(dataset) == -(-stream.tokens // SEQ_LEN)
        real = sorted(ids_of(dataset))
        flat = stream.read(0, stream.tokens).tolist()
        assert real == sorted(flat[start : start + SEQ_LEN] for start in range(0, len(flat), SEQ_LEN))
        for item in (dataset[i] for i in range(len(dataset))):
            padding = item["attention_mask"] == 0
            assert (item["input_ids"][padding] == tokenizer.eos_token_id).all()
            assert (item["labels"][padding] == -100).all()
            assert (item["labels"][~padding] == item["input_ids"][~padding]).all()
        assert sum(int((item["attention_mask"] == 0).any()) for item in (dataset[i] for i in range(len(dataset)))) <= 1


@pytest.mark.parametrize(("tokens", "rows"), [(64, 1), (65, 2), (128, 2)])
def test_rows_of_64(tmp_path: Path, tokenizer: Any, tokens: int, rows: int) -> None:
    """cases.md A11."""
    source = tmp_path / "a.txt"
    source.write_text("123 " * 20 + "1" * 3)
    prepare(source, tokenizer=tokenizer, out=tmp_path / "out", validation_split=0)
    stream = open_dataset(tmp_path / "out").splits["train"].select([0] * 10)
    stream.tokens = tokens  # the first so many of them
    dataset = PretrainRows(stream, 64, pad_id=1)
    assert len(dataset) == rows
    assert sum(int((dataset[row]["labels"] != -100).sum()) for row in range(rows)) == tokens
    with pytest.raises(IndexError):
        dataset[rows]


def test_too_little_text_for_one_row(tmp_path: Path, tokenizer: Any) -> None:
    """cases.md A11."""
    with pytest.raises(UserError, match=r"the training part has \d+ tokens in 1 documents, less than one row of 512"):
        create_pretrain_dataset(-1, write(tmp_path / "a.jsonl", 0, 2), "50,50", tmp_path / "c", 1, tokenizer, 512)
    with pytest.raises(UserError, match="leaves the evaluation part empty"):
        create_pretrain_dataset(-1, write(tmp_path / "b.jsonl", 0, 1), "90,10", tmp_path / "c", 1, tokenizer, 8)


def test_seed_decides_the_order_and_not_the_split(corpus: str, cache: Path, tokenizer: Any) -> None:
    first, again, other = (create(corpus, cache, tokenizer, seed=seed) for seed in (1, 1, 2))
    assert ids_of(first[0]) == ids_of(again[0])
    assert ids_of(first[0]) != ids_of(other[0])
    assert sorted(ids_of(first[0])) == sorted(ids_of(other[0]))
    assert ids_of(first[1]) == ids_of(other[1])
    stream = open_dataset(next(cache.glob("*/dataset.json")).parent).splits["train"]
    assert ids_of(first[0])[:5] != [stream.read(i * SEQ_LEN, (i + 1) * SEQ_LEN).tolist() for i in range(5)]


def test_what_is_left_over_goes_nowhere_in_silence(
    corpus: str, tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train, evaluation = create(corpus, tmp_path, tokenizer, split="80,10,10")
    dataset = open_dataset(next(tmp_path.glob("*/dataset.json")).parent)
    held_out = dataset.splits["validation"].documents
    kept = len(documents(evaluation, tokenizer.eos_token_id))
    assert 40 < held_out < 120
    assert 0 < kept < held_out
    assert f"{held_out - kept} documents" in caplog.text
    assert len(train) == -(-dataset.splits["train"].tokens // SEQ_LEN)
    caplog.clear()
    create(corpus, tmp_path, tokenizer, split="80,10,10", rank=1)
    assert not caplog.text


def test_the_parts_are_stable_when_text_is_added(tmp_path: Path, tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    _, small = create(write(tmp_path / "a.jsonl", 0, 200), tmp_path / "c", tokenizer, split="80,10,10")
    _, large = create(write(tmp_path / "b.jsonl", 0, 300), tmp_path / "c", tokenizer, split="80,10,10")
    assert documents(small, eos) < documents(large, eos)


@pytest.mark.parametrize("split", ["100", "100,0", "90,0,10"])
def test_no_evaluation_if_none_is_wanted(corpus: str, cache: Path, tokenizer: Any, split: str) -> None:
    train, evaluation = create(corpus, cache, tokenizer, split=split)
    assert len(train) > 10
    assert len(evaluation) == 0
    assert list(SequentialSampler(evaluation)) == []


@pytest.mark.parametrize("split", ["", "a,b", "0,1", "-1,2", "nan,1", "inf,1"])
def test_nonsense_splits_are_refused(corpus: str, cache: Path, tokenizer: Any, split: str) -> None:
    with pytest.raises(UserError, match="data_split is"):
        create(corpus, cache, tokenizer, split=split)


def test_nonsense_elsewhere_is_refused(corpus: str, cache: Path, tokenizer: Any, tokenizer_folder: Path) -> None:
    with pytest.raises(UserError, match="data_path names nothing"):
        create(" , ", cache, tokenizer)
    with pytest.raises(UserError, match="max_seq_len is 1"):
        create_pretrain_dataset(-1, corpus, "90,10", cache, 1, tokenizer, 1)
    without_eos = load_tokenizer(tokenizer_folder)
    without_eos.eos_token = None
    with pytest.raises(UserError, match="has no EOS token"):
        create(corpus, cache, without_eos)


def test_paths_in_a_list_a_string_or_prepared(tmp_path: Path, tokenizer: Any, tokenizer_folder: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", 0, 150), write(tmp_path / "b.jsonl", 150, 300)
    as_string = create(f"{a}, {b}", tmp_path / "c", tokenizer)
    as_list = create([a, b], tmp_path / "c", tokenizer)
    assert [ids_of(rows) for rows in as_string] == [ids_of(rows) for rows in as_list]

    prepare(b, tokenizer=tokenizer, out=tmp_path / "b", validation_split=0.1)
    prepare(b, tokenizer=tokenizer, out=tmp_path / "whole", validation_split=0)
    eos = tokenizer.eos_token_id
    everything = documents(as_list[1], eos) | documents(PretrainRows(as_list[0]._stream, SEQ_LEN, pad_id=eos), eos)
    for folder in ("b", "whole"):
        train, evaluation = create([a, str(tmp_path / folder)], tmp_path / "c", tokenizer)
        held_out = documents(evaluation, eos)
        trained = documents(PretrainRows(train._stream, SEQ_LEN, pad_id=eos), eos)
        assert held_out | trained == everything
        assert not held_out & trained
        assert 5 < len(held_out) < 60
    train, _ = create(
        str(tmp_path / "whole/train-00000"), tmp_path / "c", tokenizer, split="100"
    )  # a bare Megatron pair
    assert len(train) == -(-open_dataset(tmp_path / "whole").splits["train"].tokens // SEQ_LEN)

    other = load_tokenizer(tokenizer_folder)
    other.add_tokens(["sacks"])
    with pytest.raises(UserError, match=r"was prepared with tokenizer [0-9a-f]+, the one given is [0-9a-f]+"):
        create(str(tmp_path / "b"), tmp_path / "c", other)


def test_rows_reach_loader_workers(corpus: str, cache: Path, tokenizer: Any) -> None:
    train, _ = create(corpus, cache, tokenizer)
    alone = [batch["input_ids"] for batch in DataLoader(train, batch_size=16)]
    for context in ("fork", "spawn"):
        loader = DataLoader(train, batch_size=16, num_workers=1, multiprocessing_context=context)
        assert torch.equal(torch.cat([batch["input_ids"] for batch in loader]), torch.cat(alone))


HASHED_ONCE = """
import sys
from arriero.data import create_pretrain_dataset
from arriero.data.tokenizer import load_tokenizer
corpus, tokenizer, cache, rank = sys.argv[1:]
plan, hashed = sys.modules["arriero.data.plan"], []
right = plan._hash_files
plan._hash_files = lambda files, *rest: hashed.append(len(files)) or right(files, *rest)
rows, _ = create_pretrain_dataset(int(rank), corpus, "90,10", cache, 1, load_tokenizer(tokenizer), 32)
print(len(hashed), len(rows))
"""


def test_only_the_rank_that_prepares_hashes(
    corpus: str, tokenizer: Any, tokenizer_folder: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HASHED_ONCE, corpus, str(tokenizer_folder), str(tmp_path / "cache")]
    ranks = [subprocess.Popen([*command, str(rank)], text=True, stdout=subprocess.PIPE) for rank in range(3)]
    said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert sorted(hashed for hashed, _ in said) == ["0", "0", "1"]
    assert len({rows for _, rows in said}) == 1


def test_a_changed_or_damaged_dataset_is_not_taken_for_the_same(
    corpus: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    plan_file = sys.modules["arriero.data.plan"]
    right = plan_file._hash_files
    monkeypatch.setattr(plan_file, "_hash_files", lambda files, *rest: hashed.append(len(files)) or right(files, *rest))
    text, cache = tmp_path / "text.jsonl", tmp_path / "cache"
    text.write_bytes(Path(corpus).read_bytes())
    rows = [ids_of(create(str(text), cache, tokenizer)[0]) for _ in range(2)]
    assert rows[0] == rows[1]
    assert hashed == [1]
    shard = next(cache.glob("*/train-00000.bin"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    assert ids_of(create(str(text), cache, tokenizer)[0]) == rows[0]
    assert (hashed, shard.read_bytes()) == ([1, 1], data)
    text.write_bytes(text.read_bytes().replace(b"mule", b"goat"))  # as long as before
    assert ids_of(create(str(text), cache, tokenizer)[0]) != rows[0]
    assert len(list(cache.glob("*/dataset.json"))) == 2
