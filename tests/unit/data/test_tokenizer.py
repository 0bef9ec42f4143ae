from __future__ import annotations

import json
import logging
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from arriero.data.tokenizer import (
    BOS,
    EOS,
    PAD,
    Encoder,
    EngineMismatch,
    adds_bos,
    check_special_tokens,
    joint_share_compared,
    largest_possible_id,
    load_tokenizer,
    thin_out,
    tokenizer_fingerprint,
    train_tokenizer,
)
from arriero.errors import UserError

SPACES = ["  hello", "    x = 1", "a  b", "\thi", "hello", "def f():\n        return 1\n\n\n", "字 字", " ", "    "]


def changed(folder: Path, out: Path, **changes: Any) -> Path:
    """A copy of a tokenizer folder with some fields of tokenizer.json changed."""
    shutil.copytree(folder, out)
    path = out / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return out


def measured(texts: list[str]) -> tuple[list[int], Any]:
    """Their sizes and hashes, as the encoder wants them."""
    hashes = [xxhash.xxh3_64_intdigest(text.encode()) for text in texts]
    return [len(text.encode()) for text in texts], np.array(hashes, dtype=np.uint64)


def encode(tokenizer: Any, texts: list[str], **options: Any) -> tuple[list[list[int]], Encoder]:
    encoder = Encoder(tokenizer, text_bytes=sum(len(text.encode()) for text in texts), **options)
    ids, lengths, proof = encoder.encode(texts, *measured(texts))
    if proof is not None:
        proof()
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])], encoder


def by_tokenizers(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


# ------------------------------------------------------------------------------------------------------------ training


def test_a_trained_folder_is_what_auto_tokenizer_loads(tokenizer_folder: Path, tokenizer: Any) -> None:
    auto = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert auto.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert auto.backend_tokenizer.to_str() == Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).to_str()
    assert (auto.bos_token, auto.eos_token, auto.pad_token) == (BOS, EOS, PAD)
    assert len({auto.bos_token_id, auto.eos_token_id, auto.pad_token_id}) == 3
    assert auto.vocab_size == len(auto) == 400
    assert auto.model_max_length > 10**9
    assert set(auto("mule")) == {"input_ids", "attention_mask"}


def test_one_bos_and_no_eos(tokenizer: Any) -> None:
    ids = tokenizer("the mule").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids
    assert adds_bos(tokenizer)


@given(text=st.text(max_size=80))
@settings(max_examples=300, deadline=None)
def test_decoding_gives_back_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    ids, _ = encode(tokenizer, [text])
    assert tokenizer.decode(ids[0]) == text


def test_digits_split_by_three_and_words_take_their_space(tokenizer: Any) -> None:
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("We've 12345 mules\n\n  x")
    assert [piece for piece, _ in pieces] == ["We", "'ve", "Ġ", "123", "45", "Ġmules", "ĊĊ", "Ġ", "Ġx"]


def test_training_stops_at_its_limit_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, int, int]] = []
    with caplog.at_level(logging.WARNING):
        made = train_tokenizer(
            ["赶骡人 " * 1000] * 9, 300, tmp_path / "t", max_bytes=25_000, progress=lambda *at: seen.append(at)
        )
    assert (made.documents, made.vocab_size) == (3, load_tokenizer(tmp_path / "t").vocab_size)
    assert 24_990 <= made.text_bytes <= 25_000
    assert seen[-2:] == [("reading", 3, made.text_bytes), ("merging", 3, made.text_bytes)]
    assert "trained on 24.4 KiB" in caplog.text


def test_thinning_out_takes_from_everywhere() -> None:
    texts = [str(number) * 100 for number in range(10)] * 100
    taken = list(thin_out(texts, 0.3))
    assert abs(len(taken) / len(texts) - 0.3) < 0.05
    assert set(taken) == set(texts)
    assert list(thin_out(texts, 0.3)) == taken
    assert list(thin_out(texts, 1.0)) == texts


def test_training_refuses_nonsense(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a vocabulary of 258 is too small"):
        train_tokenizer(["text"], 258, tmp_path / "t")
    with pytest.raises(UserError, match="no text to train"):
        train_tokenizer([], 300, tmp_path / "t")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds other things \(notes\.txt\)"):
        train_tokenizer(["text"], 300, tmp_path)
    assert not (tmp_path / "t").exists()


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def llama2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model with the settings of LLaMA 2, in a folder that names the class LLaMA 2's folder names."""
    folder = tmp_path_factory.mktemp("llama2")
    lines = [
        "def load(mule):",
        "    return mule + 1",
        "the mule knows the road",
        "赶骡人在黎明前装好货物",
        "        x = 1",
    ] * 40
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_bare_sentencepiece_model_is_converted_exactly(llama2_folder: Path) -> None:
    original = sentencepiece.SentencePieceProcessor(str(llama2_folder / "tokenizer.model"))
    tokenizer = load_tokenizer(llama2_folder)
    for text in SPACES:
        assert tokenizer(text, add_special_tokens=False).input_ids == original.encode(text), text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert adds_bos(tokenizer)
    assert load_tokenizer(llama2_folder / "tokenizer.model")("x").input_ids == tokenizer("x").input_ids


def test_the_trap_that_loading_avoids_is_still_there(llama2_folder: Path) -> None:
    """If this fails, transformers mended its LlamaTokenizer, and `load_tokenizer` may become simpler."""
    original = sentencepiece.SentencePieceProcessor(str(llama2_folder / "tokenizer.model"))
    auto = AutoTokenizer.from_pretrained(llama2_folder)
    assert any(auto(text, add_special_tokens=False).input_ids != original.encode(text) for text in SPACES)


def test_a_conversion_that_is_not_exact_is_refused(llama2_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama2_folder, tmp_path / "other")
    wrong = load_tokenizer(llama2_folder)
    wrong.backend_tokenizer.normalizer = None
    from arriero.data.tokenizer import _check_conversion

    with pytest.raises(UserError, match="was not converted exactly"):
        _check_conversion(wrong, folder / "tokenizer.model")


def test_sentencepiece_runs_on_gigatoken(llama2_folder: Path) -> None:
    tokenizer = load_tokenizer(llama2_folder)
    texts = [*SPACES, "a </s> b", "<s>", "▁ literal", "\ufeff\x00", "x" * 3000, "字" * 3000]
    ids, encoder = encode(tokenizer, texts)
    assert (encoder.engine, encoder.share_compared) == ("gigatoken", 1.0)
    assert ids == by_tokenizers(tokenizer, texts)
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & {token for document in ids for token in document}


def test_a_single_tokenizer_json_will_do(tokenizer_folder: Path, tokenizer: Any) -> None:
    assert tokenizer_fingerprint(load_tokenizer(tokenizer_folder / "tokenizer.json")) == tokenizer_fingerprint(
        tokenizer
    )


def test_what_is_no_tokenizer_is_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(UserError, match="there is no tokenizer at"):
        load_tokenizer(tmp_path / "nowhere")
    # Of this Transformers itself makes an empty tokenizer.
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="can't be loaded as a tokenizer"):
        load_tokenizer(tmp_path)
    folder = shutil.copytree(tokenizer_folder, tmp_path / "no-eos")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with pytest.raises(UserError, match="has no EOS token"):
        load_tokenizer(folder)
    with pytest.raises(UserError, match="is a int, which has no fast tokenizer"):
        check_special_tokens(5)


# ------------------------------------------------------------------------------------------------------------ identity


def test_a_fingerprint_survives_saving_and_use(tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    fingerprint = tokenizer_fingerprint(tokenizer)
    tokenizer("some text", truncation=True, max_length=3, padding="max_length")
    tokenizer.save_pretrained(tmp_path / "copy")
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    assert tokenizer_fingerprint(load_tokenizer(tmp_path / "copy")) == fingerprint
    assert tokenizer_fingerprint(load_tokenizer(tokenizer_folder)) == fingerprint


def test_a_fingerprint_changes_with_what_decides_ids(tokenizer_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    extended = load_tokenizer(tokenizer_folder)
    extended.add_tokens(["mulemulemule"])
    other_eos = load_tokenizer(tokenizer_folder)
    other_eos.eos_token = PAD
    normalized = load_tokenizer(changed(tokenizer_folder, tmp_path / "nfc", normalizer={"type": "NFC"}))
    prints = [tokenizer_fingerprint(each) for each in (tokenizer, extended, other_eos, normalized)]
    assert len(set(prints)) == 4
    assert (largest_possible_id(tokenizer), largest_possible_id(extended)) == (399, 400)


@pytest.mark.parametrize("single", ["$A", f"{BOS} $A", f"{BOS} $A {EOS}", f"$A {EOS}"])
def test_bos_is_asked_of_what_the_tokenizer_does(tokenizer_folder: Path, single: str) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    specials = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
    assert adds_bos(tokenizer) == single.startswith(BOS)


# ------------------------------------------------------------------------------------------------------------ encoding

ODD = [
    "plain",
    f"a {EOS} b {BOS}{PAD}",
    " " * 50,
    "\t\t\r\n\r\n",
    "👩‍👩‍👧‍👦🇦🇷",
    "\x00\x01\x7f\x80\x9f",
    "e\u0301 \u1112\u1161\u11ab",
    "مرحبا بالعالم",
    "\ufeff\u200b\u00a0",
    "a" * 5000,
    "字" * 5000,
    "1234567890 " * 30,
]


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_text_never_makes_a_control_token(tokenizer: Any, engine: str) -> None:
    ids, encoder = encode(tokenizer, ODD, engine="auto" if engine == "gigatoken" else engine)
    assert (encoder.engine, encoder.share_compared) == (engine, 1.0)
    assert ids == by_tokenizers(tokenizer, ODD)
    assert min(token for document in ids for token in document) > tokenizer.pad_token_id
    assert [tokenizer.decode(document) for document in ids] == ODD


@given(texts=st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_both_engines_agree_on_any_text(tokenizer: Any, texts: list[str]) -> None:
    assert encode(tokenizer, texts)[0] == encode(tokenizer, texts, engine="tokenizers")[0]


def test_added_words_stay_one_token(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.add_tokens(["arriero!"])
    ids, encoder = encode(tokenizer, ["the arriero! knows", "xarriero!x"])
    assert encoder.engine == "gigatoken"
    assert all(400 in document for document in ids)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "Unsupported normalizer type"),
        ({"pre_tokenizer": {"type": "Digits", "individual_digits": True}}, "Unsupported pre_tokenizer type"),
    ],
)
def test_what_gigatoken_refuses_runs_on_tokenizers(
    tokenizer_folder: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    tokenizer = load_tokenizer(changed(tokenizer_folder, tmp_path / "t", **change))
    ids, encoder = encode(tokenizer, ODD)
    assert encoder.engine == "tokenizers"
    assert reason in encoder.reason
    assert ids == by_tokenizers(tokenizer, ODD)


def test_a_word_piece_tokenizer_runs_on_tokenizers() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "mule": 1, "##s": 2, "[SEP]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ids, encoder = encode(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[SEP]"), ["mule mules"])
    assert (ids, encoder.engine) == ([[1, 1, 2]], "tokenizers")
    assert "Unsupported model type" in encoder.reason


def test_single_word_tokens_run_on_tokenizers(tokenizer_folder: Path) -> None:
    """gigatoken takes such a tokenizer and encodes it differently, without a word."""
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.add_tokens([AddedToken("mule", single_word=True)])
    texts = ["a mule here", "mulemule"]
    ids, encoder = encode(tokenizer, texts)
    assert (encoder.engine, encoder.reason) == ("tokenizers", "gigatoken ignores single_word of added tokens")
    assert ids == by_tokenizers(tokenizer, texts)


def test_truncation_and_padding_never_touch_a_document(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    whole = encode(tokenizer, ODD)[0]
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9000)
    for engine in ("auto", "tokenizers"):
        assert encode(tokenizer, ODD, engine=engine)[0] == whole
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 4  # the caller's tokenizer is left as it was


def test_dropout_is_left_out_and_said(tokenizer_folder: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    random = load_tokenizer(tokenizer_folder)
    random.backend_tokenizer.model.dropout = 0.5
    assert encode(random, ODD)[0] == encode(tokenizer, ODD)[0]
    assert "BPE dropout of 0.5 is left out" in caplog.text


def test_a_difference_between_the_engines_is_found(tokenizer: Any, tmp_path: Path) -> None:
    train_tokenizer(["the mule knows nothing of roads, " * 9], 300, tmp_path / "other")
    encoder = Encoder(tokenizer, text_bytes=23)
    encoder._fast = Encoder(load_tokenizer(tmp_path / "other"), text_bytes=0)._fast
    _, _, proof = encoder.encode(["the mule knows the road"], *measured(["the mule knows the road"]))
    assert proof is not None
    with pytest.raises(EngineMismatch, match="differ on 'the mule knows the road'"):
        proof()


@pytest.mark.parametrize(
    ("text_bytes", "share"), [(220_000, 5000 / 220_000), (1 << 40, 1 / 1024), (float("inf"), 1 / 1024)]
)
def test_the_proof_covers_the_first_megabyte_and_a_share(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, text_bytes: float, share: float
) -> None:
    """A random megabyte of all that is to come (5,000 bytes here), one document in 1,024 at least."""
    monkeypatch.setattr("arriero.data.tokenizer._PROOF_BYTES", 5000)
    encoder = Encoder(tokenizer, text_bytes=text_bytes)
    for number in range(200):
        texts = [f"text {number} {place}" for place in range(100)]
        encoder.encode(texts, [11] * 100, measured(texts)[1])
    assert encoder.share_compared * 220_000 - 5000 == pytest.approx(215_000 * share, rel=0.5)


def test_the_same_is_compared_however_the_texts_are_divided(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.data.tokenizer._PROOF_BYTES", 5000)
    texts = [f"text {number}" + " mule" * (number % 40) for number in range(2000)]
    total = sum(measured(texts)[0])

    def states(cuts: list[int], batch: int) -> list[dict[str, Any]]:
        found = []
        for begin, end in pairwise([0, *cuts, len(texts)]):
            encoder = Encoder(tokenizer, text_bytes=total)
            for first in range(begin, end, batch):
                part = texts[first : min(first + batch, end)]
                encoder.encode(part, *measured(part))
            found.append(encoder.state())
        return found

    whole = states([], 100)
    share = joint_share_compared(whole)
    assert 5000 / total < share < 3 * 5000 / total
    assert whole == states([], 33)
    for cuts in ([1], [20, 1200], [10, 20, 30, 40]):  # the last ones lie in what is compared as the first bytes
        divided = states(cuts, 7)
        assert joint_share_compared(divided) == share
        assert len(divided[-1]["head"]) > 10  # each compares its own beginning all the same


def test_of_a_giant_document_the_head_is_compared(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.data.tokenizer._PROOF_CHARACTERS", 1000)
    text = "the mule 骡 " * 10_000
    ids, encoder = encode(tokenizer, [text, "short"])
    assert ids == by_tokenizers(tokenizer, [text, "short"])
    assert encoder.share_compared == pytest.approx((len(text[:1000].encode()) + 5) / (len(text.encode()) + 5))
