"""Short probes of the machine at hand, for a plan that goes by what it does instead of by a data sheet."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from arriero.engine.parallel import World
from arriero.model.attention import block_attention_forward
from arriero.planner.memory import block_keys

_SECONDS = 0.4
"""How long each probe repeats itself."""


def measure_rates(world: World | None = None) -> dict[str, float]:
    """Matrix products, attention and copies of one rank's device, and with several ranks their all-reduce.

    Every rank calls it. Operations and bytes per second; the names are those of arriero.planner.calibration.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {
        "bf16_flops": _products(device, torch.bfloat16),
        "fp32_flops": _products(device, torch.float32),
        "attention_flops": _attention(device),
        "memory_bytes_s": _copies(device, device),
    }
    if device.type == "cuda":
        found["host_bytes_s"] = _copies(torch.device("cpu"), device)
    elif world is not None and world.size > 1:
        found["link_bytes_s"] = _all_reduce(world)
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


def _copies(source: torch.device, target: torch.device) -> float:
    """Bytes read and written when both are one device; bytes carried when they aren't."""
    count = 32 * 2**20
    start = torch.ones(count, device=source)
    end = torch.empty(count, device=target)
    return _rate(lambda: end.copy_(start), 4 * count * (2 if source == target else 1), target)


def _all_reduce(world: World) -> float:
    """Bytes per second and direction: a ring of n ranks carries 2 (n − 1) / n of what is summed."""
    values = torch.ones(2 * 2**20, dtype=torch.float64)
    seconds = []
    for _ in range(6):
        world.barrier()
        began = time.perf_counter()
        world.total(values)
        seconds.append(time.perf_counter() - began)
    return 2 * (world.size - 1) / world.size * 8 * len(values) / sorted(seconds)[len(seconds) // 2]
