"""GPUs and networks as the planner sees them: data-sheet numbers, and how much of them training reaches.

Peaks are dense bf16 with fp32 sums. Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (2021), "H100 Tensor Core GPU"
(2023), "H200" (2024), "DGX B200" (2024), "L40S" (2023) and the whitepaper "Ada GPU architecture" (2022); AMD's data sheet
"Instinct MI300X" (2023). Memory is what the driver reports as a whole. NVLink and PCIe are one direction.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from arriero.errors import UserError

_GB, _GIB = 10**9, 2**30

# On-demand list prices per GPU-hour at US clouds, rounded, from the middle of 2025. `--price` gives one's own.
PRICES_FROM = "2025-06"


@dataclass(frozen=True)
class Device:
    """One GPU (or CPU rank) and the links around it; rates per second, shares between 0 and 1."""

    name: str
    peak_flops: float
    """Of bf16 products with fp32 sums, dense."""
    memory_bytes: int
    memory_bytes_s: float
    link_bytes_s: float
    """To the other devices of its node, one direction."""
    host_bytes_s: float
    """To the host's memory, one direction."""
    per_node: int = 8
    network: str = "infiniband-3200"
    price_per_hour: float | None = None
    gemm_share: float = 0.75
    """Of the peak, that large matrix products reach over a whole step."""
    attention_share: float = 0.45
    """Of the peak, that fused causal attention reaches, forward and backward."""
    masked_flops: float | None = None
    """That torch's fused attention reaches with a mask, in any precision; None: attention_share of the peak."""
    half_width: float = 300.0
    """Width of a matrix at which products reach half of that share."""
    launch_s: float = 5e-6
    """Between two kernels that Python starts one by one."""
    hop_s: float = 1.5e-6
    """Until a message to a device of the same node is on its way."""
    host_memory_bytes: int = 1024 * _GIB
    """Of the node."""
    fp32_flops: float = 60e12
    """Of fp32 products without TF32, which torch leaves off."""
    is_cpu: bool = False

    def peak(self, precision: str) -> float:
        """Operations per second of matrix products in a precision, at best."""
        return self.fp32_flops if precision == "fp32" else self.peak_flops


@dataclass(frozen=True)
class Network:
    """What joins the nodes: bytes per second and direction of a whole node, and the delay of one hop."""

    name: str
    node_bytes_s: float
    hop_s: float


# The shares of A100, H100 and H200 are fitted to published runs (docs/planner.md, benchmarks/fit_planner.py); the others
# take those of the GPU that is most alike, lowered for what is known of their software, and are guesses until somebody
# measures. H100-96GB has slower HBM2e and 500 W: a variant that torchtitan's published runs were made on.
# RTX-4090s have no access to one another: what passes between them goes through the host's memory, at half of PCIe.
_TABLE = """
name        bf16  fp32  memory  GB/s  link  host  network          price  matrix  attention
TFLOP/s     .     .     GiB     .     GB/s  GB/s  Gb/s             $/h    share   share
A100-40GB   312   19.5  40      1555  300   32    infiniband-1600  1.3    0.80    0.57
A100-80GB   312   19.5  80      2039  300   32    infiniband-1600  1.8    0.80    0.57
H100-SXM    989.4 67    80      3350  450   64    infiniband-3200  3.0    0.64    0.32
H100-96GB   989.4 67    94      2400  450   64    infiniband-3200  3.0    0.55    0.32
H100-PCIe   756   51    80      2000  64    64    ethernet-400     2.5    0.55    0.32
H200        989.4 67    140     4800  450   64    infiniband-3200  3.8    0.74    0.45
B200        2250  75    180     8000  900   64    infiniband-3200  5.0    0.64    0.32
MI300X      1307  163   192     5300  448   64    infiniband-3200  3.0    0.50    0.25
RTX-4090    165.2 82.6  24      1008  12    25    ethernet-25      0.5    0.80    0.50
L40S        362   91.6  45      864   25    25    ethernet-100     1.0    0.55    0.40
"""


def _read_table(text: str) -> dict[str, Device]:
    found = {}
    for line in text.strip().splitlines()[2:]:
        name, bf16, fp32, memory, bandwidth, link, host, network, price, matrix, attention = line.split()
        found[name] = Device(
            name=name,
            peak_flops=float(bf16) * 1e12,
            memory_bytes=int(memory) * _GIB,
            memory_bytes_s=float(bandwidth) * _GB,
            link_bytes_s=float(link) * _GB,
            host_bytes_s=float(host) * _GB,
            network=network,
            price_per_hour=float(price),
            gemm_share=float(matrix),
            attention_share=float(attention),
            fp32_flops=float(fp32) * 1e12,
        )
    return found


DEVICES = _read_table(_TABLE)

# What people and drivers call them, without blanks, dashes and the maker's name.
_ALIASES = {
    "a100": "A100-80GB",
    "a100sxm480gb": "A100-80GB",
    "a100sxm440gb": "A100-40GB",
    "a80080gb": "A100-80GB",
    "a800": "A100-80GB",
    "h100": "H100-SXM",
    "h10080gb": "H100-SXM",
    "h10080gbhbm3": "H100-SXM",
    "h100sxm5": "H100-SXM",
    "h800": "H100-SXM",
    "h20014gb": "H200",
    "h200141gb": "H200",
    "h200sxm": "H200",
    "b200180gb": "B200",
    "4090": "RTX-4090",
}

# One hop of a ring: about 3 µs over InfiniBand, tens over kernel TCP.
_HOP_S = {"infiniband": 3e-6, "roce": 4e-6, "ethernet": 20e-6}


def find_device(name: str) -> Device:
    """The device that a name such as ``h100`` or ``NVIDIA A100-SXM4-80GB`` means; ``cpu`` is this machine's.

    Raises ``UserError`` with the known names.
    """
    plain = re.sub(r"nvidia|amd|instinct|geforce|[^a-z0-9]", "", name.lower())
    if plain == "cpu":
        return this_cpu()
    for known, device in DEVICES.items():
        if plain == re.sub(r"[^a-z0-9]", "", known.lower()):
            return device
    if plain in _ALIASES:
        return DEVICES[_ALIASES[plain]]
    raise UserError(f"--gpu {name}: not in the table", f"Known: {', '.join(DEVICES)}, cpu.")


def find_network(name: str) -> Network:
    """``infiniband-3200``, ``roce-1600``, ``ethernet-100``: the kind, and gigabits per second of a whole node.

    Raises ``UserError`` for anything else.
    """
    kind, _, gigabits = name.lower().partition("-")
    if kind not in _HOP_S or not gigabits.isdigit() or int(gigabits) < 1:
        raise UserError(
            f"--network {name}: expected {', '.join(_HOP_S)} and the gigabits per second of a node",
            "For example infiniband-3200 (8 × NDR), infiniband-1600 (8 × HDR), ethernet-100.",
        )
    return Network(name, int(gigabits) * _GB / 8, _HOP_S[kind])


def this_cpu() -> Device:
    """This machine's cores as one device, from what the system says of them; `--calibrate` measures instead."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags, hertz = _cpu_facts()
    # fp32 operations per cycle and core: two fused multiply-adds of 16 or 8 lanes; AVX-512 mostly runs as two halves.
    per_cycle = 32 if "avx2" in flags or "avx512f" in flags else 16
    # bf16 products take two values a lane; AMX works on tiles, of which training reaches a fraction.
    bf16 = 8 if "amx_bf16" in flags else 2 if "avx512_bf16" in flags else 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(
        name="cpu",
        peak_flops=cores * hertz * per_cycle * bf16,
        memory_bytes=memory,
        memory_bytes_s=min(cores * 12e9, 200e9),
        link_bytes_s=2e9,
        host_bytes_s=10e9,
        per_node=10**6,
        network="ethernet-10",
        gemm_share=0.5,
        attention_share=0.15,
        half_width=32.0,
        launch_s=10e-6,
        hop_s=130e-6,
        host_memory_bytes=memory,
        fp32_flops=cores * hertz * per_cycle,
        is_cpu=True,
    )


def for_rank(cpu: Device, ranks: int) -> Device:
    """One rank's part of a CPU that ``ranks`` share."""
    return replace(
        cpu,
        peak_flops=cpu.peak_flops / ranks,
        fp32_flops=cpu.fp32_flops / ranks,
        masked_flops=cpu.masked_flops and cpu.masked_flops / ranks,
        memory_bytes=cpu.memory_bytes // ranks,
        memory_bytes_s=cpu.memory_bytes_s / ranks,
    )


def _cpu_facts() -> tuple[set[str], float]:
    """Instruction-set flags, and cycles per second (2.5 GHz where the system doesn't say)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set(), 2.5e9
    flags = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    hertz = re.search(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
    return set(flags[1].split()) if flags else set(), float(hertz[1]) * 1e6 if hertz else 2.5e9


def gpus_here() -> tuple[str, int]:
    """(what NVIDIA's driver calls this machine's GPUs, how many), without loading it; ``("cpu", 1)`` where it has none."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        names += [found[1].strip()] if found else []
    return (names[0], len(names)) if names else ("cpu", 1)
