"""One update the plain way: one process, PyTorch alone, whole logits. What every layout is compared with.

Nothing here is clever, and no code of the engine or of the loss is used: what both got wrong would look right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# The named fp32 parameters → the optimizer over them.
MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Rows:
    """The rows of one step: int64 tensors ``[rows, seq_len]``; targets are −100 where the loss counts nothing."""

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor


@dataclass(frozen=True)
class Trained:
    """What came of some steps: each one's loss and gradient norm before clipping, and the fp32 weights in the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def plain_updates(
    causal_lm: Any,
    steps: Sequence[Rows],
    *,
    make_optimizer: MakeOptimizer,
    rates: Sequence[float],
    max_grad_norm: float,
    low: torch.dtype,
) -> Trained:
    """Train a Transformers causal model on these steps, one after the other, a step's rows at once.

    low: precision of weights and activations; masters are fp32. rates: learning rate of each step. max_grad_norm: 0
    doesn't clip. A step's loss is the sum over its targets divided by their number.
    """
    # The model may carry arriero's own head, which sums the loss chunk by chunk; here it is a projection again.
    causal_lm.lm_head.__class__ = nn.Linear
    # And its own attention in blocks.
    causal_lm.set_attn_implementation("sdpa")
    named = dict(causal_lm.named_parameters())
    masters = {name: nn.Parameter(value.detach().float().clone()) for name, value in named.items()}
    for value in named.values():
        value.data = value.data.to(low)
    optimizer = make_optimizer(masters.items())
    losses, norms = [], []
    for rows, rate in zip(steps, rates, strict=True):
        logits = causal_lm(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False).logits.float()
        count = (rows.targets != -100).sum()
        loss = functional.cross_entropy(logits.flatten(0, 1), rows.targets.flatten(), reduction="sum") / count
        loss.backward()  # type: ignore[no-untyped-call]
        for name, value in named.items():
            assert value.grad is not None
            masters[name].grad = value.grad.float()
            value.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for name, value in named.items():
            value.data.copy_(masters[name].detach())
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return Trained(losses, norms, {name: master.detach() for name, master in masters.items()})
