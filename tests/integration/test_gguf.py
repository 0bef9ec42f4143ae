"""GGUF in a real llama.cpp: the same ids for text and the same greedy continuation as Transformers."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import handmade_run
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from arriero.checkpoint.export import export_checkpoint
from arriero.checkpoint.gguf_file import write_gguf
from arriero.checkpoint.saved import SavedState
from arriero.data.tokenizer import load_tokenizer, train_tokenizer
from arriero.errors import UserError
from arriero.run_folder import RunFolder

llama_cpp = pytest.importorskip("xllamacpp", reason="xllamacpp (llama.cpp as a wheel) is not installed")

TEXTS = [
    "def f(x):\n    return  x + 12345\n\n\n\tclass A: pass",
    "滚滚长江东逝水，浪花淘尽英雄。是非成败转头空：青山依旧在，几度夕阳红。",
    "It's WE'LL  don't — «naïve» e\u0301 é\u00a0ﬁ ①² 😀👩‍👩‍👧\r\n\r\n   ",
    "一二三 123 ４５６ 한국어 العربية हिन्दी <|nothing|> </s",
]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As `arriero tokenizer train` makes it."""
    folder = tmp_path_factory.mktemp("tokenizer") / "bytes"
    texts = [text * 3 for text in TEXTS] + [Path(__file__).read_text(encoding="utf-8")]
    train_tokenizer(texts, 700, folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A SentencePiece model of our own, converted as every bare tokenizer.model is."""
    from sentencepiece import SentencePieceTrainer

    folder = tmp_path_factory.mktemp("sentencepiece")
    lines = (Path(__file__).read_text(encoding="utf-8") + "\n".join(TEXTS)).splitlines()
    SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in lines for _ in range(2)),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return load_tokenizer(folder)


class Server:
    """A llama.cpp server in this process, on a port of its own."""

    def __init__(self, model: Path) -> None:
        settings = llama_cpp.CommonParams()
        settings.model.path = str(model)
        settings.n_ctx, settings.n_parallel, settings.warmup = 256, 1, False
        settings.cpuparams.n_threads = 1
        # Otherwise keys and values are kept in fp16, whatever the weights are.
        settings.cache_type_k = settings.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
        self._server = llama_cpp.Server(settings)

    def ids(self, text: str) -> list[int]:
        return self._post("/tokenize", {"content": text, "add_special": True})["tokens"]

    def greedy(self, prompt: list[int] | str, tokens: int) -> list[int]:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": False, "return_tokens": True}
        return self._post("/completion", body | {"samplers": ["temperature"]})["tokens"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))


@contextmanager
def served(model: Path) -> Iterator[Server]:
    server = Server(model)
    yield server
    del server._server


def exported(folder: Path, config: Any, tokenizer: Any, dtype: str = "fp32") -> tuple[Path, Any]:
    """The GGUF file of a model with random weights, and the model as Transformers has it."""
    checkpoint = handmade_run(folder / "run", config, tokenizer)
    done = export_checkpoint(checkpoint, RunFolder(folder / "run"), folder / "out", form="gguf", dtype=dtype)
    hf = export_checkpoint(checkpoint, RunFolder(folder / "run"), folder / "hf", dtype=dtype)
    (file,) = done.path.glob("*.gguf")
    return file, AutoModelForCausalLM.from_pretrained(hf.path, dtype=torch.float32).eval()


def greedy(model: Any, ids: list[int], tokens: int, margin: float) -> list[int]:
    """Transformers' greedy continuation up to the first choice by less than ``margin``: rounding could turn that."""
    with torch.no_grad():
        done = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            suppress_tokens=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    lead = [float(step[0].topk(2).values.diff().abs()) for step in done.logits]
    clear = next((number for number, value in enumerate(lead) if value < margin), len(lead))
    return done.sequences[0, len(ids) :].tolist()[:clear]


def check_same(file: Path, model: Any, tokenizer: Any, *, margin: float = 1e-2, least: int = 32) -> None:
    compared = 0
    with served(file) as server:
        for text in TEXTS:
            ids = tokenizer(text).input_ids
            assert server.ids(text) == ids, text
            expected = greedy(model, ids, 16, margin)
            # From the text, not from ids.
            assert server.greedy(text, 16)[: len(expected)] == expected
            compared += len(expected)
    assert compared >= least, "too few clear choices to prove anything"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_llama_with_grouped_heads_and_llama3_rope(tmp_path: Path, byte_level: Any, dtype: str) -> None:
    config = LlamaConfig(**SHAPE, vocab_size=len(byte_level), rope_parameters=dict(LLAMA3_ROPE), rms_norm_eps=1e-3)
    file, model = exported(tmp_path, config, byte_level, dtype)
    # In 16 bits llama.cpp rounds what goes into each product too; logits here reach 8.
    check_same(file, model, byte_level, **({} if dtype == "fp32" else {"margin": 0.15, "least": 8}))


def test_mistral_tied_padded_linear_rope_with_added_tokens(tmp_path: Path, byte_level: Any) -> None:
    byte_level.save_pretrained(tmp_path / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    tokenizer.add_tokens(["阿里耶罗", "mule_train"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    config = MistralConfig(
        **SHAPE,
        vocab_size=len(tokenizer) + 13,
        tie_word_embeddings=True,
        sliding_window=None,
        rope_parameters=dict(LINEAR_ROPE),
        head_dim=24,
    )
    file, model = exported(tmp_path, config, tokenizer)
    check_same(file, model, tokenizer)
    text = "a mule_train of 阿里耶罗 <|user|>x"
    with served(file) as server:
        assert server.ids(text)[:3] == tokenizer(text).input_ids[:3]
        assert tokenizer.convert_tokens_to_ids("mule_train") in server.ids(text)
        assert tokenizer.convert_tokens_to_ids("阿里耶罗") in server.ids(text)
    import gguf

    fields = gguf.GGUFReader(file).fields
    types = fields["tokenizer.ggml.token_type"].contents()
    assert types[-13:] == [gguf.TokenType.UNUSED] * 13
    assert types[-16:-13] == [gguf.TokenType.USER_DEFINED] * 2 + [gguf.TokenType.CONTROL]
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    assert fields["tokenizer.ggml.bos_token_id"].contents() == tokenizer.bos_token_id
    assert "output.weight" not in [tensor.name for tensor in gguf.GGUFReader(file).tensors]


def test_llama_with_sentencepiece(tmp_path: Path, sentencepiece: Any) -> None:
    config = LlamaConfig(**SHAPE | {"bos_token_id": 1, "eos_token_id": 2}, vocab_size=len(sentencepiece))
    file, model = exported(tmp_path, config, sentencepiece)
    check_same(file, model, sentencepiece)


@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config], ids=["qwen2", "qwen3"])
def test_qwen(tmp_path: Path, byte_level: Any, config: Any) -> None:
    """Biases on queries, keys and values; norms on queries and keys; another order of rotation."""
    file, model = exported(tmp_path, config(**SHAPE, vocab_size=len(byte_level)), byte_level)
    check_same(file, model, byte_level)


_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def test_every_cut_of_byte_level_tokenizers_gives_llama_cpp_the_same_ids(tmp_path: Path) -> None:
    """Llama 3's, Qwen 2's, SmolLM's and GPT-2's ways of cutting text, each with a vocabulary of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    def split(regex: str) -> Any:
        parts = [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        return pre_tokenizers.Sequence(parts)

    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    cuts = {
        "llama-bpe": (split(_LLAMA3), True),
        "dbrx": (split(_LLAMA3), False),
        "qwen2": (split(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")), False),
        "smollm": (pre_tokenizers.Sequence(digits), False),
        "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False),
    }
    for name, (cut, ignore_merges) in cuts.items():
        backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
        backend.pre_tokenizer, backend.decoder = cut, decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), *TEXTS * 3], trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
        run = tmp_path / name
        with SavedState(handmade_run(run, LlamaConfig(**SHAPE, vocab_size=len(tokenizer)), tokenizer)) as saved:
            file = write_gguf(saved, run / "model", run, dtype="fp32", name=name)
        import gguf

        assert gguf.GGUFReader(run / file).fields["tokenizer.ggml.pre"].contents() == name
        with served(run / file) as server:
            for text in TEXTS:
                assert server.ids(text) == tokenizer(text).input_ids, f"{name}: {text!r}"


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path, byte_level: Any) -> None:
    from transformers import Olmo2Config

    def refused(name: str, config: Any, tokenizer: Any = byte_level) -> str:
        checkpoint = handmade_run(tmp_path / name, config, tokenizer)
        with pytest.raises(UserError) as caught:
            export_checkpoint(checkpoint, RunFolder(tmp_path / name), tmp_path / "out", form="gguf")
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / ".out.tmp").exists()
        return str(caught.value)

    size = {"vocab_size": len(byte_level)}
    assert "olmo2" in refused("olmo", Olmo2Config(**SHAPE, **size, pad_token_id=2))
    assert "sliding_window" in refused("window", MistralConfig(**SHAPE, **size, sliding_window=32))
    assert "gelu" in refused("gelu", LlamaConfig(**SHAPE, **size, hidden_act="gelu"))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "dynamic" in refused("dynamic", LlamaConfig(**SHAPE, **size, rope_parameters=rope))
    from tokenizers import normalizers

    byte_level.save_pretrained(tmp_path / "tokenizer")
    lower = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert "Lowercase" in refused("lower", LlamaConfig(**SHAPE, **size), lower)
