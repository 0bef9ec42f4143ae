"""What is done to the decoder layers of one model: recomputing their activations, compiling them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]


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
    causal_lm.lm_head.compile_loss()
