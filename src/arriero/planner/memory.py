"""Memory of one rank by part, from shapes alone.

Bytes of model states after Rajbhandari et al., "ZeRO" (arXiv:1910.02054) §3.1: with 16-bit weights 2 for the weight,
4 for fp32 gradients as we accumulate them, 4 each for master and the two moments, each divided by the ranks that the
ZeRO stage splits it over. Activations after Korthikanti et al. (arXiv:2205.05198) §4, for SwiGLU, without dropout and
with fused attention. Buffers of the allocator and of DeepSpeed's communication are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from arriero.config.schema import ModelShape

# The loss head works through a micro-batch this many tokens at a time (model/loss.py).
_LOSS_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def model_states(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.model_states + self.activations + self.logits


def estimate_memory(
    shape: ModelShape,
    *,
    parameters: int,
    vocab_size: int,
    precision: str,
    zero_stage: int,
    dp: int,
    micro_batch: int,
    seq_len: int,
    activation_checkpointing: bool | int,
) -> MemoryEstimate:
    """Per-part bytes of one rank. ``parameters``: of the whole model; ``micro_batch``: rows of ``seq_len`` tokens;
    ``activation_checkpointing``: n: of every n-th layer."""
    bytes_each = 4 if precision == "fp32" else 2
    tokens = micro_batch * seq_len
    # Stage 1 in bf16 keeps the whole fp32 gradient on every rank; stages 2 and 3 only their part.
    gradient_ranks = dp if zero_stage >= 2 else 1
    gradient_bytes = 4 if zero_stage >= 1 else bytes_each
    # In fp32 at stage 0 the weights are their own masters.
    master_bytes = 0 if precision == "fp32" and zero_stage == 0 else 4
    return MemoryEstimate(
        parameters=bytes_each * parameters // (dp if zero_stage == 3 else 1),
        gradients=gradient_bytes * parameters // gradient_ranks,
        optimizer=(master_bytes + 8) * parameters // (dp if zero_stage >= 1 else 1),
        activations=_activations(shape, tokens, bytes_each, activation_checkpointing),
        # One chunk's logits and softmax in fp32 and, below fp32, its logits and their gradient as the model has them;
        # the head's gradient in fp32.
        logits=min(tokens, _LOSS_CHUNK_TOKENS) * vocab_size * (8 if precision == "fp32" else 12)
        + 4 * vocab_size * shape.hidden_size,
    )


def _activations(shape: ModelShape, tokens: int, bytes_each: int, every: bool | int) -> int:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    head = shape.head_dim or hidden // heads
    kv_heads = shape.num_key_value_heads or heads
    # Per token: two norms (input kept, and in fp32), q, k and v before and after rotation, attention's output, the
    # residual, and the feed-forward's gate, up, activated gate and product.
    per_layer = bytes_each * (4 * hidden + 2 * (heads + 2 * kv_heads) * head + 4 * shape.intermediate_size) + 8 * hidden
    layers = shape.num_hidden_layers
    if not every:
        return tokens * layers * per_layer
    # Of a recomputed layer its input stays, and one at a time is whole again.
    recomputed = -(-layers // int(every))
    return tokens * (recomputed * bytes_each * hidden + (layers - recomputed + 1) * per_layer)
