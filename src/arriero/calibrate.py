"""Short probes of the machine at hand, for a plan that goes by what it does instead of by a data sheet."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from arriero.engine.parallel import World, keep_freed_memory
from arriero.model.attention import block_attention_forward
from arriero.planner.memory import block_keys

_SECONDS = 0.4
"""How long each probe repeats itself."""


def measure_rates(world: World | None = None) -> dict[str, float]:
    """Matrix products, attention and copies of one rank's device, and with several ranks their all-reduce.

    Every rank calls it. Operations and bytes per second; the names are those of arriero.planner.calibration. Of a CPU also
    ``got_share``: the processor time that its threads got, of what they could have had.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        keep_freed_memory()  # as training does
    began, used = time.perf_counter(), time.process_time()
    products = {"bf16_flops": _products(device, torch.bfloat16), "fp32_flops": _products(device, torch.float32)}
    cores = (time.process_time() - used) / (time.perf_counter() - began)
    found = {**products, "attention_flops": _attention(device)}
    if world is not None:
        world.barrier()  # the ranks of a host share its memory's bandwidth, in a step at the same time
    found["memory_bytes_s"] = _copies(device, device)
    if device.type == "cuda":
        found["host_bytes_s"] = _copies(torch.device("cpu"), device)
    else:
        found["got_share"] = cores / torch.get_num_threads()
        found["masked_flops"] = _masked_attention()
        if world is not None and world.size > 1:
            found["hop_s"], found["link_bytes_s"] = _all_reduce(world)
    return found


def _rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """``amount`` per second in the median repetition."""
    work()
    _wait(device)
    seconds: list[float] = []
    until = time.perf_counter() + _SECONDS
    while time.perf_counter() < until or len(seconds) < 3:
        began = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return amount / sorted(seconds)[len(seconds) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _products(device: torch.device, dtype: torch.dtype) -> float:
    size = 4096 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return _rate(lambda: left @ right, 2 * size**3, device)


def _attention(device: torch.device) -> float:
    """Causal attention in bf16, forward, as `attn_implementation: auto` has it; what a kernel passes over isn't counted."""
    rows, heads, length, width = (4, 16, 4096, 128) if device.type == "cuda" else (4, 8, 512, 64)
    query = torch.randn(rows, heads, length, width, device=device, dtype=torch.bfloat16)
    if device.type == "cuda":
        work = 2.0 * rows * heads * length * length * width
        return _rate(lambda: functional.scaled_dot_product_attention(query, query, query, is_causal=True), work, device)
    work = 4 * rows * heads * length * block_keys(length) * width
    return _rate(lambda: block_attention_forward(torch.nn.Module(), query, query, query, None), work, device)


def _masked_attention() -> float:
    """Torch's fused attention with a mask, forward: what a CPU has in fp32 and where ranks share rows. bf16 takes as long."""
    rows, heads, length, width = 4, 8, 256, 64
    query = torch.randn(rows, heads, length, width)
    seen = torch.ones(rows, 1, length, length, dtype=torch.bool).tril()
    work = 4.0 * rows * heads * length * length * width
    attend = functional.scaled_dot_product_attention
    return _rate(lambda: attend(query, query, query, attn_mask=seen), work, torch.device("cpu"))


def _copies(source: torch.device, target: torch.device) -> float:
    """Bytes read and written when both are one device; bytes carried when they aren't."""
    count = 32 * 2**20
    start = torch.ones(count, device=source)
    end = torch.empty(count, device=target)
    return _rate(lambda: end.copy_(start), 4 * count * (2 if source == target else 1), target)


def _all_reduce(world: World) -> tuple[float, float]:
    """(seconds of a hop, bytes per second and direction): a ring of n ranks takes 2 (n − 1) hops, and carries
    2 (n − 1) / n of what is summed."""
    few, many = 2**19, 2**24  # bytes: what a layer of a small model exchanges, and ZeRO of the whole
    short, long = _all_reduce_s(world, few), _all_reduce_s(world, many)
    each = max(long - short, 1e-9) / (many - few)
    hops = 2 * (world.size - 1)
    return max(short - few * each, 1e-6) / hops, hops / world.size / each


def _all_reduce_s(world: World, size_bytes: int) -> float:
    """In the mean, and after some milliseconds of work, as in a step: gloo's threads then have to be given a core again,
    and need 2 ms for what they do in 0.6 ms when nothing else runs."""
    values, busy = torch.ones(size_bytes // 8, dtype=torch.float64), torch.ones(512, 512)
    seconds = []
    for _ in range(22):
        for _ in range(2):
            busy @ busy
        began = time.perf_counter()
        world.total(values)
        seconds.append(time.perf_counter() - began)
    return sum(seconds[2:]) / len(seconds[2:])
