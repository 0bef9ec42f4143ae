"""GPUs and what they compute, from what the import child saw."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arriero.config.schema import Recipe
from arriero.doctor.finding import Check


def torch_checks(facts: Mapping[str, Any] | None, recipe: Recipe | None) -> list[Check]:
    """GPU, bf16 and fp16 from what the import child saw; nothing where torch itself failed, which is said already."""
    if facts is None:
        return []
    gpu = gpu_check(facts, has_nvidia=Path("/dev/nvidia0").exists())
    return [gpu, *peer_checks(facts), *precision_checks(facts, recipe)]


def gpu_check(facts: Mapping[str, Any], *, has_nvidia: bool) -> Check:
    """Which GPUs computed a product, or why there are none."""
    devices = facts["devices"]
    if facts["failed"]:
        remedy = "nvidia-smi  (then install the driver that your torch build asks for)"
        return Check("gpu", False, f"{', '.join(devices) or 'CUDA'}: {facts['failed']}", remedy)
    if devices:
        counts = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
        if facts["nccl"] is None and len(devices) > 1:
            return Check("gpu", False, f"{counts}, but this torch has no NCCL", "install the CUDA build of torch")
        return Check("gpu", True, f"{counts}, CUDA {facts['build']}, NCCL {facts['nccl'] or 'none'}", required=False)
    if has_nvidia:
        detail = f"an NVIDIA device is here, but torch ({facts['build'] or 'CPU build'}) doesn't see it; CPU is used"
        remedy = "pip install --force-reinstall torch  (the build for your CUDA; see pytorch.org)"
        return Check("gpu", False, detail, remedy, required=False)
    return Check(
        "gpu", True, "none: training runs on the CPU, ranks talk over gloo (NCCL isn't needed)", required=False
    )


def peer_checks(facts: Mapping[str, Any]) -> list[Check]:
    """NCCL's sum over all GPUs of this machine, and which pairs reach one another directly; nothing for one GPU."""
    count = len(facts["devices"])
    if count < 2 or facts["failed"]:
        return []
    if facts["nccl_failed"]:
        remedy = "NCCL_DEBUG=INFO arriero doctor  (and see shared memory; in Docker: docker run --ipc=host …)"
        return [Check("gpu links", False, f"NCCL over {count} GPUs: {facts['nccl_failed']}", remedy)]
    speed = f"{facts['link'] / 1e9:.0f} GB/s between the first two"
    pairs, direct = count * (count - 1), facts["peers"]
    if direct == pairs:
        return [
            Check("gpu links", True, f"NCCL sums over {count} GPUs, all reach one another, {speed}", required=False)
        ]
    detail = (
        f"NCCL sums over {count} GPUs, but {pairs - direct} of {pairs} ways between them go through the host, {speed}"
    )
    remedy = "nvidia-smi topo -m  (GeForce cards have no way of their own; in a virtual machine turn PCIe's ACS off)"
    return [Check("gpu links", False, detail, remedy, required=False)]


def precision_checks(facts: Mapping[str, Any], recipe: Recipe | None = None) -> list[Check]:
    """bf16 and fp16 on what a run would use; required if the recipe asks for that precision."""
    wanted = recipe.train.precision if recipe else None
    if facts["devices"]:
        return [Check("bf16", True, "on the GPU", required=False), Check("fp16", True, "on the GPU", required=False)]
    bf16, fp16, kind = facts["bf16"], facts["fp16"], facts["capability"]
    return [
        Check(
            "bf16",
            bf16,
            f"computed by this CPU ({kind})" if bf16 else f"emulated on this CPU ({kind}): right, but slower than fp32",
            "" if bf16 else "arriero train RECIPE train.precision=fp32",
            required=False,
        ),
        Check(
            "fp16",
            fp16 or wanted != "fp16",
            "computed by this CPU" if fp16 else "DeepSpeed refuses it on this CPU; bf16 and fp32 work",
            "arriero train RECIPE train.precision=bf16" if not fp16 and wanted == "fp16" else "",
            required=wanted == "fp16",
        ),
    ]
