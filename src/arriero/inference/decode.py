"""The forward pass that answers: as few operations as the model allows, over keys and values that stay where they are.

Transformers' own takes about 50 calls a layer, and at one token a row a call costs more than what it computes: 4.8 ms a
token for 8.5 million parameters on a CPU, of which the matrices are 0.7. Here projections that read the same are one
matrix, laid out once as the CPU's kernels want it, and rotations, too, are one. Any other model than those of ``_KNOWN``
runs by Transformers' forward over the same cache, and is said to.

Letters: B rows, T new tokens of each, W columns of the cache in use, H query heads, K key heads, G = H / K, D head size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arriero.errors import UserError

# Layers of these compute what ``_Lean`` does: RMSNorm, rotary attention with shared key heads, a gated unit of SiLU.
_KNOWN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Others make angles by the length that was seen.
_ROPE = {"default", "linear", "llama3", "yarn"}
_BLOCK = 256  # columns that a cache grows by
# The product with 8 bits takes as much longer as there are tokens; beyond this many, casting the weights first is quicker.
_FEW = 32

Linear = Callable[[Tensor], Tensor]


class Cache:
    """Keys and values of B rows, padded on the left: row b's own columns are those from ``starts[b]`` to ``used``."""

    def __init__(self, starts: Sequence[int]) -> None:
        self.starts = list(starts)
        self.used = 0
        self.layers: list[Tensor] = []  # each (B, 2K, columns, D), keys before values

    def write(self, layer: int, both: Tensor) -> Tensor:
        """Put the next tokens' keys and values, (B, 2K, T, D), behind the others'; all of them, (B, 2K, W, D).

        ``used`` moves on when the whole model has run.
        """
        end = self.used + both.shape[2]
        if layer == len(self.layers):
            self.layers.append(both.new_empty(*both.shape[:2], _columns(end), both.shape[3]))
        elif end > self.layers[layer].shape[2]:
            self.layers[layer] = _placed(self.layers[layer], self.used, self.used, _columns(end))
        held = self.layers[layer]
        held[:, :, self.used : end] = both
        return held[:, :, :end]

    def beside(self, other: Cache) -> None:
        """Take the other's rows in below these."""
        used = max(self.used, other.used)
        self.layers = [
            torch.cat(
                [_placed(mine, self.used, used, _columns(used)), _placed(others, other.used, used, _columns(used))]
            )
            for mine, others in zip(self.layers, other.layers, strict=True)
        ]
        self.starts = [start + used - cache.used for cache in (self, other) for start in cache.starts]
        self.used = used

    def keep(self, rows: Sequence[int]) -> None:
        """Drop the other rows, and columns that nobody uses any more."""
        if not rows:
            self.starts, self.used, self.layers = [], 0, []
        elif len(rows) < len(self.starts):
            first = min(self.starts[row] for row in rows)
            index = torch.tensor(rows, device=self.layers[0].device)
            self.starts = [self.starts[row] - first for row in rows]
            self.used -= first
            self.layers = [held[index, :, first:] for held in self.layers]


def _columns(used: int) -> int:
    return -(-used // _BLOCK) * _BLOCK


def _placed(held: Tensor, used: int, end: int, columns: int) -> Tensor:
    """The same with its last column in use just before ``end``, in a tensor of ``columns``."""
    moved = held.new_zeros(*held.shape[:2], columns, held.shape[3])
    moved[:, :, end - used : end] = held[:, :, :used]
    return moved


class Decoder:
    """A causal language model of Transformers', as it answers. It takes the model's weights over.

    quantize: ``int8`` rounds the layers' matrices and the head's to 8 bits, each row by its own scale; CPU only.
    plain: why the model has to run by Transformers' own forward, where it has. Raises ``UserError`` where it can't be
    quantized.
    """

    def __init__(self, causal_lm: Any, *, quantize: str | None = None, plain: str | None = None) -> None:
        self.config, self.generation_config = causal_lm.config, causal_lm.generation_config
        self.device: torch.device = causal_lm.device
        self.note = plain or _why_plain(causal_lm)
        """Why this model runs by Transformers' own forward, or None."""
        if quantize is not None and (quantize != "int8" or self.note or self.device.type != "cpu"):
            why = self.note or f"it is for CPUs, this model is on {self.device.type}"
            raise UserError(f"--quantize {quantize}: {'expected int8' if quantize != 'int8' else why}")
        self.forward: Callable[[Cache, Tensor, Tensor, bool], Tensor]
        self.forward = _Plain(causal_lm) if self.note else _Lean(causal_lm, int8=quantize == "int8")

    @torch.inference_mode()
    def __call__(self, cache: Cache, ids: Tensor, *, last: bool = True) -> Tensor:
        """Run T more tokens of each row, (B, T), and put their keys and values into the cache.

        Returns the logits behind the last one, (B, V), or behind each, (B, T, V); fp32.
        """
        device, new = ids.device, ids.shape[1]
        starts = torch.tensor(cache.starts, device=device)[:, None]
        positions = (torch.arange(cache.used, cache.used + new, device=device) - starts).clamp_(min=0)  # (B, T)
        logits = self.forward(cache, ids, positions, last)
        cache.used += new
        return logits.float()


def _why_plain(causal_lm: Any) -> str | None:
    """What keeps a model from the lean forward, or None."""
    config, kind = causal_lm.config, type(causal_lm).__name__
    if kind not in _KNOWN:
        return f"{kind} runs by Transformers' own forward: the faster one knows {', '.join(sorted(_KNOWN))}"
    rope = config.rope_parameters["rope_type"]
    if rope not in _ROPE:
        return f"{kind} runs by Transformers' own forward: the faster one doesn't know rope_type {rope}"
    if config.hidden_act != "silu":
        return f"{kind} runs by Transformers' own forward: the faster one doesn't know hidden_act {config.hidden_act}"
    return None


class _Layer(NamedTuple):
    """What one decoder layer computes with."""

    norm: Tensor
    qkv: Linear
    head_norm: Tensor | None  # (H + K, D)
    window: int | None
    out: Linear
    gate_norm: Tensor
    gate_up: Linear
    down: Linear


class _Lean:
    """LLaMA's forward, and what differs in Mistral's, Qwen 2's and Qwen 3's: a window, biases, norms of heads."""

    def __init__(self, causal_lm: Any, *, int8: bool) -> None:
        config, model = causal_lm.config, causal_lm.model
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = model.layers[0].self_attn.head_dim
        self.eps = config.rms_norm_eps
        self.embedding = model.embed_tokens.weight.detach()
        self.norm = model.norm.weight.detach()
        self.rotary = model.rotary_emb
        self.cos = self.sin = self.embedding.new_empty(0, self.heads + 2 * self.key_heads, self.size)
        make = partial(_linear, int8=int8)
        self.head = make(causal_lm.lm_head)
        self.layers = [self._layer(layer, make) for layer in model.layers]

    def _layer(self, layer: Any, make: Callable[..., Linear]) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        head_norm = None
        if hasattr(attention, "q_norm"):
            parts = ((attention.q_norm, self.heads), (attention.k_norm, self.key_heads))
            head_norm = torch.cat([norm.weight.detach().expand(count, -1) for norm, count in parts])
        window = getattr(attention, "sliding_window", None)
        if attention.__class__.__name__ == "MistralAttention":
            window = attention.config.sliding_window
        return _Layer(
            layer.input_layernorm.weight.detach(),
            make(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norm,
            window,
            make(attention.o_proj),
            layer.post_attention_layernorm.weight.detach(),
            make(mlp.gate_proj, mlp.up_proj),
            make(mlp.down_proj),
        )

    def __call__(self, cache: Cache, ids: Tensor, positions: Tensor, last: bool) -> Tensor:
        hidden = F.embedding(ids, self.embedding)  # (B, T, hidden)
        cos, sin = self._angles(cache, positions)
        masks: dict[int | None, Tensor | None] = {}
        for number, layer in enumerate(self.layers):
            heads = layer.qkv(self._normed(hidden, layer.norm)).view(*ids.shape, -1, self.size)  # (B, T, H + 2K, D)
            if layer.head_norm is not None:
                whole = self.heads + self.key_heads
                heads = torch.cat([self._normed(heads[:, :, :whole], layer.head_norm), heads[:, :, whole:]], 2)
            # Values have the angle 0. The half-turn's sign is in the sine.
            heads = torch.addcmul(heads * cos, heads.roll(self.size // 2, -1), sin)
            both = cache.write(number, heads[:, :, self.heads :].transpose(1, 2))
            if layer.window not in masks:
                masks[layer.window] = _mask(cache, ids.shape[1], layer.window, ids.device)
            mixed = self._attend(heads[:, :, : self.heads], both, masks[layer.window])
            hidden = hidden + layer.out(mixed)
            gated = layer.gate_up(self._normed(hidden, layer.gate_norm))
            gate, up = gated.chunk(2, -1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return self.head(self._normed(hidden[:, -1] if last else hidden, self.norm))

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm, rounded before the weight as Transformers' is."""
        return F.rms_norm(hidden, hidden.shape[-1:], None, self.eps) * weight

    def _attend(self, queries: Tensor, both: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, H, D) and (B, 2K, W, D) → (B, T, H·D)"""
        rows, new = queries.shape[:2]
        keys, values = both[:, : self.key_heads], both[:, self.key_heads :]
        if new == 1:
            # The G heads that share a key head stand as its queries.
            shared = queries.view(rows, self.key_heads, -1, self.size)
            return F.scaled_dot_product_attention(shared, keys, values, mask).reshape(rows, 1, -1)
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, mask, is_causal=mask is None, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(rows, new, -1)

    def _angles(self, cache: Cache, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of these positions for queries, keys and (angle 0) values: (B or 1, T, H + 2K, D)."""
        end = cache.used + positions.shape[1]
        if end > len(self.cos):
            self._extend(_columns(end), positions.device)
        if not any(cache.starts):
            return self.cos[None, cache.used : end], self.sin[None, cache.used : end]
        return self.cos[positions], self.sin[positions]

    def _extend(self, length: int, device: torch.device) -> None:
        cos, sin = (one[0] for one in self.rotary(self.embedding, torch.arange(length, device=device)[None]))
        sin = torch.cat([-sin[:, : self.size // 2], sin[:, self.size // 2 :]], -1)
        turned = self.heads + self.key_heads
        self.cos = cos.new_ones(length, turned + self.key_heads, self.size)
        self.sin = torch.zeros_like(self.cos)
        self.cos[:, :turned], self.sin[:, :turned] = cos[:, None], sin[:, None]


def _mask(cache: Cache, new: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which columns each new token sees, bool (B, 1, T, W); None: simply what is before it."""
    end = cache.used + new
    padded = any(cache.starts)
    if (cache.used == 0 or new == 1) and not padded and (window is None or end <= window):
        return None
    columns = torch.arange(end, device=device)
    behind = columns[cache.used :, None] - columns  # (T, W)
    sees = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    starts = torch.tensor(cache.starts, device=device)[:, None, None]
    # Padding sees itself: a softmax of nothing is no number.
    return ((sees & (columns >= starts)) | (behind == 0))[:, None]


class _Plain:
    """Transformers' forward over this cache, whatever the architecture, if it keeps keys and values of every token."""

    def __init__(self, causal_lm: Any) -> None:
        self.model = causal_lm
        self.takes = signature(causal_lm.forward).parameters.keys()
        # Transformers is renaming this argument from one model to the next.
        self.past = next((name for name in ("cache", "past_key_values") if name in self.takes), "")
        if not self.past or getattr(causal_lm, "_is_stateful", False):
            raise self._other_memory()

    def _other_memory(self) -> UserError:
        return UserError(
            f"{type(self.model).__name__} remembers something else than keys and values of every token",
            "Use Transformers' own generate for it.",
        )

    def __call__(self, cache: Cache, ids: Tensor, positions: Tensor, last: bool) -> Tensor:
        from transformers import DynamicCache

        past, end = DynamicCache(), cache.used + ids.shape[1]
        for number, held in enumerate(cache.layers):
            past.update(*held[:, :, : cache.used].chunk(2, 1), number)
        mask = None
        if any(cache.starts):
            starts = torch.tensor(cache.starts, device=ids.device)[:, None]
            mask = (torch.arange(end, device=ids.device) >= starts).long()  # (B, W)
        given = {
            "input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": True,
            "logits_to_keep": int(last), self.past: past,
        }  # fmt: skip
        done = self.model(**{name: value for name, value in given.items() if name in self.takes})
        for number, layer in enumerate(past.layers):
            keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
            if keys is None or values is None or keys.shape != values.shape or keys.shape[2] != end:
                raise self._other_memory()
            cache.write(number, torch.cat([keys, values], 1)[:, :, cache.used :])
        logits: Tensor = done.logits[:, -1] if last else done.logits
        return logits


def _linear(*modules: Any, int8: bool) -> Linear:
    """The modules' products as one, their outputs side by side. The modules give up their weights."""
    weight = (
        torch.cat([module.weight.detach() for module in modules]) if len(modules) > 1 else modules[0].weight.detach()
    )
    bias = None if modules[0].bias is None else torch.cat([module.bias.detach() for module in modules])
    if len(modules) > 1:
        for module in modules:
            module.weight = None
    if int8:
        return _rounded(weight, bias)
    if weight.device.type == "cpu" and _packs(weight):
        # oneDNN's own layout: 60 µs instead of 110 for a head of 8,192 × 256 in bf16, one thread, 130 instead of 220 in fp32.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        product = torch.ops.mkldnn._linear_pointwise
        return lambda inputs: product(inputs, packed, bias, "none", [], "")
    return lambda inputs: F.linear(inputs, weight, bias)


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN's products are the faster ones; small ones in fp32 take 7 µs, and calling oneDNN alone 10."""
    if not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and weight.numel() >= 1 << 20


def _rounded(weight: Tensor, bias: Tensor | None) -> Linear:
    """Weights in 8 bits, each output's largest being 127 steps; activations and sums as they are."""
    scales = weight.float().abs().amax(1).clamp_(min=1e-12) / 127
    steps = (weight.float() / scales[:, None]).round_().to(torch.int8)
    scales = scales.to(weight.dtype)
    product = torch._weight_int8pack_mm

    def linear(inputs: Tensor) -> Tensor:
        flat = inputs.reshape(-1, inputs.shape[-1])
        if len(flat) > _FEW:
            outputs = F.linear(inputs, steps.to(inputs.dtype)) * scales  # 127 steps are exact in bf16
        else:
            outputs = product(flat, steps, scales).view(*inputs.shape[:-1], -1)
        return outputs if bias is None else outputs + bias

    return linear
