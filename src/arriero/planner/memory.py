"""Memory of one rank by part, from shapes alone.

Bytes of model states after Rajbhandari et al., "ZeRO" (arXiv:1910.02054) §3.1, as DeepSpeed 0.19 holds them under the
configuration of engine/ds_config.py: 16-bit weights, fp32 sums of gradients, fp32 masters and moments, each split over
the ranks that the ZeRO stage says. Activations after Korthikanti et al. (arXiv:2205.05198) §4, recounted for RMSNorm,
rotary embedding, grouped queries and SwiGLU, without dropout and with fused attention.

Letters: n tokens of a micro-batch on one rank, H hidden, Q and K all query and key heads, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from arriero.config.schema import ModelShape, Recipe
from arriero.planner.arithmetic import Setup, Widths, divisors, widths
from arriero.units import format_bytes

# The loss head takes as many tokens at a time as a hidden state is wide, within these (model/loss.py).
_FEWEST_TOKENS, _MOST_TOKENS = 256, 1024
# Blocks of attention, and the keys per element of a head up to which a block's weights are kept (model/attention.py).
_BLOCK_QUERIES, _KEPT_KEYS_PER_WIDTH = 128, 8
# DeepSpeed's defaults, in elements: gradients wait in one buffer of this size, ZeRO-3 fetches so many weights ahead.
REDUCE_BUCKET = 500_000_000
_PREFETCH = 50_000_000
_ENGINE_BUCKET = 500_000_000
# What a process takes on a CPU before it holds a tensor of a model: Python with torch, DeepSpeed and Transformers. And of
# what its tensors take, what it takes beside them: freed blocks that don't fit again, the libraries' work spaces (0.33 to
# 0.48 at 8.5M and 50M parameters, compiled and not).
_CPU_PROCESS_BYTES, _CPU_SHARE = 450 * 2**20, 0.4
# What a process takes on a GPU before it holds a tensor: the driver's context and the libraries' kernels and
# work spaces (torch 2 with cuBLAS and NCCL: 0.6 to 1.2 GiB by GPU and version).
_CONTEXT_BYTES = 900 * 2**20
# Cut-offs and freed blocks that torch's caching allocator can't join: fitted to published runs that say what they
# reserved (docs/planner.md).
_ALLOCATOR_SHARE = 0.1

# `per_device_train_batch_size: auto` fills a micro-batch up to so many tokens. On a CPU 4,096 keep a core's matrix
# products large (256 × 8 rows reach 95 % of the rate of 256 × 64 here) and its activations small; on a GPU products of
# 16,384 rows are past every kernel's ramp.
_CPU_TOKENS, _GPU_TOKENS = 4096, 16_384
# Of a device's memory that auto fills: the estimate errs by a few percent, and rows differ.
_AUTO_FILL = 0.9


@dataclass(frozen=True)
class Practice:
    """How a trainer computes, where that changes sizes and times. The defaults are arriero's; others are for scoring
    the planner on runs that other programs made (docs/planner.md)."""

    precision: str = "bf16"
    muon: bool = False
    """Whether the layers' matrices have Muon's one moment instead of AdamW's two."""
    compiled: bool = True
    attention: str = "flash"
    """flash: no square is kept; blocks: those of model/attention.py; masked: fused, with a mask of the square in memory;
    eager: with whole scores."""
    attention_speed: float = 1.0
    """Of the attention kernels that the device's share was fitted with."""
    logit_bytes: float | None = None
    """Of each logit of a micro-batch, where all exist at once; None: chunk by chunk."""
    selective: bool = False
    """Whether recomputed layers keep every second product and attention's output (checkpointing by operation)."""
    weight_bytes: float | None = None
    """Of a parameter between uses; None: by precision."""
    state_bytes: float | None = None
    """Of a parameter's master and moments; None: by precision and stage."""
    gradient_bytes: float | None = None
    """Of a gradient's sum; None: by precision and stage."""
    gradients_whole: bool = False
    """Whether a rank holds sums of all gradients while micro-batches are added up."""
    deepspeed: bool = True
    """Whether gradients are held as DeepSpeed holds them; else one of each, from its backward pass to the update."""
    reduce_bucket: int | None = None
    """Elements of the bucket for gradients that a recipe asks for; None: DeepSpeed's own, or the model's if those are fewer."""
    context_bytes: int = _CONTEXT_BYTES
    """Of a process on a GPU before its first tensor; 0 where a measurement leaves it out."""
    allocator_share: float = _ALLOCATOR_SHARE
    overlap: bool = True
    """Whether collectives run beside the computation."""

    @property
    def width(self) -> int:
        """Bytes of a value in a forward pass."""
        return 4 if self.precision == "fp32" else 2


ARRIERO = Practice()


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank. Each part at its own largest; ``total`` is the peak, which is less than their sum where two
    parts are never there at once (without accumulation, gradients grow while activations are freed)."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    """What the peak holds beyond the other parts: gathered weights, gradients on their way, a layer in its backward
    pass, the allocator's and the GPU context's share."""
    total: int
    overhead: int = 0
    """Of ``buffers``, what the allocator and the GPU's context take beyond allocated tensors."""
    host: int = 0
    """In the host's memory, when parts are offloaded; not in the total."""

    @property
    def allocated(self) -> int:
        """Bytes of tensors at the peak, as torch's counter has them."""
        return self.total - self.overhead

    @property
    def model_states(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def estimate_memory(
    shape: ModelShape,
    layout: Setup,
    *,
    parameters: int,
    vocab_size: int,
    seq_len: int,
    practice: Practice = ARRIERO,
    on_gpu: bool = True,
) -> MemoryEstimate:
    """Per-part bytes of the fullest rank. ``parameters``: of the whole model; rows have ``seq_len`` tokens."""
    size, width = widths(shape), practice.width
    own = parameters_of_rank(size, layout, parameters, vocab_size, practice)
    split, stage = layout.zero_ranks, layout.zero_stage
    # In fp32 at stage 0 the weights are their own masters.
    state = practice.state_bytes or (8 if practice.precision == "fp32" and stage == 0 else 12)
    if practice.muon:
        state -= 4 * min(1.0, size.layers * size.layer_weights / parameters)
    held_weights = (practice.weight_bytes or width) * own / (split if stage == 3 else 1)
    held_state = state * own / (split if stage >= 1 else 1)
    largest = max(vocab_size / head_ranks(layout, practice), size.feed / layout.tensor) * size.hidden
    bucket = practice.reduce_bucket or min(REDUCE_BUCKET, parameters)
    if not on_gpu:
        bucket = min(bucket, parameters)  # what is never written to takes no memory
    gradients = _gradients(layout, practice, own, largest, bucket)
    host = 0.0
    if layout.offload_optimizer != "none":
        # Masters, moments and the sums of gradients that the update reads live there; on NVMe the gradients alone.
        host += 4 * own / split + (held_state if layout.offload_optimizer == "cpu" else 0.0)
        held_state = 0.0
        if stage >= 2:
            moments = (gradients.loss, gradients.begin, gradients.end, gradients.update)
            gradients = _Gradients(0.0, *(max(0.0, moment - gradients.held) for moment in moments))
    if layout.offload_param != "none":
        host += held_weights if layout.offload_param == "cpu" else 0.0
        held_weights = 0.0
    tokens = layout.micro_batch * seq_len / layout.sequence
    gathered = _gathered(size, layout, own, vocab_size, practice)
    once, layer, moving = _activations(size, layout, tokens, seq_len, practice)
    # The first stage of a pipeline holds as many micro-batches as there are stages, the last one, which has the loss, one
    # (1F1B; Narayanan et al., arXiv:2104.04473).
    kept = once * min(layout.pipeline, layout.accumulation)
    moving += gathered
    # DeepSpeed's buffer of what was fetched ahead is still there when the last layer runs, beside the weights from it.
    fetched = practice.width * min(own, _PREFETCH) if gathered and practice.deepspeed else 0.0
    again = layer if layout.checkpoint_every else 0.0
    logits = logit_bytes(vocab_size, size.hidden, tokens, layout, practice)
    allocated = (
        held_weights
        + held_state
        + max(
            gradients.loss + once + moving + fetched,  # as the forward pass ends
            gradients.loss + once + logits + gathered,
            gradients.begin + kept + again + moving,  # as the backward pass begins
            gradients.end + layer + moving,
            gradients.update,
        )
    )
    fixed, share = (practice.context_bytes, practice.allocator_share) if on_gpu else (_CPU_PROCESS_BYTES, _CPU_SHARE)
    overhead = fixed + share * allocated
    parts = (held_weights, gradients.held, held_state, kept, logits)
    rest = max(0.0, allocated - sum(parts)) + overhead
    return MemoryEstimate(*(int(value) for value in (*parts, rest, allocated + overhead, overhead, host)))


@dataclass(frozen=True)
class _Gradients:
    """Bytes of gradients on a rank: their sums, and all that there is of them at four moments of a step."""

    held: float
    loss: float
    """While the loss of a step's last micro-batch is taken."""
    begin: float
    """As its backward pass begins."""
    end: float
    """As its backward pass ends."""
    update: float


def _gradients(layout: Setup, practice: Practice, own: float, largest: float, bucket: int) -> _Gradients:
    """What a trainer holds of gradients; DeepSpeed 0.19's ways were read in its source and seen with a tracker of
    storages (benchmarks/plan.py): they differ by stage and precision."""
    width, stage = practice.width, layout.zero_stage
    part = own / layout.zero_ranks
    again = layout.accumulation > 1
    if not practice.deepspeed:
        each = practice.gradient_bytes or width
        held = each * (own if stage < 2 or practice.gradients_whole else part)
        loss = held if again or stage == 3 else 0.0
        return _Gradients(held, loss, loss, held, held)
    if stage == 0:
        # Joined for the all-reduce, 500M elements at a time, when the backward pass is over.
        held = width * own
        loss = held if again else 0.0
        return _Gradients(held, loss, loss, held, held + width * min(own, _ENGINE_BUCKET))
    if stage == 1 and practice.precision == "bf16":
        # Its BF16_Optimizer: fp32 sums of all from the start, the micro-batch's own beside them; when the backward pass is
        # over, joined for the all-reduce in both precisions.
        held = 4 * own
        loss = held + (2 * own if again else 0)
        return _Gradients(held, loss, loss, held + 2 * own, held + 2 * own + 6 * min(own, _ENGINE_BUCKET))
    sums = 4 * part
    if stage == 1:
        # All gradients and the bucket, into which they move when the backward pass is over, to be joined in fp32 beside it.
        held, loss = 4 * own, 4 * own + 4 * bucket if again else 0.0
        return _Gradients(held, loss, max(loss, 4.0 * bucket), held + 4 * bucket, max(8 * part, 4 * bucket + 4 * own))
    moved, last = min(bucket, own), bucket >= own  # one that holds all gradients is emptied after the last layer
    if stage == 2:
        # The bucket is made for each backward pass and gone after it; sums are there from the first time that it is emptied:
        # in one piece beside it, and tensor by tensor in fp32. The norm is taken tensor by tensor in fp64.
        loss, full = sums if again else 0.0, sums + width * bucket
        emptied = width * moved + 4 * min(largest, moved)
        update = sums + 8 * min(largest, part)
        return _Gradients(
            sums,
            loss,
            loss + width * bucket,
            full + (0.0 if last else emptied),
            max(update, full + emptied if last else 0.0),
        )
    # Here the bucket is always there. It is emptied in one piece, of which what stays here is kept in fp32.
    full, emptied = sums + width * bucket, width * moved + 4 * moved / layout.zero_ranks
    return _Gradients(sums, full, full, full + (0.0 if last else emptied), full + max(sums, emptied if last else 0.0))


def parameters_of_rank(
    size: Widths, layout: Setup, parameters: int, vocab_size: int, practice: Practice = ARRIERO
) -> float:
    """Parameters of one rank's part of the model before ZeRO splits them: with pipeline stages, of the fullest.

    DeepSpeed's tensor parallelism leaves embeddings and head whole.
    """
    layers = size.layers * (size.layer_weights + 2 * size.hidden)
    outside: float = parameters - layers  # the embeddings and the last norm
    if layout.pipeline > 1:
        layers, outside = -(-size.layers // layout.pipeline) * layers // size.layers, vocab_size * size.hidden
    return layers / layout.tensor + outside / head_ranks(layout, practice)


def head_ranks(layout: Setup, practice: Practice) -> int:
    """Ranks that share embeddings and head."""
    return 1 if practice.deepspeed else layout.tensor


def logit_bytes(vocab_size: int, hidden: int, tokens: float, layout: Setup, practice: Practice) -> float:
    """Of the loss: what a chunk of logits and the head's gradient take in model/loss.py; or all logits at once (on every
    tensor rank, as the trainers that are scored do)."""
    if practice.logit_bytes is not None:
        return tokens * vocab_size * practice.logit_bytes
    width, most = practice.width, min(max(hidden, _FEWEST_TOKENS), _MOST_TOKENS)
    chunk = min(tokens, most)
    # A chunk's logits and softmax in fp32 and, below fp32, its logits and their gradient as the model has them; the last
    # chunk's gradient is still there.
    each = (12 if width == 2 else 8) + (width if tokens > most else 0)
    split = head_ranks(layout, practice)
    logits, head = chunk * vocab_size / split, vocab_size * hidden / split
    return max(
        each * logits + 4 * head,
        width * logits + (4 + width) * head,  # a chunk's part is added to the head's fp32 gradient
    )


def layer_bytes_per_token(size: Widths, layout: Setup, practice: Practice) -> tuple[float, float]:
    """What one layer keeps of a token for its backward pass: (whole on every tensor rank, split over them).

    Kept whole: the inputs of the two norms, in fp32 when each operation runs by itself, and what they put out. Split:
    q, k, v after rotation, attention's output, gate, up and (by themselves) the activated gate and the product.
    """
    width = practice.width
    # The blocks take k and v as they are and keep no log-sums; else Transformers repeats both for every query head.
    blocks = practice.attention == "blocks"
    if practice.compiled:
        # One kernel makes a norm's fp32 values again from the residual.
        kept = width * (2 * size.query + 2 * size.key + 4 * size.feed)
        return width * 4 * size.hidden, kept + (0 if blocks else 4 * size.heads)
    whole = size.hidden * (4 * width + 8)
    if blocks:
        return whole, width * (2 * size.query + 2 * size.key + 4 * size.feed)
    return whole, width * (4 * size.query + 4 * size.feed) + 4 * size.heads


def _activations(
    size: Widths, layout: Setup, tokens: float, seq_len: int, practice: Practice
) -> tuple[float, float, float]:
    """(kept of a micro-batch from forward to backward, one layer's own, the gradients of a layer's widest values), bytes of
    one rank."""
    whole, split = layer_bytes_per_token(size, layout, practice)
    each = tokens * (whole + split / layout.tensor)
    layers = -(-size.layers // layout.pipeline)
    again = layout.checkpointed(layers)
    if practice.attention == "eager":
        each += 3 * practice.width * tokens * seq_len * size.heads / layout.tensor
    elif practice.attention == "blocks":
        # Beyond the limit weights are kept only of documents that are shorter: counted as if all were as long as that.
        kept_keys = block_keys(seq_len, _KEPT_KEYS_PER_WIDTH * size.query // size.heads)
        each += practice.width * tokens * size.heads / layout.tensor * kept_keys
    border = practice.width * tokens * size.hidden
    if practice.selective:
        products = size.hidden + (2 * size.query + size.key + size.feed) / layout.tensor
        border += practice.width * tokens * products
    kept = (layers - again) * each + again * border
    if practice.attention == "masked":
        # One boolean mask for all layers, and one in the model's precision for each that isn't recomputed.
        # Ranks that share rows have it of whole rows.
        square = tokens * layout.sequence * seq_len
        kept += square * (1 + practice.width * max(1, layers - again))
    elif practice.attention == "blocks":
        kept += practice.width * tokens * seq_len
    return kept, each, tokens * practice.width * (2 * size.hidden + 3 * size.feed / layout.tensor)


def block_keys(seq_len: int, most: int | None = None) -> float:
    """Keys that the blocks of model/attention.py take for a query, on average over a row of one document: up to its
    block's end, and at most ``most``."""
    begins = range(0, seq_len, _BLOCK_QUERIES)
    blocks = [(begin, min(begin + _BLOCK_QUERIES, seq_len)) for begin in begins]
    return sum((end - begin) * min(end, most or end) for begin, end in blocks) / seq_len


def _gathered(size: Widths, layout: Setup, own: float, vocab_size: int, practice: Practice) -> float:
    """Weights that ZeRO-3 has gathered at the peak: the layer's or the head's, and those fetched ahead."""
    if layout.zero_stage < 3 or layout.zero_ranks == 1:  # one rank's part is the whole, and is used as it is
        return 0.0
    head = vocab_size * size.hidden / head_ranks(layout, practice)
    largest = max(size.layer_weights / layout.tensor, head)
    return practice.width * min(own, largest + size.layer_weights / layout.tensor + _PREFETCH)


def practice_of(recipe: Recipe, layout: Setup, *, on_gpu: bool) -> Practice:
    """How arriero computes a recipe in a layout, on a GPU or a CPU.

    ``torch_compile: auto`` is decided when a run has measured its forward pass. On a GPU layers that aren't compiled have
    Liger's kernels, which keep as little; on a CPU the plan is of layers that aren't, which need more.
    """
    compiles = recipe.train.torch_compile
    zero = recipe.deepspeed.get("zero_optimization", {}) if isinstance(recipe.deepspeed, dict) else {}
    bucket = zero.get("reduce_bucket_size") if isinstance(zero, dict) else None
    return Practice(
        precision=recipe.train.precision,
        muon=recipe.optim.optimizer == "muon",
        compiled=on_gpu if compiles == "auto" else bool(compiles),
        attention=_attention_of(recipe, layout, on_gpu),
        reduce_bucket=int(bucket) if isinstance(bucket, int | float) else None,
        overlap=on_gpu,
    )


def _attention_of(recipe: Recipe, layout: Setup, on_gpu: bool) -> str:
    """``Practice.attention``; a GPU has flash attention installed."""
    implementation = recipe.model.attn_implementation
    if implementation not in ("auto", "sdpa"):
        return "eager" if implementation == "eager" else "flash"
    if implementation == "auto" and layout.sequence == 1:
        if on_gpu and layout.pipeline == 1:
            return "flash"
        if not on_gpu and recipe.train.precision == "bf16":
            return "blocks"
    # Rows of several documents need a mask; without one torch's fused kernel keeps no square.
    return "masked" if recipe.data.isolate_documents else "flash"


def row_choices(recipe: Recipe, layout: Setup, *, on_gpu: bool) -> list[int]:
    """Rows that a rank could run at once, ascending: divisors of its share, up to the tokens from which more bring
    nothing."""
    share = max(recipe.train.global_batch_size // layout.dp, 1)
    most = _GPU_TOKENS if on_gpu else _CPU_TOKENS
    return [rows for rows in divisors(share) if rows == 1 or rows * recipe.data.seq_len <= most]


def auto_micro_batch(
    recipe: Recipe,
    shape: ModelShape,
    layout: Setup,
    *,
    parameters: int,
    vocab_size: int,
    memory_bytes: int | None,
    on_gpu: bool,
) -> tuple[int, str]:
    """(rows that a rank runs at once, why): the recipe's own number, or for ``auto`` the most that divide a rank's share
    of the step, stay below the tokens from which more bring nothing, and fit into the rank's memory (None: not known).
    """
    train, seq_len = recipe.train, recipe.data.seq_len
    if train.per_device_train_batch_size != "auto":
        return train.per_device_train_batch_size, ""
    share, most = max(train.global_batch_size // layout.dp, 1), _GPU_TOKENS if on_gpu else _CPU_TOKENS
    candidates = row_choices(recipe, layout, on_gpu=on_gpu)
    practice = practice_of(recipe, layout, on_gpu=on_gpu)
    chosen, needed = 1, 0
    for rows in candidates:
        planned = replace(layout, micro_batch=rows, accumulation=share // rows)
        estimate = estimate_memory(
            shape,
            planned,
            parameters=parameters,
            vocab_size=vocab_size,
            seq_len=seq_len,
            practice=practice,
            on_gpu=on_gpu,
        )
        if rows > 1 and memory_bytes is not None and estimate.total > _AUTO_FILL * memory_bytes:
            break
        chosen, needed = rows, estimate.total
    words = f"per_device_train_batch_size auto: {chosen}, a divisor of the {share} rows a rank has in a step"
    if memory_bytes is not None:
        words += f"; planned memory {format_bytes(needed)} of {format_bytes(memory_bytes)}"
        if needed > _AUTO_FILL * memory_bytes:
            words += ", which may not be enough (`arriero plan` lists layouts that need less)"
    if chosen == candidates[-1]:
        words += f"; up to {most:,} tokens at once, more bring nothing" if chosen < share else ""
    return chosen, words
