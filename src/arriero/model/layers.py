"""What is done to the decoder layers of one model: recomputing their activations, compiling them, faster kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]
# Transformers' modules that compute the same as LLaMA's; others cast or scale differently.
_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
_GATED = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"}


class _Recomputed:
    """A layer's forward of which only the inputs are kept for the backward pass, which runs it a second time.

    Transformers' own switch puts the recomputation inside what torch.compile sees, and a graph that breaks there, as it
    does for attention here, isn't compiled at all. Here it stands around the compiled forward.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.forward: Forward = layer.forward
        self._layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._layer.training and torch.is_grad_enabled():
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return self.forward(*args, **kwargs)


def recompute_layers(causal_lm: Any, every: int) -> None:
    """Keep only the inputs of each ``every``-th decoder layer, the first among them, for the backward pass."""
    for layer in causal_lm.model.layers[::every]:
        layer.forward = _Recomputed(layer)


def compile_layers(causal_lm: Any) -> None:
    """Compile each decoder layer for itself, and the loss: one graph serves all layers, in a tenth of a whole model's
    time. Nothing happens before the first call."""
    for layer in causal_lm.model.layers:
        if isinstance(layer.forward, _Recomputed):
            layer.forward.forward = torch.compile(layer.forward.forward, dynamic=False)
        else:
            layer.compile(dynamic=False)
    if causal_lm.lm_head is not None:  # another stage of a pipeline has it
        causal_lm.lm_head.compile_loss()


def use_liger(causal_lm: Any) -> int:
    """Give this model's norms and gated units Liger's Triton kernels, on a GPU; how many modules changed.

    Its rotary kernel could only replace a function of Transformers' module, for every model of the process, and so isn't
    used. Raises ``ImportError`` where liger-kernel isn't installed.
    """
    from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction

    def norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Any:
        # No offset; statistics and product cast as LLaMA's; the gradient from above stays as it is.
        return LigerRMSNormFunction.apply(hidden, weight, epsilon, 0.0, "llama", False)

    return replace_operations(causal_lm, norm, LigerSiLUMulFunction.apply)


def plain_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich, arXiv:1910.07467) as Transformers' LLaMA has it: fp32 inside, rounded before the
    weight."""
    precise = hidden.float()
    scaled = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(hidden.dtype)


def plain_gate(gate: Tensor, up: Tensor) -> Tensor:
    """The product in SwiGLU (Shazeer, arXiv:2002.05202): silu(gate) · up."""
    return torch.nn.functional.silu(gate) * up


def replace_operations(causal_lm: Any, norm: Callable[..., Any], gate: Callable[..., Any]) -> int:
    """Compute this model's RMSNorms by ``norm`` and its gated units by ``gate``, where they are LLaMA's; how many.

    Signatures are those of ``plain_norm`` and ``plain_gate``. The modules' own forwards are replaced, no class.
    """
    replaced = 0
    for module in causal_lm.modules():
        kind = type(module).__name__
        if kind in _NORMS:
            module.forward = partial(_norm_forward, module, norm)
        elif kind in _GATED and module.config.hidden_act == "silu":
            module.forward = partial(_gated_forward, module, gate)
        else:
            continue
        replaced += 1
    return replaced


def _norm_forward(module: Any, norm: Callable[..., Any], hidden: Tensor) -> Any:
    return norm(hidden, module.weight, module.variance_epsilon)


def _gated_forward(module: Any, gate: Callable[..., Any], hidden: Tensor) -> Any:
    return module.down_proj(gate(module.gate_proj(hidden), module.up_proj(hidden)))
