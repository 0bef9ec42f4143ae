"""Time of one step, from shapes, rates and links.

A micro-batch is counted by kind of work: matrix products and attention at a share of the peak, everything else at the
speed of the memory, collectives at that of the links they cross. Ring and all-to-all costs after Thakur et al. (2005);
ZeRO's volumes after Rajbhandari et al. (arXiv:1910.02054) §7; tensor parallelism's after Shoeybi et al.
(arXiv:1909.08053) §3; Ulysses' after Jacobs et al. (arXiv:2309.14509) §3; pipeline bubbles after Narayanan et al.
(arXiv:2104.04473) §2.2. Left out: stragglers, congestion, the data and checkpoints.

Letters: n tokens of a micro-batch on one rank, H hidden, Q and K all query and key heads, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from arriero.config.schema import ModelShape
from arriero.planner.arithmetic import Setup, Widths, widths
from arriero.planner.hardware import Device, Network
from arriero.planner.memory import ARRIERO, Practice, block_keys, head_ranks, parameters_of_rank

# Shares that are fitted to published runs, one value for every GPU (docs/planner.md says how).
_MEMORY_SHARE = 0.67
"""Of the memory's data-sheet bandwidth that kernels reach."""
_LINK_SHARE = 0.62
"""Of a link's bandwidth that a collective reaches."""
_EXPOSED = 0.25
"""Of the collectives that could run beside the computation, what still adds to the step: they take its memory
bandwidth and some of its cores, and the first and last ones have nothing to hide behind."""
_EAGER = 1.33
"""Traffic of a layer whose operations run one by one, over what its operations read and write as counted below."""

_MODULES, _HOOKS_S = 12, 0.25e-3
"""Modules of a layer, and the Python that DeepSpeed's ZeRO-3 runs for each in a forward and a backward pass: 35 ms a step of
two micro-batches and six layers, on one core of an AMD EPYC."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, by what they are spent on."""

    matrix: float
    attention: float
    memory_bound: float
    exposed_communication: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        return (
            self.matrix + self.attention + self.memory_bound + self.exposed_communication + self.bubble + self.optimizer
        )


def step_time(
    shape: ModelShape,
    layout: Setup,
    device: Device,
    network: Network,
    *,
    parameters: int,
    vocab_size: int,
    seq_len: int,
    practice: Practice = ARRIERO,
) -> StepTime:
    """Predicted seconds of one step of ``accumulation`` micro-batches per rank."""
    size = widths(shape)
    tokens = layout.micro_batch * seq_len / layout.sequence
    links = Links(device, network)
    forward = _forward(size, layout, device, vocab_size, tokens, seq_len, practice)
    layers = -(-size.layers // layout.pipeline)
    again = layout.checkpointed(layers) / layers
    products, scores = (again / 2, 0.0) if practice.selective else (again, again)
    work = [
        (3 + products) * layers * forward.matrix + 3 * forward.head,
        # Backward attention makes the scores again: 2.5 times the forward pass (Dao, arXiv:2307.08691, §3.1).
        (3.5 + scores) * layers * forward.attention,
        (3 + again) * layers * forward.memory_bound + forward.loss,
    ]
    launches = layers * (3 + again) * (25 if practice.compiled else 60) * device.launch_s
    if layout.zero_stage == 3 and practice.deepspeed:
        launches += layers * _MODULES * _HOOKS_S
    # On a GPU only short kernels wait for Python; a CPU computes and runs Python in one thread.
    work[2] += launches if device.is_cpu else max(0.0, launches - sum(work))
    own = parameters_of_rank(size, layout, parameters, vocab_size, practice)
    inside = _model_parallel(size, layout, links, tokens, again, layers, practice)
    compute = sum(work) + inside
    gathering, final = _data_parallel(size, layout, links, own, practice)
    exposed = inside + _exposed(gathering, compute, layout, practice)
    micro = sum(work) + exposed
    update, last = _update(layout, device, own, final, compute, practice)
    times = layout.accumulation
    return StepTime(
        matrix=times * work[0],
        attention=times * work[1],
        memory_bound=times * work[2],
        exposed_communication=times * exposed + last,
        # The last stage, which is counted, waits for the others' first micro-batch forward and back; they have no head.
        bubble=(layout.pipeline - 1) * (micro - 3 * forward.head - forward.loss),
        optimizer=update,
    )


def tokens_per_second(layout: Setup, seq_len: int, step_s: float) -> float:
    """Tokens of a whole step over its time, all ranks together."""
    return layout.dp * layout.micro_batch * layout.accumulation * seq_len / step_s


def utilization(flops_per_token: float, tokens_per_second: float, ranks: int, peak_flops: float) -> float:
    """MFU: operations that the model needs (recomputation not counted) over what the ranks' devices could do."""
    return flops_per_token * tokens_per_second / (ranks * peak_flops)


@dataclass(frozen=True)
class Links:
    """Collectives among ranks that fill one node after the other."""

    device: Device
    network: Network

    def ring(self, size_bytes: float, ranks: int, *, stride: int = 1) -> float:
        """Seconds in which ``ranks`` ranks, ``stride`` apart, gather or scatter ``size_bytes`` between them all."""
        if ranks == 1:
            return 0.0
        inside = max(1, min(ranks, self.device.per_node // stride))
        share = (ranks - 1) / ranks * size_bytes
        speed = self.device.link_bytes_s if inside > 1 else float("inf")
        hop_s = self.device.hop_s
        if ranks > inside:
            # As many rings cross between the nodes as the node has members; `stride` groups share its adapters.
            speed = min(speed, self.network.node_bytes_s / stride)
            hop_s = self.network.hop_s
        return share / (speed * _LINK_SHARE) + (ranks - 1) * hop_s

    def exchange(self, size_bytes: float, ranks: int) -> float:
        """Seconds of an all-to-all in which each rank holds ``size_bytes`` before and after."""
        if ranks == 1:
            return 0.0
        speed, hop_s = self.device.link_bytes_s, self.device.hop_s
        if ranks > self.device.per_node:
            speed, hop_s = self.network.node_bytes_s / self.device.per_node, self.network.hop_s
        return (ranks - 1) / ranks * size_bytes / (speed * _LINK_SHARE) + hop_s

    def hop(self, size_bytes: float, ranks: int) -> float:
        """Seconds from each of ``ranks`` ranks to another: of the next node, where they fill several."""
        speed, hop_s = self.device.link_bytes_s, self.device.hop_s
        if ranks > self.device.per_node:
            speed, hop_s = self.network.node_bytes_s / self.device.per_node, self.network.hop_s
        return size_bytes / (speed * _LINK_SHARE) + hop_s


@dataclass(frozen=True)
class _Forward:
    """Seconds of one micro-batch's forward pass: of one layer, and of the head."""

    matrix: float
    attention: float
    memory_bound: float
    head: float
    loss: float


def _forward(
    size: Widths, layout: Setup, device: Device, vocab: float, tokens: float, seq_len: int, practice: Practice
) -> _Forward:
    tensor = layout.tensor
    products = (
        (size.hidden, (size.query + 2 * size.key) / tensor),
        (size.query / tensor, size.hidden),
        (size.hidden, 2 * size.feed / tensor),
        (size.feed / tensor, size.hidden),
    )
    peak = device.peak(practice.precision)
    rate = peak * device.gemm_share
    half = device.half_width * peak / device.peak_flops  # what moves beside slower products is hidden by them
    matrix = sum(2 * tokens * rows * columns / (rate * _fullness(rows, columns, half)) for rows, columns in products)
    vocab /= head_ranks(layout, practice)
    head = 2 * tokens * size.hidden * vocab / (rate * _fullness(size.hidden, vocab, half))
    keys = {"flash": seq_len / 2, "blocks": block_keys(seq_len)}.get(practice.attention, seq_len)
    scores = 4 * tokens * keys * size.query / tensor
    width, speed = practice.width, device.memory_bytes_s * _MEMORY_SHARE
    whole, split = _traffic(size, practice.compiled)
    traffic = tokens * width / 2 * (whole + split / tensor)
    loss = tokens * vocab * (width + 8)
    kernel = peak * device.attention_share * practice.attention_speed
    if practice.attention == "masked" and device.masked_flops is not None:
        kernel = device.masked_flops
    return _Forward(matrix, scores / kernel, traffic / speed, head, loss / speed)


def _fullness(rows: float, columns: float, half_width: float) -> float:
    """Of the best rate of matrix products, what a weight of this shape reaches."""
    narrow = min(rows, columns)
    return narrow / (narrow + half_width)


def _traffic(size: Widths, compiled: bool) -> tuple[float, float]:
    """Bytes in bf16 that a token moves outside of products and attention in one layer's forward pass: (whole on every
    tensor rank, split over them). One by one: a norm casts up, squares, averages, scales and casts down (22 H), a
    residual reads two and writes one (6 H), rotation passes q and k three times, SwiGLU reads and writes five times."""
    if compiled:
        return 2 * (6 + 4) * size.hidden, 4 * (size.query + size.key) + 6 * size.feed
    return _EAGER * 2 * (22 + 6) * size.hidden, _EAGER * (14 * (size.query + size.key) + 10 * size.feed)


def _model_parallel(
    size: Widths, layout: Setup, links: Links, tokens: float, again: float, layers: int, practice: Practice
) -> float:
    """Seconds of the collectives inside the layers of one micro-batch; the layers wait for them."""
    row = 2 * tokens * size.hidden
    # Two all-reduces forward, and two where the forward pass is repeated; backward two, but with DeepSpeed one for each of
    # the five matrices that share an input: q, k, v, gate and up. Each is two rings.
    backward = 5 if practice.deepspeed else 2
    tensor = (2 + backward + 2 * again) * 2 * links.ring(row, layout.tensor)
    each = sum(
        links.exchange(2 * tokens * width, layout.sequence) for width in (size.query, size.query, size.key, size.key)
    )
    sequence = (2 + again) * each
    return layers * (tensor + sequence) + (2 * links.hop(row, layout.ranks) if layout.pipeline > 1 else 0.0)


def _data_parallel(size: Widths, layout: Setup, links: Links, own: float, practice: Practice) -> tuple[float, float]:
    """Seconds of ZeRO's collectives: (of each micro-batch, once a step)."""
    stride = layout.tensor
    split = layout.zero_ranks
    layers = size.layers / layout.pipeline
    copies = layout.dp * layout.sequence // split
    reduce_bytes = own * (practice.gradient_bytes or (4 if layout.zero_stage == 1 else practice.width))
    once = 0.0
    if copies > 1:
        # Shards of a node are summed over the nodes.
        once += 2 * Links(links.device, links.network).ring(reduce_bytes / split, copies, stride=split * stride)
    if layout.zero_stage < 3:
        reduce = links.ring(reduce_bytes, split, stride=stride)
        gather = links.ring(practice.width * own, split, stride=stride)
        each = reduce if layout.zero_stage == 2 and not practice.gradients_whole else 0.0
        return each, once + gather + (0.0 if each else reduce)
    # One collective a layer, so its hops count once a layer.
    weights = layers * links.ring(practice.width * own / layers, split, stride=stride)
    gradients = layers * links.ring(reduce_bytes / layers, split, stride=stride)
    if layout.offload_param != "none":
        # Each rank's part comes up from the host first, for the forward and for the backward pass.
        weights += practice.width * own / split / (links.device.host_bytes_s * _LINK_SHARE)
    if practice.gradients_whole:
        return 2 * weights, once + gradients
    return 2 * weights + gradients, once


def _exposed(collective_s: float, compute_s: float, layout: Setup, practice: Practice) -> float:
    """Of collectives beside a computation, the seconds that add to it."""
    # DeepSpeed's overlap_comm is off below stage 3.
    if not practice.overlap or (practice.deepspeed and layout.zero_stage < 3):
        return collective_s
    return max(collective_s - compute_s, 0.0) + _EXPOSED * min(collective_s, compute_s)


def _update(
    layout: Setup, device: Device, own: float, final_s: float, compute_s: float, practice: Practice
) -> tuple[float, float]:
    """Seconds of (the optimizer's step, collectives once a step that nothing hides)."""
    held = own / (layout.zero_ranks if layout.zero_stage >= 1 else 1)
    # The norm reads the gradient; AdamW reads it again, reads and writes master and moments, writes the weight.
    moved = held * (4 + 4 + 2 * (practice.state_bytes or 12) + practice.width)
    if layout.offload_optimizer == "none":
        update = moved / (device.memory_bytes_s * _MEMORY_SHARE)
    else:
        ranks = min(layout.ranks, device.per_node)
        # Gradients down, weights up, and Adam at the speed of the host's memory, which a node's ranks share.
        update = held * (4 + practice.width) / (device.host_bytes_s * _LINK_SHARE) + moved * ranks / _HOST_BYTES_S
        if layout.offload_optimizer == "nvme":
            update += 24 * held * ranks / _NVME_BYTES_S  # master and moments, read and written
    return update, _exposed(final_s, compute_s, layout, practice)


# What DeepSpeed's CPU Adam moves per second on two sockets with 8 channels each of DDR4 or DDR5: about half of their
# data-sheet bandwidth (Ren et al., "ZeRO-Offload", arXiv:2101.06840, table 4 give 10⁹ parameters in 0.26 s).
_HOST_BYTES_S = 120e9
# Reading and writing of a node's local NVMe disks (Rajbhandari et al., "ZeRO-Infinity", arXiv:2104.07857, §3: 16 of them
# in a DGX-2 give 25 GB/s; most nodes have four or fewer).
_NVME_BYTES_S = 6e9
