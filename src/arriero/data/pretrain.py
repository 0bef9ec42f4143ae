"""The article's data set-up: ``create_pretrain_dataset`` for people who keep their own training loop.

Rows are cut from the packed stream of documents, one after the other; a row may hold several documents and attends
across them. ``arriero train`` has its own loader, with isolation and an exact order (``arriero.data.loader``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from arriero.data.order import permute, row_key
from arriero.data.plan import Plan, hash_inputs, list_preparation, sayer
from arriero.data.prepare import run_preparation, turn
from arriero.data.shards import (
    TokenStream,
    check_files,
    is_dataset,
    join_streams,
    open_dataset,
    read_manifest,
    split_by_hash,
    write_whole,
)
from arriero.data.tokenizer import check_special_tokens, largest_possible_id, tokenizer_fingerprint
from arriero.errors import UserError

logger = logging.getLogger(__name__)

_IGNORED = -100  # the label that Hugging Face's losses leave out


class PretrainRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of ``seq_len`` tokens from a stream: ``ceil(tokens / seq_len)`` of them, the last one padded.

    An item has ``input_ids``, ``labels`` and ``attention_mask``, int64 [seq_len]. ``labels`` equal ``input_ids`` (the
    model shifts them) and are -100 on padding, where ``input_ids`` is the EOS token and ``attention_mask`` 0.
    With ``key``, row i is the one that the permutation of that key sends i to; without, rows keep the stream's order.
    """

    def __init__(self, stream: TokenStream, seq_len: int, *, pad_id: int, key: int | None = None) -> None:
        self._stream = stream
        self._seq_len = seq_len
        self._pad_id = pad_id
        self._key = key
        self._rows = -(-stream.tokens // seq_len)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -self._rows <= index < self._rows:
            raise IndexError(f"row {index} of {self._rows}")
        row = int(index) % self._rows
        if self._key is not None:
            row = int(permute(np.array([row], dtype=np.int64), self._rows, self._key)[0])
        start = row * self._seq_len
        tokens = torch.from_numpy(self._stream.read(start, min(start + self._seq_len, self._stream.tokens)))
        input_ids = torch.full((self._seq_len,), self._pad_id, dtype=torch.int64)
        labels = torch.full((self._seq_len,), _IGNORED, dtype=torch.int64)
        attention_mask = torch.zeros(self._seq_len, dtype=torch.int64)
        input_ids[: len(tokens)] = tokens
        labels[: len(tokens)] = tokens
        attention_mask[: len(tokens)] = 1
        return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


def create_pretrain_dataset(
    local_rank: int,
    data_path: str | Sequence[str],
    data_split: str,
    data_output_path: str | Path,
    seed: int,
    tokenizer: Any,
    max_seq_len: int,
) -> tuple[PretrainRows, PretrainRows]:
    """(training rows, evaluation rows) of raw text or prepared datasets.

    data_path: a list, or a string with commas, of files, folders, globs and prepared datasets. data_split: ratios such
    as ``99,1`` or ``949,50,1``; the first part trains, the second evaluates, the rest is held out of both. Documents go
    to a part by the hash of their content, so neither ``seed`` nor the number of ranks matters to it. ``seed`` decides
    the order of the training rows. local_rank: -1 in a single process; ranks above 0 log nothing.

    Text is hashed and prepared into ``data_output_path/<fingerprint>`` by whichever rank comes first; the others wait for
    its file lock, not in a collective, and find the result. Raises ``UserError`` for nonsense and for parts that are too small.
    """
    check_special_tokens(tokenizer)
    if max_seq_len < 2:
        raise UserError(
            f"max_seq_len is {max_seq_len}", "A row needs at least 2 tokens, one to predict the other from."
        )
    shares = _parse_split(data_split)
    train, held_out = _open_sources(
        _parse_paths(data_path), Path(data_output_path), tokenizer, round(1 - shares[0], 12)
    )
    evaluation, test = _divide(held_out, shares)
    if test.documents and local_rank <= 0:
        logger.warning(
            "data_split %s: %d documents (%d tokens) are held out of training and evaluation",
            data_split, test.documents, test.tokens,
        )  # fmt: skip
    if train.tokens < max_seq_len:
        raise UserError(
            f"the training part has {train.tokens} tokens in {train.documents} documents, less than one row of {max_seq_len}",
            "Give more text, or a smaller max_seq_len.",
        )
    if shares[1] and not evaluation.documents:
        raise UserError(
            f"data_split {data_split} leaves the evaluation part empty: there are {train.documents} documents in all",
            "Give more documents, or a split without evaluation such as 100,0.",
        )
    pad_id = tokenizer.eos_token_id
    return (
        PretrainRows(train, max_seq_len, pad_id=pad_id, key=row_key(seed, "train", 0)),
        PretrainRows(evaluation, max_seq_len, pad_id=pad_id),
    )


def _parse_paths(data_path: str | Sequence[str]) -> list[str]:
    paths = data_path.split(",") if isinstance(data_path, str) else [str(path) for path in data_path]
    paths = [path.strip() for path in paths if path.strip()]
    if not paths:
        raise UserError("data_path names nothing", "Give files, folders, globs or prepared datasets.")
    return paths


def _parse_split(data_split: str) -> tuple[float, float, float]:
    """The shares for training, evaluation and neither; they sum to 1."""
    try:
        ratios = [float(part) for part in str(data_split).split(",")]
    except ValueError:
        ratios = []
    if not ratios or not all(0 <= ratio < float("inf") for ratio in ratios) or not ratios[0]:
        raise UserError(
            f"data_split is {data_split!r}",
            "Give ratios for training, evaluation and, if you like, more that is held out: 99,1 or 949,50,1.",
        )
    total = sum(ratios)
    return ratios[0] / total, sum(ratios[1:2]) / total, sum(ratios[2:]) / total


def _open_sources(
    paths: list[str], output: Path, tokenizer: Any, held_out_share: float
) -> tuple[TokenStream, TokenStream]:
    """(training documents, documents that are held out) over all sources, in the order given."""
    prepared = [path for path in paths if _is_prepared(Path(path))]
    text = [path for path in paths if path not in prepared]
    folders = [Path(path) for path in prepared]
    if text:
        folders.insert(0, _prepared(text, output, tokenizer, held_out_share))
    parts = [
        _open_parts(folder, tokenizer, held_out_share, divided=bool(text) and number == 0)
        for number, folder in enumerate(folders)
    ]
    return join_streams([train for train, _ in parts]), join_streams([held_out for _, held_out in parts])


def _prepared(text: list[str], output: Path, tokenizer: Any, held_out_share: float) -> Path:
    """The folder of the dataset of some text. Whoever comes first reads, hashes and prepares; the others wait for its file
    lock and go by its note of the files' sizes and times, as does the next start: hashing 1 TB takes 20 minutes."""
    listed = list_preparation(text, tokenizer=tokenizer, validation_split=held_out_share)
    note = output / f".inputs-{listed.fingerprint[:16]}.json"
    output.mkdir(parents=True, exist_ok=True)
    with turn(note, sayer(listed, None, 0.0)):
        folder = _noted(note, listed)
        if folder is None:
            plan = hash_inputs(listed)
            folder = output / plan.fingerprint[:16]
            run_preparation(plan, folder)
            write_whole(note, orjson.dumps({"dataset": folder.name, "modified": listed.modified}))
    return folder


def _noted(note: Path, listed: Plan) -> Path | None:
    """The finished dataset that was made of these files as they are now."""
    with suppress(FileNotFoundError, ValueError, KeyError, UserError):
        noted = orjson.loads(note.read_bytes())
        folder = note.parent / str(noted["dataset"])
        manifest = read_manifest(folder)
        if manifest is not None and noted["modified"] == [list(change) for change in listed.modified]:
            check_files(folder, manifest)
            return folder
    return None


def _is_prepared(path: Path) -> bool:
    return is_dataset(path) or path.suffix in {".bin", ".idx"} or Path(f"{path}.idx").is_file()


def _open_parts(
    folder: Path, tokenizer: Any, held_out_share: float, *, divided: bool
) -> tuple[TokenStream, TokenStream]:
    """(training, held-out) documents of one dataset; ``divided``: it was prepared with this very share."""
    dataset = open_dataset(folder)
    expected = tokenizer_fingerprint(tokenizer)
    if dataset.tokenizer_fingerprint not in (None, expected):
        raise UserError(
            f"{folder} was prepared with tokenizer {dataset.tokenizer_fingerprint}, the one given is {expected}",
            "Prepare the text again with this tokenizer, or give the tokenizer that it was prepared with.",
        )
    if dataset.largest_id > largest_possible_id(tokenizer):
        raise UserError(
            f"{folder} has token id {dataset.largest_id}, the tokenizer ends at {largest_possible_id(tokenizer)}",
            "Give the tokenizer that it was prepared with.",
        )
    if not divided:
        # However it was divided when it was prepared, data_split decides here.
        return split_by_hash(join_streams(list(dataset.splits.values())), held_out_share)
    return dataset.splits["train"], dataset.splits.get("validation", join_streams([]))


def _divide(held_out: TokenStream, shares: tuple[float, float, float]) -> tuple[TokenStream, TokenStream]:
    """(evaluation, neither) from the held-out documents."""
    _, evaluation, rest = shares
    if not rest:
        return held_out, join_streams([])
    if not evaluation:
        return join_streams([]), held_out
    return split_by_hash(held_out, rest / (evaluation + rest))
