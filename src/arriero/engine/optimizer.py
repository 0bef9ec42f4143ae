"""torch's fused AdamW with decay on matrices only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from arriero.config.schema import Optim


def build_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], optim: Optim) -> torch.optim.AdamW:
    """AdamW over two groups: matrices (embeddings among them) decay, vectors (norms, biases) don't.

    torch's own AdamW and not DeepSpeed's: after a resume the latter takes its beta powers from another formula, and
    losses drift by 1e-4 within five steps. The rate starts at 0 because some of DeepSpeed's wrappers take an empty
    first step while they are set up; the loop sets the rate before every update.
    """
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for _, parameter in parameters:
        # A ZeRO-3 parameter is empty between uses; its full shape is in ds_shape.
        rank = len(getattr(parameter, "ds_shape", parameter.shape))
        (matrices if rank >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_epsilon,
        fused=True,
    )
