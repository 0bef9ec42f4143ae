"""Attention in blocks against the whole matrix of scores: results, gradients, documents, what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from arriero.config.schema import Model
from arriero.model import attention
from arriero.model.attention import NAME, block_attention_forward, implementation, plain_attention, varlen_arguments

SCALE = 0.2
HEADS, KEY_HEADS, WIDTH = 4, 2, 16


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK_QUERIES", 16)
    assert implementation(Model()) == NAME


def positions(rows: int, tokens: int, documents: int) -> Tensor:
    draw = torch.Generator().manual_seed(rows * tokens + documents)
    found = torch.arange(tokens).repeat(rows, 1)
    for row in range(rows):
        for cut in sorted(torch.randperm(tokens - 1, generator=draw)[: documents - 1].tolist()):
            found[row, cut + 1 :] = torch.arange(tokens - cut - 1)
    return found


def mask_of(position_ids: Tensor, dtype: torch.dtype, **config: Any) -> Tensor | None:
    """As Transformers makes it for a model that attends by this kernel."""
    made = AutoConfig.for_model("mistral", hidden_size=64, **({"sliding_window": None} | config))
    made._attn_implementation = NAME
    create = create_sliding_window_causal_mask if "sliding_window" in config else create_causal_mask
    return create(
        config=made,
        inputs_embeds=torch.zeros(*position_ids.shape, 64, dtype=dtype),
        attention_mask=None,
        position_ids=position_ids,
        past_key_values=None,
    )


def inputs(rows: int, tokens: int) -> list[Tensor]:
    """Query, key, value and the gradient from above, as a decoder layer hands them over: heads are strided."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = [(rows, tokens, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    strided = [torch.randn(shape, generator=draw).bfloat16().transpose(1, 2) for shape in shapes]
    return [*strided, torch.randn(rows, tokens, HEADS, WIDTH, generator=draw).bfloat16()]


def run(attend: Any, query: Tensor, key: Tensor, value: Tensor, upstream: Tensor) -> list[Tensor]:
    given = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    mixed = attend(*given)
    mixed.backward(upstream.to(mixed.dtype))
    return [mixed.detach(), *(tensor.grad for tensor in given)]


def in_blocks(mask: Tensor | None) -> Any:
    return lambda q, k, v: block_attention_forward(nn.Module(), q, k, v, mask, scaling=SCALE)[0]


@pytest.mark.parametrize("tokens", [48, 50, 16, 7])
@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize("kept", [0, 100])
def test_blocks_are_as_near_to_fp64_as_the_fused_kernel(
    tokens: int, documents: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative errors of output and gradients; one rounding to bf16 is 2⁻⁹ = 0.002, and weights are rounded once."""
    monkeypatch.setattr(attention, "_KEPT_KEYS_PER_WIDTH", kept)
    where = positions(3, tokens, documents)
    mask = mask_of(where, torch.bfloat16)
    assert (mask is None) == (documents == 1)
    given = inputs(3, tokens)
    exact_mask = None if mask is None else mask.double()
    exact = run(lambda q, k, v: plain_attention(q, k, v, exact_mask, SCALE), *(t.double() for t in given))
    ours = run(in_blocks(mask), *given)
    groups = HEADS // KEY_HEADS

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        causal = {"is_causal": True} if mask is None else {"attn_mask": mask == 0}
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=SCALE, **causal).transpose(1, 2)

    theirs = run(fused, *given)
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        assert mine.shape == truth.shape
        error, allowed = (float((t.double() - truth).norm() / truth.norm()) for t in (mine, other))
        assert error < max(1.5 * allowed, 0.006)


def test_what_is_computed_again_is_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """So activation memory is bounded without a run's numbers depending on it."""
    mask, given = mask_of(positions(2, 50, 2), torch.bfloat16), inputs(2, 50)
    results = []
    for kept in (0, 100):
        monkeypatch.setattr(attention, "_KEPT_KEYS_PER_WIDTH", kept)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.numel()) or t, lambda t: t):
            results.append(run(in_blocks(mask), *given))
        assert len(saved) == (4 if kept == 0 else 4 + 4), "query, key, value, mask; the weights of four blocks"
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("config", [{}, {"sliding_window": 9}])
def test_documents_do_not_see_one_another(config: dict[str, int]) -> None:
    """Bit for bit: not one output or gradient of the second depends on the first."""
    where = torch.cat([torch.arange(20), torch.arange(30)])[None]
    mask = mask_of(where, torch.bfloat16, **config)
    query, key, value, upstream = inputs(1, 50)
    before = run(in_blocks(mask), query, key, value, upstream)
    key[:, :, :20], value[:, :, :20], query[:, :, :20] = 3.0, -2.0, 0.5
    after = run(in_blocks(mask), query, key, value, upstream)
    assert torch.equal(before[0][:, 20:], after[0][:, 20:])
    assert not torch.equal(before[0][:, :20], after[0][:, :20])
    for one, other in zip(before[1:], after[1:], strict=True):
        assert torch.equal(one[:, :, 20:], other[:, :, 20:])


def test_hidden_blocks_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    product = torch.baddbmm

    def counted(added: Tensor, *args: Tensor, **kwargs: Any) -> Tensor:
        sizes.append(added.shape[-1])
        return product(added, *args, **kwargs)

    monkeypatch.setattr(torch, "baddbmm", counted)
    given = inputs(1, 64)
    in_blocks(mask_of(torch.arange(64)[None], torch.bfloat16))(*given[:3])
    in_blocks(mask_of(torch.arange(16).repeat(4)[None], torch.bfloat16))(*given[:3])
    assert sizes == [16, 32, 48, 64, 16, 16, 16, 16]


def test_what_the_blocks_do_not_do_is_left_to_torch() -> None:
    """fp32 gets Transformers' boolean mask and torch's kernel; so do dropout and a cache's longer keys."""
    where = positions(2, 32, 3)
    mask = mask_of(where, torch.float32)
    assert mask is not None
    assert mask.dtype == torch.bool
    query, key, value, _ = (tensor.float() for tensor in inputs(2, 32))
    module = nn.Module()
    module.num_key_value_groups = HEADS // KEY_HEADS
    got, _ = block_attention_forward(module, query, key, value, mask, scaling=SCALE)
    added = torch.zeros(mask.shape).masked_fill(~mask, -float("inf"))
    torch.testing.assert_close(got, plain_attention(query, key, value, added, SCALE), rtol=1e-4, atol=1e-5)
    longer = block_attention_forward(
        module, query[:, :, -1:].bfloat16(), key.bfloat16(), value.bfloat16(), None, scaling=SCALE
    )[0]
    whole = plain_attention(query, key, value, None, SCALE)[:, -1:]
    torch.testing.assert_close(longer.float(), whole, rtol=0.05, atol=0.02)


def test_a_named_kernel_is_left_alone() -> None:
    assert implementation(Model(attn_implementation="sdpa")) == "sdpa"
    assert NAME in AttentionInterface._global_mapping


def test_flash_attention_is_told_where_documents_begin() -> None:
    """Every row begins one, and ``[0, n)`` of it may go on from the row before by its positions."""
    where = torch.tensor([[0, 1, 2, 0, 1, 2], [3, 4, 5, 6, 0, 0]])
    told = varlen_arguments(where)
    assert told["cu_seq_lens_q"].tolist() == [0, 3, 6, 10, 11, 12]
    assert told["cu_seq_lens_q"].dtype == torch.int32
    assert (told["max_length_q"], told["max_length_k"]) == (6, 6)
    assert varlen_arguments(torch.arange(5).repeat(2, 1))["cu_seq_lens_k"].tolist() == [0, 5, 10]
