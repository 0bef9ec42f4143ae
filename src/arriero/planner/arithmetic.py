"""Sizes, batches and lengths of a run: whole numbers from a recipe, no model, no device."""

from __future__ import annotations

from arriero.config.schema import ModelShape, Train
from arriero.errors import UserError

# `per_device_train_batch_size: auto` fills a micro-batch up to this many tokens: enough to keep a core's matrix
# products large (256 × 8 rows reach 95 % of the rate of 256 × 64 here), little enough for its activations.
_AUTO_MICRO_BATCH_TOKENS = 4096


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def micro_batch_rows(train: Train, *, dp: int, seq_len: int) -> int:
    """Rows that a rank runs at once; ``auto``: the most that divide its share and stay below 4,096 tokens."""
    if train.per_device_train_batch_size != "auto":
        return train.per_device_train_batch_size
    share = train.global_batch_size // dp
    fitting = [rows for rows in divisors(max(share, 1)) if rows * seq_len <= _AUTO_MICRO_BATCH_TOKENS]
    return fitting[-1] if fitting else 1


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
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    head = shape.head_dim or hidden // heads
    kv_heads = shape.num_key_value_heads or heads
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    feed_forward = 3 * hidden * shape.intermediate_size
    biases = 0
    if shape.attention_bias:
        biases += heads * head + 2 * kv_heads * head + hidden
    if shape.mlp_bias:
        biases += 2 * shape.intermediate_size + hidden
    layer = attention + feed_forward + biases + 2 * hidden
    embeddings = vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    return shape.num_hidden_layers * layer + embeddings + hidden


def flops_per_token(shape: ModelShape, vocab_size: int, seq_len: int) -> float:
    """Floating-point operations of one training token, forward and backward.

    6 per weight of a matrix product (2 forward, 4 backward), and 6·L·q for scores and values of causal attention with
    q = heads · head width, half of the square being masked (after Chowdhery et al., PaLM, arXiv:2204.02311, app. B).
    The input embedding is a look-up and isn't counted; recomputation, the optimizer and document isolation neither.
    """
    heads = shape.num_attention_heads
    head = shape.head_dim or shape.hidden_size // heads
    kv_heads = shape.num_key_value_heads or heads
    per_layer = 2 * shape.hidden_size * (heads + kv_heads) * head + 3 * shape.hidden_size * shape.intermediate_size
    matrices = shape.num_hidden_layers * per_layer + vocab_size * shape.hidden_size
    return 6.0 * matrices + 6.0 * shape.num_hidden_layers * seq_len * heads * head
