"""Sizes, batches and lengths of a run: whole numbers from a recipe, no model, no device."""

from __future__ import annotations

from dataclasses import dataclass

from arriero.config.schema import ModelShape, Train
from arriero.errors import UserError


@dataclass(frozen=True)
class Setup:
    """What sizes and times depend on beside the model: how a run is spread over its ranks, what ZeRO splits and what is
    offloaded, in which portions a rank works, and what it computes twice."""

    ranks: int = 1
    zero_stage: int = 1
    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    checkpoint_every: int = 0
    """Every n-th layer is recomputed in the backward pass, the first among them; 0: none."""
    offload_optimizer: str = "none"
    offload_param: str = "none"
    shard_ranks: int | None = None
    """Ranks that ZeRO splits over (MiCS); None: all that hold the same part of the model."""

    @property
    def dp(self) -> int:
        """Ranks that see different rows."""
        return self.ranks // (self.tensor * self.sequence * self.pipeline)

    @property
    def zero_ranks(self) -> int:
        """Ranks that ZeRO splits one copy of the state over; those of a row's parts share it too."""
        return self.shard_ranks or self.dp * self.sequence

    def checkpointed(self, layers: int) -> int:
        """How many of so many layers are recomputed."""
        return -(-layers // self.checkpoint_every) if self.checkpoint_every else 0


@dataclass(frozen=True)
class Widths:
    """The widths that sizes and times follow from: hidden, all query heads, all key heads, feed-forward."""

    hidden: int
    query: int
    key: int
    feed: int
    layers: int
    heads: int

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices."""
        return 2 * self.hidden * (self.query + self.key) + 3 * self.hidden * self.feed


def widths(shape: ModelShape) -> Widths:
    """The widths of a LLaMA of this shape."""
    heads = shape.num_attention_heads
    head = shape.head_dim or shape.hidden_size // heads
    kv_heads = shape.num_key_value_heads or heads
    return Widths(
        shape.hidden_size, heads * head, kv_heads * head, shape.intermediate_size, shape.num_hidden_layers, heads
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def accumulation_steps(train: Train, *, dp: int, micro_batch: int) -> int:
    """Micro-batches per rank and step: global_batch_size = micro-batch × accumulation × dp.

    Raises ``UserError`` with the equation and the nearest valid values where it can't hold.
    """
    wanted, portion = train.global_batch_size, micro_batch * dp
    if wanted % portion == 0:
        return wanted // portion
    below, above = wanted // portion * portion, -(-wanted // portion) * portion
    sizes = " or ".join(str(size) for size in dict.fromkeys([below, above]) if size)
    remedy = f"Nearest global_batch_size: {sizes}."
    if wanted % dp == 0:
        nearest = min(divisors(wanted // dp), key=lambda rows: abs(rows - micro_batch))
        remedy += f" Or per_device_train_batch_size {nearest} with {wanted}."
    raise UserError(
        f"train.global_batch_size {wanted} = per_device_train_batch_size {micro_batch} × accumulation × {dp} "
        f"data-parallel ranks has no whole accumulation ({wanted} / {portion} = {wanted / portion:.3g})",
        remedy,
    )


def run_length(
    train: Train, *, seq_len: int, epoch_rows: int, step: int = 0, position: int = 0, tokens: int = 0, counted: int = 0
) -> tuple[int, int]:
    """(steps of the run, position at which it ends), for a run that has done ``step`` steps and taken ``position`` rows.

    epoch_rows: rows of one pass over all sources. tokens: of the rows taken. counted: how many of today's rows that was,
    over today's sources. Tokens and epochs are rounded up: the last step reaches them. A run in epochs ends with exactly
    their rows, so its last step may have fewer; else every step is full. What is still to do is counted in today's batch
    size and seq_len, whatever earlier steps had.
    Raises ``UserError`` where the epochs are less than a row.
    """
    batch = train.global_batch_size
    if train.num_train_epochs is not None:
        wanted = round(train.num_train_epochs * epoch_rows)
        if wanted < 1:
            raise UserError(
                f"train.num_train_epochs {train.num_train_epochs:g} of {epoch_rows:,} rows is less than one row",
                f"Give at least {1 / max(epoch_rows, 1):.2g}.",
            )
        left = max(0, wanted - counted)
        return step + -(-left // batch), position + left
    if train.max_steps is not None:
        steps = max(train.max_steps, step)
    else:
        assert train.max_tokens is not None
        steps = step + max(0, -(-(train.max_tokens - tokens) // (batch * seq_len)))
    return steps, position + (steps - step) * batch


def check_rows(wanted: int, available: int | None, epochs: dict[str, float]) -> None:
    """``UserError`` where the sources end (``max_epochs``) before the run does."""
    if available is not None and wanted > available:
        listed = ", ".join(f"{name}: {count:g} epochs" for name, count in epochs.items())
        raise UserError(
            f"the run takes {wanted:,} rows, but with max_epochs its sources end after {available:,} ({listed})",
            "Train for fewer steps, or raise or drop max_epochs.",
        )


def parameter_count(shape: ModelShape, vocab_size: int) -> int:
    """Parameters of a LLaMA of this shape; tied embeddings count once. Equals the sum of ``numel()``."""
    size = widths(shape)
    hidden, biases = size.hidden, 0
    if shape.attention_bias:
        biases += size.query + 2 * size.key + hidden
    if shape.mlp_bias:
        biases += 2 * size.feed + hidden
    layer = size.layer_weights + biases + 2 * hidden
    embeddings = vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    return shape.num_hidden_layers * layer + embeddings + hidden


def flops_per_token(shape: ModelShape, vocab_size: int, seq_len: int) -> float:
    """Floating-point operations of one training token, forward and backward.

    6 per weight of a matrix product (2 forward, 4 backward), and 6·L·q for scores and values of causal attention with
    q = heads · head width, half of the square being masked (after Chowdhery et al., PaLM, arXiv:2204.02311, app. B).
    The input embedding is a look-up and isn't counted; recomputation, the optimizer and document isolation neither.
    """
    size = widths(shape)
    matrices = size.layers * size.layer_weights + vocab_size * size.hidden
    return 6.0 * matrices + 6.0 * size.layers * seq_len * size.query
