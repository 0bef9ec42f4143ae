"""The forward pass that answers is Transformers': every family, with a cache and without, alone and padded."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import make_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from arriero.config.schema import Model
from arriero.errors import UserError
from arriero.inference.decode import Cache, Decoder
from arriero.model.build import build_model

SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "llama-3-rope-tied": (
        LlamaForCausalLM,
        LlamaConfig(
            **SHAPE, tie_word_embeddings=True, rope_parameters={**LLAMA3, "original_max_position_embeddings": 64}
        ),
    ),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "mistral-window": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=9)),
    "qwen2-biases": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    ),
    "qwen3-head-norms": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32)),
    "by-transformers": (GPT2LMHeadModel, GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)),
}  # fmt: skip


def made(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    """Transformers' model and ours, of the same weights; spread widely, so that rounding doesn't decide greedy choices."""
    kind, config = FAMILIES[family]
    torch.manual_seed(3)
    theirs = kind(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs = theirs.to(dtype)
    return theirs, Decoder(copy.deepcopy(theirs))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 2e-5), (torch.bfloat16, 0.25)])
def test_logits_are_transformers(family: str, dtype: torch.dtype, within: float) -> None:
    """Three rows of unlike length, thirty tokens at once and ten one by one; the logits' largest is 5."""
    theirs, ours = made(family, dtype)
    assert (ours.note is not None) == (family == "by-transformers")
    if ours.note:
        assert ours.note.startswith("GPT2LMHeadModel runs by Transformers' own forward: the faster one knows Llama")
    torch.manual_seed(4)
    ids, lengths = torch.randint(0, 512, (3, 40)), (40, 25, 17)
    with torch.no_grad():
        wanted = [theirs(ids[row : row + 1, 40 - length :]).logits[0].float() for row, length in enumerate(lengths)]
    cache = Cache([40 - length for length in lengths])
    got = [ours(cache, ids[:, :30], last=False), *(ours(cache, ids[:, n : n + 1])[:, None] for n in range(30, 40))]
    logits = torch.cat(got, 1)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(logits[row, 40 - length :], wanted[row], atol=within, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers(family: str) -> None:
    theirs, ours = made(family)
    prompt = torch.tensor([[5, 77, 301]])
    wanted = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=300, min_new_tokens=300, do_sample=False,
        pad_token_id=0, suppress_tokens=[2],
    )[0, 3:].tolist()  # fmt: skip
    cache, token, said = Cache([0]), prompt, []
    for _ in range(300):  # beyond the 256 columns that a cache begins with
        logits = ours(cache, token).clone()
        logits[:, 2] = float("-inf")
        token = logits.argmax(-1, keepdim=True)
        said.append(int(token))
    assert said == wanted
    assert len(set(said)) > 10


def test_rows_beside_one_another_and_gone() -> None:
    """A cache takes rows in, wider and narrower ones, and lets them go: what is left computes as if alone."""
    _, ours = made("mistral-window")
    torch.manual_seed(6)
    ids = torch.randint(0, 512, (4, 300))
    lengths = [20, 270, 11, 40]
    together = Cache([0])
    ours(together, ids[:1, :20])
    for row in (1, 2, 3):
        alone = Cache([0])
        ours(alone, ids[row : row + 1, : lengths[row]])
        together.beside(alone)
    kept = [0, 1, 2, 3]
    for leaving in (1, 3, None):
        following = torch.stack([ids[row, lengths[row] : lengths[row] + 1] for row in kept])
        logits = ours(together, following)
        for place, row in enumerate(kept):
            lengths[row] += 1
            expected = ours(Cache([0]), ids[row : row + 1, : lengths[row]])[0]
            torch.testing.assert_close(logits[place], expected, atol=2e-5, rtol=0)
        if leaving is not None:
            together.keep([place for place, row in enumerate(kept) if row != leaving])
            kept.remove(leaving)
    assert together.used == max(lengths[0], lengths[2])
    together.keep([])
    assert together.used == 0


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 5e-5), (torch.bfloat16, 0.3)])
def test_logits_are_those_of_training(tmp_path: Path, dtype: torch.dtype, within: float) -> None:
    """The same folder through the model that trains, with its own attention and head; the largest logit is 7."""
    folder = make_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    recipe = Model(model_name_or_path=str(folder))
    trained = build_model(recipe, config, seed=1, placement=nullcontext(), folder=folder).to(dtype).eval()
    ours = Decoder(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
    torch.manual_seed(4)
    ids = torch.randint(0, 512, (2, 40))
    with torch.no_grad():
        wanted = trained(ids, None, torch.arange(40).repeat(2, 1)).float()
    cache = Cache([0, 0])
    logits = torch.cat([ours(cache, ids[:, :25], last=False), *(ours(cache, ids[:, n : n + 1])[:, None] for n in range(25, 40))], 1)  # fmt: skip
    torch.testing.assert_close(logits, wanted, atol=within, rtol=0)


def test_eight_bits_are_near() -> None:
    """Each output's row is rounded by its own scale: half a step at most, 1/254 of the row's largest weight."""
    theirs, _ = made("qwen2-biases")
    theirs = theirs.to(torch.bfloat16)
    exact, rounded = Decoder(copy.deepcopy(theirs)), Decoder(copy.deepcopy(theirs), quantize="int8")
    torch.manual_seed(4)
    ids = torch.randint(0, 512, (2, 40))
    a, b = exact(Cache([0, 0]), ids, last=False), rounded(Cache([0, 0]), ids, last=False)
    assert 0 < float((a - b).abs().mean()) < 0.06 * float(a.abs().mean())
    with pytest.raises(UserError, match="--quantize int4: expected int8"):
        Decoder(theirs, quantize="int4")
    with pytest.raises(UserError, match="GPT2LMHeadModel runs by Transformers' own forward"):
        Decoder(made("by-transformers")[0], quantize="int8")


def test_angles_that_depend_on_the_length_run_by_transformers() -> None:
    scaled = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    note = Decoder(LlamaForCausalLM(scaled)).note
    assert note is not None
    assert note.endswith("the faster one doesn't know rope_type dynamic")


def test_what_keeps_no_keys_and_values_is_refused() -> None:
    """And not answered wrongly: a state that isn't there for every token can neither be padded nor cut."""
    kind = MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=1, state_size=4, eos_token_id=2)
    with pytest.raises(UserError, match="MambaForCausalLM remembers something else than keys and values"):
        Decoder(MambaForCausalLM(kind))
