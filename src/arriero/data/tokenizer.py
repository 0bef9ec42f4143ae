"""Tokenizers: trained, loaded without the known traps, and run fast with a proof.

Encoding for a dataset never applies a template and never makes a control token out of text: BOS and EOS come from the
document structure alone, and ``<|end_of_text|>`` written in a document is ordinary text.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from arriero.errors import UserError
from arriero.units import format_bytes

logger = logging.getLogger(__name__)

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
# Llama 3's rule for what a token may span: contractions, words with one leading sign, up to three digits, signs with
# the line breaks that follow, line breaks, and spaces up to the one that belongs to the next word.
_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab*", "*.model", "*.tiktoken")
_SPACE_RUNS = ["hello", "  hello", "    x = 1", "a  b", "\thi", "def f():\n        return 1\n", " ", "    "]

_PROOF_BYTES = 1_000_000  # are compared at the start, and as much of the rest: 0.5 s at the 4 MB/s of `tokenizers`
_PROOF_SHARE = 1 / 1024  # of the documents at least, however many there are
_PROOF_CHARACTERS = 1 << 16  # of one document: `tokenizers` takes minutes for a giant one
_SLOW_BATCH_CHARACTERS = 1 << 20  # `tokenizers` needs about 100 bytes of memory per token


# ------------------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class TrainedTokenizer:
    """What was made of what: ``text_bytes`` UTF-8 bytes in ``documents``, of which the cap left out the rest."""

    path: Path
    vocab_size: int
    documents: int
    text_bytes: int


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    out: Path,
    *,
    max_bytes: int = 200_000_000,
    progress: Callable[[str, int, int], None] | None = None,
) -> TrainedTokenizer:
    """Trains a byte-level BPE tokenizer in Llama 3's manner and saves it as a Hugging Face folder.

    Takes documents until ``max_bytes`` of UTF-8 are reached (the last one is cut); ``progress(stage, documents, bytes)`` is
    called on the way, in the stage ``reading`` after each document and once when ``merging`` begins, which takes longer. ``tokenizer(text)`` puts one BOS in front and no EOS; decoding gives back any text exactly.
    Raises ``UserError`` for a vocabulary that can't hold the 256 bytes and the 3 special tokens, for no text at all,
    and for an ``out`` that holds something else.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if vocab_size < 259:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small",
            "It holds the 256 bytes and 3 special tokens at least: give 259 or more, 8192 for a small model.",
        )
    out = Path(out)
    _refuse_foreign_folder(out)
    taken = _Taken(texts, max_bytes, progress)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, PAD)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(taken), trainer=trainer)
    if not taken.bytes:
        raise UserError("there is no text to train a tokenizer on", "Name sources that hold text.")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
            ),
        ]
    )
    _save(tokenizer, out)
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        logger.warning("the text gave only %d of %d tokens: it is small or repeats itself", size, vocab_size)
    return TrainedTokenizer(path=out, vocab_size=size, documents=taken.documents, text_bytes=taken.bytes)


def thin_out(texts: Iterable[str], share: float) -> Iterator[str]:
    """A share of the documents, drawn at random from all over; the same ones each time."""
    draw = random.Random(0).random
    return (text for text in texts if draw() < share)


class _Taken:
    """The texts up to a number of bytes, counted."""

    def __init__(self, texts: Iterable[str], max_bytes: int, progress: Callable[[str, int, int], None] | None) -> None:
        self._texts = texts
        self._max_bytes = max_bytes
        self._progress = progress
        self.documents = 0
        self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            data = text.encode()
            room = self._max_bytes - self.bytes
            if len(data) > room:
                text = data[:room].decode("utf-8", "ignore")  # a character that is cut in two goes whole
            self.documents += 1
            self.bytes += min(len(data), room)
            yield text
            self._say("reading")
            if self.bytes >= self._max_bytes:
                logger.warning(
                    "the tokenizer is trained on %s of the text; raise the limit to use more", format_bytes(self.bytes)
                )
                break
        self._say("merging")

    def _say(self, stage: str) -> None:
        if self._progress is not None:
            self._progress(stage, self.documents, self.bytes)


_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


def _refuse_foreign_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file", "Name a folder for the tokenizer.")
    foreign = sorted(path.name for path in out.iterdir() if path.name not in _FILES) if out.is_dir() else []
    if foreign:
        raise UserError(f"{out} holds other things ({', '.join(foreign[:5])})", "Name a new folder for the tokenizer.")


def _save(tokenizer: Any, out: Path) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": 10**30,
        "model_input_names": ["input_ids", "attention_mask"],  # LLaMA's forward refuses token_type_ids
        "clean_up_tokenization_spaces": False,
    }
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer.save(str(partial / "tokenizer.json"))
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (partial / "tokenizer_config.json").write_text(f"{text}\n", encoding="utf-8")
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


# ------------------------------------------------------------------------------------------------------------- loading


def load_tokenizer(path: str | Path, *, needs_end: bool = True) -> Any:
    """The tokenizer of a Hugging Face folder (or of one ``tokenizer.json`` or ``tokenizer.model``, or a hub name).

    needs_end: whether an EOS token is needed, as for a dataset.

    ``tokenizer.json`` is taken as it stands. A bare SentencePiece ``tokenizer.model`` is converted and compared with
    ``sentencepiece`` on runs of spaces, where the class that LLaMA folders name gets 9 of 10 Python files wrong.
    Raises ``UserError`` where there is no tokenizer, or one without an EOS token, or the conversion isn't exact.
    """
    # TokenizersBackend; naming it this way needs no torch, whose import would take 0.5 s more
    from transformers import PreTrainedTokenizerFast

    path = Path(path).expanduser()
    if not path.exists():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or str(path).startswith("."):
            raise UserError(
                f"there is no tokenizer at {path}",
                "Give the folder that `arriero tokenizer train` made, or a Hugging Face model folder.",
            )
        folder = str(path)
    else:
        folder = str(path if path.is_dir() else path.parent)
        if not has_tokenizer(folder):
            # From a model's configuration alone Transformers makes some families' tokenizers, empty ones.
            raise UserError(
                f"{path} holds no tokenizer: none of {', '.join(_VOCABULARIES)}",
                "Give the folder that `arriero tokenizer train` made, or a Hugging Face folder with its tokenizer.",
            )
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as first:  # noqa: BLE001, whatever the folder holds makes it fail in its own way
        tokenizer = _load_by_class(folder, first)
    model = Path(folder) / "tokenizer.model"
    if model.is_file() and not (Path(folder) / "tokenizer.json").is_file():
        _check_conversion(tokenizer, model)
    if needs_end:
        check_special_tokens(tokenizer, name=str(path))
    return tokenizer


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder holds some tokenizer's vocabulary."""
    return any(found for pattern in _VOCABULARIES for found in Path(path).expanduser().glob(pattern))


def check_special_tokens(tokenizer: Any, name: str = "the tokenizer") -> None:
    """Raises ``UserError`` unless it is one of Hugging Face's fast tokenizers and knows an EOS token."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UserError(
            f"{name} is a {type(tokenizer).__name__}, which has no fast tokenizer behind it",
            "Give a folder with a tokenizer.json.",
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{name} has no EOS token, so nothing could mark where a document ends",
            'Name one in its tokenizer_config.json, for example "eos_token": "</s>".',
        )


def _load_by_class(folder: str, first: Exception) -> Any:
    """For folders whose vocabulary only their own tokenizer class can read, such as vocab.json with merges.txt."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise UserError(
            f"{folder} can't be loaded as a tokenizer: {_first_line(first)}",
            "Give a folder with a tokenizer.json, or a SentencePiece or tiktoken tokenizer.model.",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_conversion(tokenizer: Any, model: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    try:
        original = SentencePieceProcessor(str(model))
    except RuntimeError:
        return  # a tiktoken file has the same name
    for text in _SPACE_RUNS:
        ours, theirs = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, original.encode(text)
        if ours != theirs:
            raise UserError(
                f"{model} was not converted exactly: {text!r} gives {ours}, in sentencepiece {theirs}",
                "Give a folder with a tokenizer.json instead.",
            )


# ------------------------------------------------------------------------------------------------------------ identity


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """xxh3_128 in hex over all that decides which ids a text gets, and over the ids of BOS and EOS.

    Two tokenizers with the same fingerprint make the same dataset; saving and loading doesn't change it. Templates,
    truncation, padding, decoding and chat templates are not part of it.
    """
    state = orjson.loads(tokenizer.backend_tokenizer.to_str())
    deciding = {key: state[key] for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
    deciding["bos_token_id"], deciding["eos_token_id"] = tokenizer.bos_token_id, tokenizer.eos_token_id
    return xxhash.xxh3_128_hexdigest(orjson.dumps(deciding, option=orjson.OPT_SORT_KEYS))


def largest_possible_id(tokenizer: Any) -> int:
    """The largest id in the vocabulary, added tokens included; one less than the rows an embedding needs."""
    return int(max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).values()))


def adds_bos(tokenizer: Any) -> bool:
    """Whether ``tokenizer(text)`` puts BOS in front. Asked of what it does: its flags need not be true."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return False
    backend = tokenizer.backend_tokenizer
    plain = backend.encode("a", add_special_tokens=False).ids
    return bool(bos in backend.encode("a").ids and bos not in plain)


# ------------------------------------------------------------------------------------------------------------ encoding


class EngineMismatch(Exception):
    """gigatoken and tokenizers disagreed on a text: nothing that gigatoken encoded may be kept."""


Proof = Callable[[], None]  # raises EngineMismatch at the first difference; may run in another thread


class Encoder:
    """Texts to token ids: no BOS, no EOS, no control tokens, nothing truncated.

    engine: ``gigatoken`` where it supports the tokenizer, else ``tokenizers`` (30 to 100 times slower); reason says why
    in the second case. gigatoken is to be proven: everything up to the first megabyte, and of the documents after that a
    share, is encoded with both, at most 65,536 characters of each document, by the proofs that ``encode`` hands out. The
    share is about a megabyte of ``text_bytes``, what there is in all (infinite where nobody knows), and one document in
    1,024 at least. The hash of its text draws a document, so that it is the same ones however the documents are divided
    among machines. With ``compare_all`` every document is compared, whole.
    """

    def __init__(self, tokenizer: Any, *, text_bytes: float, engine: str = "auto", compare_all: bool = False) -> None:
        from tokenizers import Tokenizer

        state = orjson.loads(tokenizer.backend_tokenizer.to_str())
        state["truncation"] = state["padding"] = state["post_processor"] = None
        if state["model"].get("dropout"):
            logger.warning(
                "the tokenizer's BPE dropout of %s is left out: a dataset is fixed", state["model"]["dropout"]
            )
            state["model"]["dropout"] = None
        self._reference = Tokenizer.from_str(orjson.dumps(state).decode())
        self._reference.encode_special_tokens = True
        self._fast: Any = None
        self.reason = ""
        if engine != "tokenizers":
            self._fast, self.reason = _load_gigatoken(state)
        self.engine = "gigatoken" if self._fast is not None else "tokenizers"
        self._drawn_below = max(_PROOF_SHARE, _PROOF_BYTES / max(1, text_bytes)) * 2**32
        self._compare_all = compare_all
        self._encoded_bytes = self._compared_bytes = 0  # the second without ``_head``
        # of the documents that are compared only since they stand in the first megabyte: (bytes in front, bytes compared)
        self._head: list[tuple[int, int]] = []

    @property
    def share_compared(self) -> float:
        """The share of the text, in bytes, that both engines encode; 1.0 where tokenizers does it alone."""
        return 1.0 if self._fast is None else joint_share_compared([self.state()])

    def state(self) -> dict[str, Any]:
        """What has been counted, for JSON; ``restore`` goes on from it."""
        return {"encoded": self._encoded_bytes, "compared": self._compared_bytes, "head": list(self._head)}

    def restore(self, state: dict[str, Any]) -> None:
        """Counts on from a ``state`` of the same engine."""
        self._encoded_bytes, self._compared_bytes = state["encoded"], state["compared"]
        self._head = [(before, compared) for before, compared in state["head"]]

    def encode(
        self, texts: list[str], sizes_bytes: Sequence[int] | npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], Proof | None]:
        """(ids of all texts back to back, number of ids of each, what proves them, None where there is nothing to);
        sizes_bytes, hashes: the length and the xxh3_64 of each text in UTF-8. Nothing may be kept before its proof, and those before it, passed."""
        if not texts:
            return np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64), None
        sizes = np.asarray(sizes_bytes, dtype=np.int64)
        proof = None
        if self._fast is None:
            ids, lengths = self._encode_slowly(texts)
        else:
            ids, lengths = _encode_fast(self._fast, texts)
            proof = self._proof(texts, sizes, hashes, ids, lengths)
        self._encoded_bytes += int(sizes.sum())
        return ids, lengths, proof

    def _encode_slowly(self, texts: list[str]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        ids, lengths = [np.empty(0, dtype=np.uint32)], []
        for batch in _batches(texts, _SLOW_BATCH_CHARACTERS):
            for encoding in self._reference.encode_batch_fast(batch, add_special_tokens=False):
                ids.append(np.array(encoding.ids, dtype=np.uint32))
                lengths.append(len(ids[-1]))
        return np.concatenate(ids), np.array(lengths, dtype=np.int64)

    def _proof(
        self,
        texts: list[str],
        sizes_bytes: npt.NDArray[np.int64],
        hashes: npt.NDArray[np.uint64],
        ids: npt.NDArray[Any],
        lengths: npt.NDArray[np.int64],
    ) -> Proof | None:
        # the lower half: the upper one decides which documents are held out
        drawn = ((hashes & np.uint64(2**32 - 1)) < self._drawn_below) | self._compare_all
        before = self._encoded_bytes + np.cumsum(sizes_bytes) - sizes_bytes
        chosen = np.flatnonzero(drawn | (before < _PROOF_BYTES)).tolist()
        if not chosen:
            return None
        ends = np.cumsum(lengths)
        longest = max(map(len, texts)) if self._compare_all else _PROOF_CHARACTERS
        compared = [texts[place][:longest] for place in chosen]
        fast = [ids[ends[place] - lengths[place] : ends[place]].copy() for place in chosen]  # not to keep all of them
        cut = [number for number, place in enumerate(chosen) if len(texts[place]) > longest]
        if cut:  # a document's head is a text of its own, for both
            head_ids, head_lengths = _encode_fast(self._fast, [compared[number] for number in cut])
            for number, head in zip(cut, np.split(head_ids, np.cumsum(head_lengths)[:-1]), strict=True):
                fast[number] = head
        for place, text in zip(chosen, compared, strict=True):
            size = int(sizes_bytes[place]) if len(text) == len(texts[place]) else len(text.encode())
            if drawn[place]:
                self._compared_bytes += size
            else:
                self._head.append((int(before[place]), size))

        def prove() -> None:
            slow_ids, slow_lengths = self._encode_slowly(compared)
            slow = np.split(slow_ids, np.cumsum(slow_lengths)[:-1])
            for text, left, right in zip(compared, fast, slow, strict=True):
                if not np.array_equal(left, right):
                    raise EngineMismatch(f"gigatoken and tokenizers differ on {text[:200]!r}")

        return prove


def joint_share_compared(states: list[dict[str, Any]]) -> float:
    """The share of the text, in bytes, that was compared by gigatoken encoders of which each went on where the one before
    ended, as if it had been one: what the later ones compared as their own first megabyte doesn't count."""
    encoded = compared = 0
    for state in states:
        compared += state["compared"] + sum(size for before, size in state["head"] if encoded + before < _PROOF_BYTES)
        encoded += state["encoded"]
    return compared / encoded if encoded else 0.0


def _batches(texts: list[str], characters: int) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_fast(tokenizer: Any, texts: list[str]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    # always str: bytes that are no UTF-8 crash gigatoken with a SentencePiece tokenizer
    layout = tokenizer.encode_batch(texts).layout
    offsets = np.asarray(layout.offsets.data)
    ids = np.asarray(layout.content.data)[int(offsets[0]) : int(offsets[-1])]
    return ids, np.diff(offsets).astype(np.int64, copy=False)


def _load_gigatoken(state: dict[str, Any]) -> tuple[Any, str]:
    """(the tokenizer for gigatoken, "") or (None, why it can't be had)."""
    import gigatoken

    # Special tokens are left out so that text can't make them; other added tokens are part of the vocabulary.
    plain = [token for token in state["added_tokens"] if not token["special"]]
    if any(token["single_word"] for token in plain):
        return None, "gigatoken ignores single_word of added tokens"  # 17 of 65 documents came out different
    try:
        return gigatoken.Tokenizer.from_json(
            orjson.dumps({**state, **_classic_spaces(state), "added_tokens": plain})
        ), ""
    except RuntimeError as error:
        return None, _first_line(error)


def _classic_spaces(state: dict[str, Any]) -> dict[str, Any]:
    """The same handling of spaces in the form that gigatoken knows, where transformers wrote it in another.

    A converted SentencePiece model turns spaces into ▁, doubles one at the start, and puts one there if there is none;
    that is putting one in front and then turning spaces into ▁, as LLaMA 2's own tokenizer.json says it.
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    double = {"type": "Replace", "pattern": {"Regex": "\\A▁"}, "content": "▁▁"}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
    if state["normalizer"] == {"type": "Sequence", "normalizers": [replace, double]} and state["pre_tokenizer"] in (
        metaspace,
        {"type": "Sequence", "pretokenizers": [metaspace]},
    ):
        prepend = {"type": "Prepend", "prepend": "▁"}
        return {"normalizer": {"type": "Sequence", "normalizers": [prepend, replace]}, "pre_tokenizer": None}
    return {}
