"""Cross-entropy straight from hidden states, so that no row's logits exist all at once.

Letters: N tokens of a micro-batch, H hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED_TARGET = -100
# 256 × 8,192 fp32 logits are 8 MiB and stay in a processor's caches; 1,024 × 128,256 are 500 MB, still bounded.
_FEWEST_TOKENS, _MOST_TOKENS = 256, 1024


class LossHead(nn.Linear):
    """The output projection of a causal model, which also sums the loss inside its own forward.

    ZeRO-3 gathers a weight only for its own module's forward, so the loss must be taken here. ``forward(hidden)``
    gives logits ``[..., V]``; ``forward(hidden, targets)`` gives the summed loss, fp32 ``[]``, and each token's loss,
    fp32 ``[N]``, without a gradient.
    """

    chunk_gradient: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Any:
        if targets is None:
            return functional.linear(hidden, self.weight, self.bias)
        return linear_cross_entropy(hidden.flatten(0, -2), self.weight, targets.flatten(), self.chunk_gradient)

    def compile_loss(self) -> None:
        """Compile what is done with a chunk's logits into one kernel: each token's logits pass the caches once."""
        self.chunk_gradient = torch.compile(_fusible_chunk_gradient, dynamic=False)

    @staticmethod
    def install(model: nn.Module) -> None:
        """Turn this model's own ``lm_head`` into a ``LossHead``; parameters, names and ties stay as they are."""
        head = model.lm_head
        if type(head) is not nn.Linear or head.bias is not None:
            raise TypeError(f"expected lm_head to be a Linear without bias, found {head}")
        head.__class__ = LossHead
        head.chunk_gradient = chunk_gradient


def chunk_tokens(hidden: int) -> int:
    """Tokens of a chunk, as many as a hidden state is wide, within bounds.

    Each chunk reads and writes the head's fp32 gradient, 8·V·H bytes, beside some 14·C·V bytes of logits: in chunks of 256
    the loss of a wide model would mostly add up that gradient.
    """
    return min(max(hidden, _FEWEST_TOKENS), _MOST_TOKENS)


def plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same by whole fp32 logits: what ``linear_cross_entropy`` is tested against.

    hidden ``[N, H]``, weight ``[V, H]``, targets int64 ``[N]`` with −100 where nothing is counted.
    Returns the summed loss, fp32 ``[]``, and each token's, fp32 ``[N]``.
    """
    logits = functional.linear(hidden, weight).float()
    losses = functional.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="none")
    return losses.sum(), losses.detach()


def chunk_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of a chunk's tokens, fp32 ``[C]``, and their gradient by the logits ``[C, V]`` in the logits' precision.

    One pass of torch's softmax gives both: its largest value is 1 / Σ exp(logit − largest logit).
    """
    counted, picked = targets != IGNORED_TARGET, targets.clamp(min=0)[:, None]
    precise = logits.float()
    weights = torch.softmax(precise, -1)
    log_sum = precise.amax(-1) - weights.amax(-1).log()
    losses = (log_sum - precise.gather(1, picked).squeeze(1)).where(counted, 0)
    # d loss / d logits = softmax − one-hot, nothing where nothing is counted.
    weights.scatter_add_(1, picked, torch.full_like(log_sum, -1.0)[:, None])
    return losses, weights.mul_(counted[:, None]).to(logits.dtype)


def _fusible_chunk_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """``chunk_gradient`` in operations that torch.compile fuses into one kernel."""
    counted = targets != IGNORED_TARGET
    picked = targets.clamp(min=0)[:, None]
    precise = logits.float()
    largest = precise.amax(-1, keepdim=True)
    weights = (precise - largest).exp()
    total = weights.sum(-1, keepdim=True)
    losses = (largest + total.log() - precise.gather(1, picked)).squeeze(1).where(counted, 0)
    chosen = torch.arange(logits.shape[1], device=logits.device) == picked
    gradient = (weights / total - chosen.float()) * counted[:, None]
    return losses, gradient.to(logits.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    of_chunk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = chunk_gradient,
) -> tuple[Tensor, Tensor]:
    """Summed and per-token cross-entropy of ``hidden @ weight.T`` against ``targets``, chunk by chunk.

    Shapes as in ``plain_linear_cross_entropy``; ``of_chunk``: ``chunk_gradient``, or the same compiled. Gradients are
    taken in the forward pass while a chunk's logits are at hand (as Hsu et al., "Liger Kernel", arXiv:2410.10989, §3),
    which saves computing the logits twice.
    """
    both: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(hidden, weight, targets, of_chunk)  # type: ignore[no-untyped-call]
    return both


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, of_chunk: Any) -> tuple[Tensor, Tensor]:
        wants_grad = any(ctx.needs_input_grad)
        losses = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if wants_grad else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_grad else None
        size = chunk_tokens(hidden.shape[1])
        for start in range(0, len(targets), size):
            chunk = slice(start, start + size)
            losses[chunk], grad = of_chunk(functional.linear(hidden[chunk], weight), targets[chunk])
            if hidden_grad is not None and weight_grad is not None:
                hidden_grad[chunk] = grad @ weight
                weight_grad += grad.T @ hidden[chunk]
        if wants_grad:
            ctx.save_for_backward(hidden_grad, weight_grad)
            ctx.weight_dtype, ctx.scaled = weight.dtype, False
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.scaled:
            raise RuntimeError("the loss's gradients were scaled in place: only one backward pass can go through it")
        ctx.scaled = True
        scale = gradients[0]
        hidden_grad, weight_grad = ctx.saved_tensors
        # In fp32: a scale such as 1/3 rounded to bf16 would make every gradient below the head 0.2 % too large. In place: a
        # second one of the head's size would be the largest tensor of the step.
        return (
            (hidden_grad.float() * scale).to(hidden_grad.dtype),
            weight_grad.mul_(scale).to(ctx.weight_dtype),
            None,
            None,
        )
