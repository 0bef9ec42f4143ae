"""A tokenizer as GGUF states it, where llama.cpp splits text the same way; the others are refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arriero.errors import UserError

# Token types of the GGUF format.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# How text is cut before merging, and whether whole words skip the merges → llama.cpp's name for it (tokenizer.ggml.pre).
# "dbrx" is Llama 3's cut without the skipping, which is what tokenizers that are trained here have.
_BYTE_LEVEL = {
    ((("split", _LLAMA3), ("bytes", False)), True): "llama-bpe",
    ((("split", _LLAMA3), ("bytes", False)), False): "dbrx",
    ((("split", _QWEN2), ("bytes", False)), False): "qwen2",
    ((("digits", True), ("bytes", True)), False): "smollm",
    ((("bytes", True),), False): "gpt-2",
}
_SPACE = "▁"


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the order of their ids, with types, and either merges (byte-level BPE) or scores (SentencePiece)."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None
    scores: list[float] | None
    add_space_prefix: bool
    ids: dict[str, int]
    """``bos``, ``eos``, ``unk`` and ``pad``, as far as there are such."""
    add_bos: bool
    add_eos: bool
    chat_template: str | None


def read_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """The tokenizer of a Hugging Face folder, filled up to ``vocab_size`` tokens.

    Raises ``UserError`` where llama.cpp would give other ids than the tokenizer does.
    """
    # Not AutoTokenizer: beside a Qwen configuration it takes any tokenizer.json for Qwen's and cuts text its way.
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    bpe = state["model"]
    odd = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if bpe.get(key)]
    if bpe["type"] != "BPE" or odd:
        raise _refused(f"its model is {bpe['type']}" + (f" with {', '.join(odd)}" if odd else ""))
    added = {token["id"]: token for token in state["added_tokens"]}
    for token in added.values():
        if not token["special"] and (token["single_word"] or token["lstrip"] or token["rstrip"]):
            raise _refused(f"its added token {token['content']!r} takes in what stands beside it")
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in bpe["merges"]]
    tokens, types = _tokens(bpe, added, vocab_size)
    cut = _cut(state["pre_tokenizer"])
    by_bytes = any(step[0] == "bytes" for step in cut)
    if by_bytes:
        pre = _byte_level_name(state, cut)
    else:
        pre = "default"
        _check_sentencepiece(state, cut)
    plain, whole = (tokenizer("a", add_special_tokens=flag).input_ids for flag in (False, True))
    named = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "unk": tokenizer.unk_token_id}
    ids = {key: value for key, value in {**named, "pad": tokenizer.pad_token_id}.items() if value is not None}
    return Vocabulary(
        model="gpt2" if by_bytes else "llama",
        pre=pre,
        tokens=tokens,
        types=types,
        # A space inside a token of a byte-level BPE is written Ġ, so that it can't be taken for the one in between.
        merges=[" ".join(merge) for merge in merges] if by_bytes else None,
        scores=None if by_bytes else _scores(tokens, types, merges),
        add_space_prefix=not by_bytes and tokens[plain[0]].startswith(_SPACE),
        ids=ids,
        add_bos=len(whole) > len(plain) and whole[0] == ids.get("bos"),
        add_eos=len(whole) > len(plain) and whole[-1] == ids.get("eos"),
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )


def write_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    """The ``tokenizer.*`` fields of a GGUF file."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.add_space_prefix)
        writer.add_remove_extra_whitespaces(False)
    for name, number in vocabulary.ids.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def _tokens(bpe: dict[str, Any], added: dict[int, dict[str, Any]], vocab_size: int) -> tuple[list[str], list[int]]:
    """Text and type of every id; ids without a token are filled up."""
    by_id = {number: text for text, number in bpe["vocab"].items()}
    tokens, types = [], []
    for number in range(vocab_size):
        text = added[number]["content"] if number in added else by_id.get(number)
        if text is None:
            tokens.append(f"[PAD{number}]")
            types.append(UNUSED)
            continue
        tokens.append(text)
        if text == bpe.get("unk_token"):
            types.append(UNKNOWN)
        elif number in added:
            types.append(CONTROL if added[number]["special"] else USER_DEFINED)
        elif bpe.get("byte_fallback") and re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            types.append(BYTE)
        else:
            types.append(NORMAL)
    return tokens, types


def _cut(pre_tokenizer: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """The steps that cut text before merging, in a form that can be looked up."""
    if pre_tokenizer is None:
        return ()
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return tuple(step for one in pre_tokenizer["pretokenizers"] for step in _cut(one))
    if kind == "Split" and (pre_tokenizer["behavior"], pre_tokenizer["invert"]) == ("Isolated", False):
        return (("split", pre_tokenizer["pattern"].get("Regex")),)
    if kind == "ByteLevel" and not pre_tokenizer["add_prefix_space"]:
        return (("bytes", pre_tokenizer.get("use_regex", True)),)
    if kind == "Digits":
        return (("digits", pre_tokenizer["individual_digits"]),)
    if kind == "Metaspace" and pre_tokenizer["replacement"] == _SPACE and not pre_tokenizer.get("split", True):
        return (("spaces", pre_tokenizer["prepend_scheme"]),)
    raise _refused(f"it cuts text by {json.dumps(pre_tokenizer, ensure_ascii=False)[:200]}")


def _byte_level_name(state: dict[str, Any], cut: tuple[tuple[str, Any], ...]) -> str:
    name = _BYTE_LEVEL.get((cut, bool(state["model"].get("ignore_merges"))))
    if name is None:
        raise _refused(f"it cuts text by {cut}")
    # llama.cpp doesn't normalise; NFC, which Qwen's have, changes only text that isn't composed already.
    if state["normalizer"] not in (None, {"type": "NFC"}):
        raise _refused(f"it normalises text by {state['normalizer']}")
    return name


def _check_sentencepiece(state: dict[str, Any], cut: tuple[tuple[str, Any], ...]) -> None:
    """``UserError`` unless all it does with text is to write spaces as ▁ and put one in front."""
    if not state["model"].get("byte_fallback"):
        raise _refused("it has neither byte-level tokens nor a fallback to bytes")
    normalizer = state["normalizer"]
    steps = (normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]) if normalizer else []
    # A space in front of the text is kept apart from the one that is put there (not by Metaspace alone; docs/export.md).
    known = (
        {"type": "Prepend", "prepend": _SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        {"type": "Replace", "pattern": {"Regex": rf"\A{_SPACE}"}, "content": 2 * _SPACE},
    )
    for step in steps:
        if step not in known:
            raise _refused(f"it normalises text by {json.dumps(step, ensure_ascii=False)}")
    if any(step[0] != "spaces" for step in cut):
        raise _refused(f"it cuts text by {cut}")


def _scores(tokens: list[str], types: list[int], merges: list[tuple[str, ...]]) -> list[float]:
    """Scores by which llama.cpp merges in the order of ``merges``.

    It merges whatever two neighbours make a token, the highest score first. That is the same as the list where all
    merges that make one token stand together, and where every pair that could make a token is in the list.
    """
    first: dict[str, int] = {}
    previous = ""
    for rank, (left, right) in enumerate(merges):
        whole = left + right
        if whole in first and previous != whole:
            raise _refused(f"its merges into {whole!r} don't stand together")
        first.setdefault(whole, rank)
        previous = whole
    listed = set(merges)
    known = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    for token in known:
        for place in range(1, len(token)):
            pair = (token[:place], token[place:])
            if pair[0] in known and pair[1] in known and pair not in listed:
                raise _refused(f"it doesn't merge {pair[0]!r} and {pair[1]!r}, and llama.cpp would")
    lowest = -float(len(merges))
    return [-float(first[token]) if token in first else lowest for token in tokens]


def _refused(reason: str) -> UserError:
    return UserError(
        f"this tokenizer has no GGUF form that llama.cpp reads the same way: {reason}",
        "Export with --format hf. Tokenizers that work: those of arriero tokenizer train, Llama 3's, Qwen's, SmolLM's, "
        "GPT-2's, and SentencePiece BPE with a fallback to bytes.",
    )
