"""Causal attention of packed documents on a processor, as bf16 matrix products over blocks of queries.

torch's fused kernel for processors multiplies tiles of one head; oneDNN's batched products do the same work in a third
of the time (8 rows of 256 tokens, 8 heads of 32, one core: forward and backward 11 ms instead of 32). A block of
queries takes only the keys from its first document's beginning to its own end, so what documents hide isn't computed.

Letters: B rows, S tokens of a row, H query heads, K key and value heads, G = H / K, D width of a head, n queries of a
block, k keys that they see.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from arriero.config.schema import Model

NAME = "arriero_blocks"
_BLOCK_QUERIES = 128
# Attention weights of a block are kept for the backward pass up to this many keys per element of a head, else computed
# a second time: at the limit they are a third of a layer's other activations, and without one they grow with S².
_KEPT_KEYS_PER_WIDTH = 8


def implementation(model: Model, *, whole: bool = True) -> str:
    """The attention that Transformers is asked for; ``auto``: flash attention on a GPU that has it, else the blocks.

    whole: False where a rank has only some layers, which then aren't told where documents begin: never flash attention.
    The blocks leave to torch's fused kernel what they don't do themselves: GPUs, fp32, dropout, generation.
    """
    if model.attn_implementation != "auto":
        return model.attn_implementation
    if whole and torch.cuda.is_available() and is_flash_attn_2_available():
        return "flash_attention_2"
    AttentionInterface.register(NAME, block_attention_forward)
    AttentionMaskInterface.register(NAME, block_mask)
    return NAME


def varlen_arguments(position_ids: Tensor) -> dict[str, Any]:
    """Where documents begin, as flash attention's variable-length kernel takes it, from ``[B, S]`` restarting positions.

    Every row begins one. ``max_length`` is the row's: the longest document's would cost another wait for the device.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    offsets = begins.flatten().nonzero().flatten().to(torch.int32)
    offsets = torch.cat([offsets, offsets.new_tensor([position_ids.numel()])])
    longest = position_ids.shape[1]
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}


def block_mask(*args: Any, dtype: torch.dtype = torch.float32, device: Any = "cpu", **kwargs: Any) -> Tensor | None:
    """What is added to the scores, ``[B, 1, S, S]`` in the model's precision: 0 where a query sees a key, −inf else.

    None where every row is one document. Where the kernel isn't used it is Transformers' own boolean mask.
    """
    seen: Tensor | None = sdpa_mask(*args, dtype=dtype, device=device, **kwargs)
    if seen is None or not _serves(torch.device(device), dtype):
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -math.inf)


@torch.compiler.disable(reason="which keys a block needs depends on where documents begin")  # type: ignore[no-untyped-call,untyped-decorator]
def block_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query ``[B, H, S, D]``, key and value ``[B, K, S, D]`` give ``[B, S, H, D]``.

    Other devices and precisions, generation with a cache and dropout go through torch's fused kernel.
    """
    same_length = query.shape[2] == key.shape[2]
    if not _serves(query.device, query.dtype) or not same_length or dropout:
        fused: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return fused
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mixed: Tensor = _BlockAttention.apply(query, key, value, attention_mask, scale)  # type: ignore[no-untyped-call]
    return mixed, None


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The same from the whole matrix of scores, in the precision of its arguments: what the blocks are tested against."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * scale  # [B, H, S, S]
    if mask is None:
        mask = _causal(query.shape[2], scores.dtype)
    return (torch.softmax(scores + mask, -1) @ value).transpose(1, 2)


def _serves(device: torch.device, dtype: torch.dtype | None) -> bool:
    # In fp32 both take the same time.
    return device.type == "cpu" and dtype == torch.bfloat16


def _causal(tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.full((tokens, tokens), -math.inf, dtype=dtype).triu_(1)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, ...]:
        rows, heads, tokens, width = query.shape
        key_heads = key.shape[1]
        # [B·K, G, S, D] and twice [B·K, S, D]: query heads of one key head stand together.
        queries = query.reshape(rows * key_heads, heads // key_heads, tokens, width)
        keys, values = (tensor.reshape(rows * key_heads, tokens, width) for tensor in (key, value))
        mixed = torch.empty_like(queries, memory_format=torch.contiguous_format)
        kept: list[Tensor | None] = []
        for first, begin, end in _blocks(tokens, mask):
            weights = _weights(queries, keys, mask, (first, begin, end), scale)
            block = torch.bmm(weights, values[:, first:end])
            mixed[:, :, begin:end] = block.view(len(queries), -1, end - begin, width)
            keeps = any(ctx.needs_input_grad) and end - first <= _KEPT_KEYS_PER_WIDTH * width
            kept.append(weights if keeps else None)
        ctx.save_for_backward(queries, keys, values, mask, *kept)
        ctx.shape, ctx.scale = (rows, key_heads), scale
        return mixed.view(rows, heads, tokens, width).transpose(1, 2).contiguous()  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, mask, *kept = ctx.saved_tensors
        rows, key_heads = ctx.shape
        stacks, groups, tokens, width = queries.shape
        # [B, S, K, G, D] → [B·K, G, S, D]
        upstream = gradients[0].reshape(rows, tokens, key_heads, groups, width).permute(0, 2, 3, 1, 4)
        upstream = upstream.reshape(queries.shape)
        query_grad = torch.empty_like(queries)
        # A key's gradient comes from several blocks; its sum is fp32.
        key_grad, value_grad = (torch.zeros(keys.shape, dtype=torch.float32) for _ in range(2))
        for (first, begin, end), saved in zip(_blocks(tokens, mask), kept, strict=True):
            weights = saved
            if weights is None:
                weights = _weights(queries, keys, mask, (first, begin, end), ctx.scale)
            mine = queries[:, :, begin:end].reshape(stacks, -1, width)  # [B·K, G·n, D]
            above = upstream[:, :, begin:end].reshape(stacks, -1, width)
            value_grad[:, first:end] += torch.bmm(weights.transpose(1, 2), above)
            weight_grad = torch.bmm(above, values[:, first:end].transpose(1, 2))  # [B·K, G·n, k]
            score_grad = torch._softmax_backward_data(weight_grad, weights, -1, weights.dtype).mul_(ctx.scale)
            block = torch.bmm(score_grad, keys[:, first:end])
            query_grad[:, :, begin:end] = block.view(stacks, groups, end - begin, width)
            key_grad[:, first:end] += torch.bmm(score_grad.transpose(1, 2), mine)
        return (
            query_grad.view(rows, key_heads * groups, tokens, width),
            key_grad.to(keys.dtype).view(rows, key_heads, tokens, width),
            value_grad.to(values.dtype).view(rows, key_heads, tokens, width),
            None,
            None,
        )


def _blocks(tokens: int, mask: Tensor | None) -> list[tuple[int, int, int]]:
    """(first key, first query, end of both) of each block.

    What a query sees begins no earlier than what the queries before it see, so a block's first query tells.
    """
    begins = range(0, tokens, _BLOCK_QUERIES)
    firsts = [0] * len(begins)
    if mask is not None:
        firsts = (mask[:, 0, ::_BLOCK_QUERIES] == 0).any(0).int().argmax(-1).tolist()
    return [(first, begin, min(begin + _BLOCK_QUERIES, tokens)) for first, begin in zip(firsts, begins, strict=True)]


def _weights(queries: Tensor, keys: Tensor, mask: Tensor | None, block: tuple[int, int, int], scale: float) -> Tensor:
    """Attention weights of a block, ``[B·K, G·n, k]``; the softmax is computed in fp32 inside torch's kernel."""
    first, begin, end = block
    stacks, groups, _, width = queries.shape
    count = end - begin
    mine = queries[:, :, begin:end].reshape(stacks, groups * count, width)
    if mask is None:
        hidden = mine.new_zeros(count, end - first)
        hidden[:, begin - first :] = _causal(count, mine.dtype)
        added = hidden.expand(stacks, groups, count, end - first)
    else:
        # [B, 1, 1, n, k] → [B·K, G, n, k]
        added = mask[:, :, None, begin:end, first:end]
        added = added.expand(len(mask), stacks // len(mask), groups, count, end - first)
    scores = added.reshape(stacks, groups * count, end - first)
    scores = torch.baddbmm(scores, mine, keys[:, first:end].transpose(1, 2), alpha=scale)
    return torch.softmax(scores, -1)
