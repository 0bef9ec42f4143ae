"""On a CUDA device: kernels against their plain twins, isolation under flash attention, and losses that repeat.

Skipped where there is none. Every tolerance is one or two roundings to bf16 (2⁻⁹ of the largest value).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from arriero.config.schema import Model, ModelShape
from arriero.model.build import PretrainModel, build_model, model_config
from arriero.model.layers import plain_gate, plain_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
ROWS, SEQ_LEN, VOCAB = 2, 256, 512


def build(attention: str = "sdpa") -> PretrainModel:
    shape = ModelShape(hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4)
    recipe = Model(config=shape, tokenizer="unused", attn_implementation=attention)  # type: ignore[arg-type]
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    config = model_config(recipe, None, vocab_size=VOCAB, seq_len=SEQ_LEN, token_ids=ids)
    return build_model(recipe, config, seed=3, placement=nullcontext()).to("cuda", torch.bfloat16).train()


def rows(first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCAB, (ROWS, SEQ_LEN + 1), generator=draw)
    ids[:, :100] = (ids[:, :100] + first) % VOCAB
    positions = torch.cat([torch.arange(100), torch.arange(SEQ_LEN - 100)]).repeat(ROWS, 1)
    return ids[:, :-1].cuda(), ids[:, 1:].cuda(), positions.cuda()


def losses(model: PretrainModel, steps: int = 5) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found = []
    for _ in range(steps):
        loss, _ = model(*rows())
        (loss / (ROWS * SEQ_LEN)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss) / (ROWS * SEQ_LEN))
    return found


def test_losses_repeat_bit_for_bit() -> None:
    assert losses(build()) == losses(build())


def test_compiled_losses_equal_the_eager_ones() -> None:
    compiled = build()
    compiled.compile_layers()
    assert losses(compiled) == pytest.approx(losses(build()), rel=2e-3)


def test_liger_kernels_equal_their_plain_twins() -> None:
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction

    draw = torch.Generator("cuda").manual_seed(1)
    hidden, other = (torch.randn(64, 256, device="cuda", generator=draw).bfloat16() for _ in range(2))
    weight = torch.rand(256, device="cuda", generator=draw).bfloat16()
    normed = LigerRMSNormFunction.apply(hidden, weight, 1e-5, 0.0, "llama", False)
    torch.testing.assert_close(normed, plain_norm(hidden, weight, 1e-5), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(
        LigerSiLUMulFunction.apply(hidden, other), plain_gate(hidden, other), rtol=1e-2, atol=1e-2
    )


def test_a_model_with_liger_trains_as_without() -> None:
    pytest.importorskip("liger_kernel")
    model = build()
    assert model.use_liger() == 7
    assert losses(model) == pytest.approx(losses(build()), rel=2e-3)


@pytest.mark.parametrize("kernel", ["sdpa", "flash_attention_2"])
def test_no_document_sees_another(kernel: str) -> None:
    if kernel != "sdpa":
        pytest.importorskip("flash_attn")
    model = build(kernel).eval()
    per_token: list[Tensor] = []
    head = model.causal_lm.lm_head
    plain = head.forward
    head.forward = lambda *args: (per_token.append(plain(*args)[1]), plain(*args))[1]
    with torch.no_grad():
        for first in (0, 5):
            model(*rows(first))
    one, two = (tokens.view(ROWS, SEQ_LEN) for tokens in per_token)
    assert torch.equal(one[:, 100:], two[:, 100:])
    assert not torch.equal(one[:, :100], two[:, :100])
