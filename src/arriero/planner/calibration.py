"""What `arriero plan --calibrate` has measured on this machine, and devices with those rates in place of a data sheet's."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from arriero.errors import UserError
from arriero.planner.hardware import Device, find_device, for_rank

FILE = Path.home() / ".cache" / "arriero" / "calibration.json"
# Whole steps are hotter than a probe, and clocks fall.
_SUSTAINED = 0.9


def save_calibration(name: str, rates: dict[str, float], *, ranks: int) -> Path:
    """Write what ``ranks`` ranks measured at the same time, per rank, beside the entries of other devices."""
    entries = _entries()
    entries[_key(name)] = {**rates, "ranks": ranks, "measured": time.strftime("%Y-%m-%d")}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    temporary = FILE.with_suffix(".tmp")
    temporary.write_text(json.dumps(entries, indent=2), encoding="utf-8")
    temporary.replace(FILE)
    return FILE


def measured_rates(name: str) -> dict[str, float]:
    """The rates of one rank that were measured last; empty where none were."""
    entry = _entries().get(_key(name), {})
    return {key: rate for key, rate in entry.items() if key.endswith(("_s", "_flops", "_share"))}


def calibrated(device: Device) -> tuple[Device, str | None]:
    """(the device with measured rates where this machine was probed, the day of the probe).

    A GPU keeps its peak, of which MFU is a share. A CPU's measured products are its peak; its rates are of all its cores.
    """
    entry = _entries().get(_key(device.name))
    if entry is None:
        return device, None
    return refined(device, entry, ranks=entry["ranks"]), str(entry["measured"])


def refined(device: Device, rates: Mapping[str, float], *, ranks: int) -> Device:
    """The device with the rates that each of ``ranks`` ranks measured, all at the same time."""
    links: dict[str, Any] = {name: rates[name] for name in ("link_bytes_s", "host_bytes_s", "hop_s") if name in rates}
    if device.is_cpu:
        return replace(
            device,
            peak_flops=rates["bf16_flops"] * ranks,
            fp32_flops=rates["fp32_flops"] * ranks,
            masked_flops=_SUSTAINED * rates["masked_flops"] * ranks if "masked_flops" in rates else None,
            memory_bytes_s=rates["memory_bytes_s"] * ranks,
            gemm_share=_SUSTAINED,
            attention_share=min(1.0, _SUSTAINED * rates["attention_flops"] / rates["bf16_flops"]),
            **links,
        )
    return replace(
        device,
        memory_bytes_s=rates["memory_bytes_s"],
        gemm_share=min(1.0, _SUSTAINED * rates["bf16_flops"] / device.peak_flops),
        attention_share=min(1.0, _SUSTAINED * rates["attention_flops"] / device.peak_flops),
        **links,
    )


def rank_device(name: str, ranks_here: int) -> Device | None:
    """The device of one of the ranks of this host; None for a GPU that isn't in the table and a CPU that wasn't probed."""
    try:
        device, day = calibrated(find_device(name))
    except UserError:
        return None
    if device.is_cpu:
        return None if day is None else for_rank(device, ranks_here)
    return replace(device, per_node=ranks_here)


def _entries() -> dict[str, Any]:
    try:
        entries = json.loads(FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _key(name: str) -> str:
    return f"{name} of {platform.node()}"
