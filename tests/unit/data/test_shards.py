from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.data.shards import (
    ShardInfo,
    ShardWriter,
    TokenStream,
    hash_limit,
    join_streams,
    open_dataset,
    split_by_hash,
    split_entry,
    token_dtype,
    write_manifest,
)
from arriero.errors import UserError


def write(
    folder: Path, documents: list[list[int]], *, max_tokens: int | None = None, dtype: str = "u2"
) -> list[ShardInfo]:
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(folder, "train", np.dtype(dtype), max_tokens=max_tokens) as writer:
        for document in documents:
            writer.add(np.array(document), np.array([len(document)]))
        return writer.close()


def stream_of(folder: Path) -> TokenStream:
    return open_dataset(folder).splits["train"]


def as_lists(stream: TokenStream) -> list[list[int]]:
    return [ids.tolist() for _, ids in stream.iterate_documents()]


@given(
    documents=st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=40), min_size=1, max_size=25),
    max_tokens=st.integers(1, 60),
    batch=st.integers(1, 30),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_any_documents_come_back_over_any_shards(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    max_tokens: int,
    batch: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(folder, "train", np.dtype("u2"), max_tokens=max_tokens) as writer:
        for first in range(0, len(documents), batch):
            some = documents[first : first + batch]
            writer.add(np.array([token for document in some for token in document]), np.array([*map(len, some)]))
        infos = writer.close()
    assert [info.name for info in infos] == [f"train-{number:05d}" for number in range(len(infos))]
    # a shard is full before the next begins, and over-full only with a single document
    assert all(info.tokens <= max_tokens or info.documents == 1 for info in infos)
    assert not list(folder.glob("*.lengths"))

    flat = [token for document in documents for token in document]
    firsts = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    stream = stream_of(folder)
    assert (stream.tokens, stream.documents) == (len(flat), len(documents))
    assert as_lists(stream) == documents
    assert stream.document_lengths().tolist() == [len(document) for document in documents]
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    assert stream.read(start, stop).tolist() == flat[start:stop]
    assert stream.read(start, stop).dtype == np.int64
    ids, begins = stream.documents_between(start, stop)
    overlapping = [i for i in range(len(documents)) if start < stop and firsts[i] < stop and firsts[i + 1] > start]
    assert ids.tolist() == overlapping
    assert begins.tolist() == [int(firsts[i]) for i in overlapping]

    chosen = data.draw(st.permutations(range(len(documents))))[: data.draw(st.integers(0, len(documents)))]
    view = pickle.loads(pickle.dumps(stream.select(chosen)))
    assert as_lists(view) == [documents[i] for i in chosen]
    assert view.read(0, view.tokens).tolist() == [token for i in chosen for token in documents[i]]
    if view.tokens:
        place = data.draw(st.integers(0, view.tokens - 1))
        ids, begins = view.documents_between(place, place + 1)
        assert view.read(int(begins[0]), view.tokens)[0] == documents[int(ids[0])][0]
        assert len(ids) == 1
        assert begins[0] <= place < begins[0] + len(documents[int(ids[0])])


def test_a_document_longer_than_a_shard_is_not_cut(tmp_path: Path) -> None:
    infos = write(tmp_path, [[1] * 3, [2] * 50, [3] * 2], max_tokens=10)
    assert [info.tokens for info in infos] == [3, 50, 2]


def test_nothing_added_leaves_no_file(tmp_path: Path) -> None:
    assert write(tmp_path, []) == []
    assert list(tmp_path.iterdir()) == []


def test_ids_take_the_smallest_type_that_holds_them() -> None:
    assert token_dtype(65_535) == np.uint16
    assert token_dtype(65_536) == np.int32


def test_streams_join_and_keep_their_documents(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2], [3]], dtype="u2")
    write(tmp_path / "b", [[70_000], [5, 6]], dtype="i4")
    a, b = stream_of(tmp_path / "a"), stream_of(tmp_path / "b")
    assert join_streams([a, b]).read(0, 6).tolist() == [1, 2, 3, 70_000, 5, 6]
    joined = join_streams([a.select([1]), b])
    assert joined.read(0, joined.tokens).tolist() == [3, 70_000, 5, 6]
    assert joined.documents_between(1, 4)[0].tolist() == [2, 3]
    assert join_streams([]).tokens == 0


def test_reading_beyond_the_end_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3]])
    with pytest.raises(IndexError, match=r"\[2, 4\) of a stream of 3"):
        stream_of(tmp_path).read(2, 4)


def test_documents_beyond_two_to_the_31_tokens_are_found(tmp_path: Path) -> None:
    """cases.md A23: byte offsets beyond 2³² and token offsets beyond 2³¹ (the file is sparse)."""
    lengths = np.array([2**31 - 1, 2**31 - 1, 5, 7], dtype="<i4")
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    last = np.arange(100, 107, dtype="<u2")
    with (tmp_path / "big.bin").open("wb") as file:
        file.seek(int(starts[3]) * 2)
        file.write(last.tobytes())
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8])
    header += (4).to_bytes(8, "little") + (5).to_bytes(8, "little")
    parts = [lengths.tobytes(), (starts[:4] * 2).astype("<i8").tobytes(), np.arange(5, dtype="<i8").tobytes()]
    (tmp_path / "big.idx").write_bytes(header + b"".join(parts))
    stream = open_dataset(tmp_path / "big").splits["train"]
    assert stream.tokens == 2**32 + 10
    assert stream.read(stream.tokens - 7, stream.tokens).tolist() == last.tolist()
    ids, firsts = stream.documents_between(stream.tokens - 8, stream.tokens)
    assert ids.tolist() == [2, 3]
    assert firsts.tolist() == [2**32 - 2, 2**32 + 3]


def test_index_is_written_right_beyond_two_to_the_31_tokens(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train", np.dtype("u2")) as writer:
        writer.add(np.arange(3), np.array([3]))
        assert writer._spool is not None
        writer._spool.write(np.array([2**31 - 1, 4], dtype="<i4").tobytes())  # as if 4 GiB of tokens had been added
        writer._documents += 2
        writer.close()
    index = np.fromfile(tmp_path / "train-00000.idx", dtype=np.uint8)
    assert np.frombuffer(index, "<i8", count=3, offset=34 + 12).tolist() == [0, 6, 6 + 2 * (2**31 - 1)]


# ------------------------------------------------------------------------------------------------- other people's files


@pytest.fixture(scope="module")
def deepspeed_reader() -> ModuleType:
    """DeepSpeed's Megatron-style reader, loaded alone: the whole package would take seconds to import."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "runtime/data_pipeline/data_sampling/indexed_dataset.py"
    module_spec = importlib.util.spec_from_file_location("deepspeed_indexed_dataset", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["i4", "u2"])
def test_deepspeed_reads_what_we_write(tmp_path: Path, deepspeed_reader: ModuleType, dtype: str) -> None:
    documents = [[5, 6, 7], [8], [60_000, 1, 2, 3]]
    write(tmp_path, documents, dtype=dtype)
    if dtype == "u2":
        # Megatron's code for uint16 is 8; DeepSpeed's own table says uint64 there, so it can't read Megatron's either
        deepspeed_reader.dtypes[8] = (np.uint16, None)
    dataset = deepspeed_reader.MMapIndexedDataset(str(tmp_path / "train-00000"), skip_warmup=True)
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents
    assert dataset.doc_idx.tolist() == [0, 1, 2, 3]
    assert dataset.sizes.tolist() == [3, 1, 4]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_we_read_what_deepspeed_writes(tmp_path: Path, deepspeed_reader: ModuleType, dtype: Any) -> None:
    builder = deepspeed_reader.MMapIndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=dtype)
    for document in [[[1, 2], [3]], [[4, 5, 6]], [], [[7], [8, 9]]]:  # documents of several sentences, one empty
        for sentence in document:
            builder.add_item(torch.tensor(sentence))
        builder.end_document()
    builder._data_file.close()
    with deepspeed_reader.MMapIndexedDataset.Index.writer(str(tmp_path / "corpus.idx"), dtype) as index:
        index.write(builder._sizes, builder._doc_idx)
    dataset = open_dataset(tmp_path / "corpus.bin")
    stream = dataset.splits["train"]
    assert as_lists(stream) == [[1, 2, 3], [4, 5, 6], [], [7, 8, 9]]
    assert stream.documents_between(2, 7)[0].tolist() == [0, 1, 3]
    assert stream.documents_between(2, 7)[1].tolist() == [0, 3, 6]
    assert (dataset.largest_id, dataset.name, dataset.tokenizer_fingerprint) == (9, "corpus", None)
    assert dataset.text_bytes == {"train": None}


def test_a_bare_pair_opens_under_any_of_its_names(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2], [3]], max_tokens=2)
    prefix = tmp_path / "train-00001"
    opened = [open_dataset(path) for path in (prefix, Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))]
    assert {dataset.fingerprint for dataset in opened} == {opened[0].fingerprint}
    assert all(as_lists(dataset.splits["train"]) == [[3]] for dataset in opened)
    assert as_lists(stream_of(tmp_path)) == [[1, 2], [3]]
    assert open_dataset(tmp_path).fingerprint != opened[0].fingerprint


# --------------------------------------------------------------------------------------------------------------- faults


def with_manifest(folder: Path, **changes: Any) -> Path:
    infos = write(folder, [[1, 2, 3], [4, 5]])
    manifest: dict[str, Any] = {
        "format_version": 1,
        "fingerprint": "f",
        "tokenizer": {"fingerprint": "t", "eos_token_id": 1},
        "largest_id": 5,
        "splits": {"train": split_entry(infos, 17)},
        "tables": [],
    }
    write_manifest(folder, {**manifest, **changes})
    return folder


def test_a_prepared_dataset_says_what_its_manifest_says(tmp_path: Path) -> None:
    dataset = open_dataset(with_manifest(tmp_path / "corpus"))
    assert (dataset.name, dataset.fingerprint, dataset.tokenizer_fingerprint) == ("corpus", "f", "t")
    assert (dataset.largest_id, dataset.eos_token_id, dataset.text_bytes) == (5, 1, {"train": 17})
    assert as_lists(dataset.splits["train"]) == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("bare", [True, False])
def test_a_file_that_lacks_one_byte_is_named(tmp_path: Path, suffix: str, bare: bool) -> None:
    """cases.md A17."""
    if bare:
        write(tmp_path, [[1, 2, 3], [4, 5]])
    else:
        with_manifest(tmp_path)
    path = tmp_path / f"train-00000{suffix}"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"train-00000\{suffix} has {size - 1} bytes instead of {size}"):
        open_dataset(tmp_path)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no dataset at"):
        open_dataset(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"neither dataset\.json nor"):
        open_dataset(tmp_path)
    with_manifest(tmp_path)
    (tmp_path / "train-00000.bin").unlink()
    with pytest.raises(UserError, match=r"train-00000\.bin does not exist"):
        open_dataset(tmp_path)


def test_a_foreign_index_is_named(tmp_path: Path) -> None:
    write(tmp_path, [[1]])
    path = tmp_path / "train-00000.idx"
    content = path.read_bytes()
    path.write_bytes(b"X" + content[1:])
    with pytest.raises(UserError, match=r"train-00000\.idx is no Megatron index"):
        open_dataset(tmp_path)
    path.write_bytes(content[:17] + bytes([7]) + content[18:])
    with pytest.raises(UserError, match="dtype code 7"):
        open_dataset(tmp_path)


def test_a_dataset_of_the_future_is_refused(tmp_path: Path) -> None:
    with_manifest(tmp_path, format_version=2)
    with pytest.raises(UserError, match="format version 2, this arriero reads 1"):
        open_dataset(tmp_path)


def test_a_shard_that_is_replaced_under_a_reader_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3]])
    stream = stream_of(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    write(tmp_path, [[7, 8, 9]])
    with pytest.raises(UserError, match="was replaced while it was in use"):
        stream.read(0, 3)


def test_rows_and_maps_read_the_same(tmp_path: Path) -> None:
    """Places in any order by pread, documents one after the other by the map, in both dtypes."""
    generator = np.random.default_rng(5)
    for dtype in ("u2", "i4"):
        documents = [generator.integers(0, 60_000, size=n).tolist() for n in generator.integers(1, 90, size=40)]
        write(tmp_path / dtype, documents, max_tokens=300, dtype=dtype)
        stream = stream_of(tmp_path / dtype)
        flat = np.concatenate(as_lists(stream))
        for start, stop in np.sort(generator.integers(0, stream.tokens + 1, size=(100, 2))).tolist():
            assert stream.read(start, stop).tolist() == flat[start:stop].tolist()


def test_many_shards_need_few_descriptors(tmp_path: Path) -> None:
    write(tmp_path, [[i] for i in range(300)], max_tokens=1)
    stream = stream_of(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert stream.read(0, 300).tolist() == list(range(300))
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 2 * 128


# ----------------------------------------------------------------------------------------------------------- validation


def content(stream: TokenStream) -> set[tuple[int, ...]]:
    return {tuple(document) for document in as_lists(stream)}


def test_the_held_out_documents_stay_when_data_is_added_or_reordered(tmp_path: Path) -> None:
    documents = [[i, i + 1, i * 3 % 1000] for i in range(400)]
    write(tmp_path / "a", documents[:300])
    write(tmp_path / "b", documents[::-1], max_tokens=50)
    train_a, held_a = split_by_hash(stream_of(tmp_path / "a"), 0.2)
    train_b, held_b = split_by_hash(stream_of(tmp_path / "b"), 0.2)
    assert content(held_a) <= content(held_b)
    assert content(train_a) <= content(train_b)
    assert not content(train_b) & content(held_b)
    assert train_b.documents + held_b.documents == 400
    assert 0.1 < held_b.documents / 400 < 0.3


@pytest.mark.parametrize("fraction", [1e-12, 0.5, 1 - 1e-12])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_neither_part_is_empty(tmp_path: Path, fraction: float, count: int) -> None:
    """cases.md A19."""
    write(tmp_path, [[i, 7] for i in range(count)])
    train, held_out = split_by_hash(stream_of(tmp_path), fraction)
    assert train.documents >= 1
    assert held_out.documents >= 1
    assert train.documents + held_out.documents == count


def test_no_split_and_nonsense(tmp_path: Path) -> None:
    write(tmp_path, [[1], [2]])
    stream = stream_of(tmp_path)
    assert [part.documents for part in split_by_hash(stream, 0)] == [2, 0]
    assert [part.documents for part in split_by_hash(stream.select([0]), 0.999)] == [1, 0]
    for fraction in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(UserError, match="makes no sense"):
            split_by_hash(stream, fraction)


def test_the_hash_limit_covers_its_range() -> None:
    assert hash_limit(0) == 0
    assert hash_limit(0.5) == 2**63
    assert hash_limit(1 - 2**-53) < 2**64
