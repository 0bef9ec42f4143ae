"""Fits the planner's shares to the published runs marked "fit", and says how well it does on sources it never saw.

python benchmarks/fit_planner.py     half a minute; changes nothing, prints the shares to write into planner/

The shares: of each GPU's peak, what matrix products and attention reach; of memory and links, what kernels and
collectives reach; what of hidden collectives still shows; and what operations run one by one move more than counted.
Errors below 3 % count by their square, so that one row can't be matched at the cost of the others; each share is held
near its first guess by a weak spring. Left out, one source after the other, the rest is fitted again: that error is what
a run from elsewhere should expect.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import make_planner_page as scored

from arriero.planner import hardware, throughput

# Name, first guess, least, most. A GPU's share goes to all that share its kernels.
SHARES = {
    "gemm A100-80GB A100-40GB": (0.79, 0.4, 0.95),
    "gemm H100-SXM": (0.66, 0.4, 0.95),
    "gemm H100-96GB": (0.55, 0.4, 0.95),
    "gemm H200": (0.74, 0.4, 0.95),
    "attention A100-80GB A100-40GB": (0.55, 0.1, 0.9),
    "attention H100-SXM H100-96GB": (0.40, 0.1, 0.9),
    "attention H200": (0.45, 0.1, 0.9),
    "_MEMORY_SHARE": (0.80, 0.6, 0.92),
    "_EXPOSED": (0.25, 0.05, 0.6),
    "_EAGER": (1.3, 1.0, 2.2),
    "_LINK_SHARE": (0.75, 0.5, 0.95),
    "MPT_ATTENTION": (0.7, 0.3, 1.0),
}
WEIGHTS = {"llama": 2.0, "llama-tp": 0.3, "mpt": 0.8}


def read(name: str) -> float:
    kind, *devices = name.split()
    if devices:
        return float(getattr(hardware.DEVICES[devices[0]], f"{kind}_share"))
    return float(getattr(scored if name == "MPT_ATTENTION" else throughput, name))


def write(name: str, value: float) -> None:
    kind, *devices = name.split()
    for device in devices:
        hardware.DEVICES[device] = replace(hardware.DEVICES[device], **{f"{kind}_share": value})
    if not devices:
        setattr(scored if name == "MPT_ATTENTION" else throughput, name, value)


def badness(runs: Sequence[scored.Run]) -> float:
    total = weight = 0.0
    for run in runs:
        error = abs(math.log1p(run.tokens_error() or 0.0))
        one = WEIGHTS[run.row["group"]]
        total += one * (error if error > 0.03 else error**2 / 0.06 + 0.015)
        weight += one
    springs = sum(0.02 * math.log(read(name) / guess) ** 2 for name, (guess, _, _) in SHARES.items())
    return total / weight + springs


def fit(runs: Sequence[scored.Run]) -> None:
    """One share after the other, in steps that get smaller, for as long as it helps."""
    for name, (guess, _, _) in SHARES.items():
        write(name, guess)
    best, step = badness(runs), 0.12
    for _ in range(7):
        for name, (_, least, most) in SHARES.items():
            for factor in (1 + step, 1 / (1 + step)):
                while least <= (value := read(name) * factor) <= most:
                    before = read(name)
                    write(name, value)
                    now = badness(runs)
                    if now >= best - 1e-6:
                        write(name, before)
                        break
                    best = now
        step *= 0.6


def main() -> None:
    runs = [run for run in scored.runs() if run.row["set"] == "fit" and run.row["tokens_s_gpu"]]
    fit(runs)
    print("fitted to all: " + ", ".join(f"{name} {read(name):.2f}" for name in SHARES))
    found: dict[str, list[float]] = {}
    print("\n| source left out | rows | median error | largest |\n| --- | --: | --: | --: |")
    for source in sorted({run.row["source"] for run in runs}):
        fit([run for run in runs if run.row["source"] != source])
        unseen = [run for run in runs if run.row["source"] == source]
        errors = [run.tokens_error() or 0.0 for run in unseen]
        for run, error in zip(unseen, errors, strict=True):
            found.setdefault(run.row["group"], []).append(error)
        middle = statistics.median(abs(error) for error in errors)
        print(f"| {source} | {len(errors)} | {middle:.1%} | {max(errors, key=abs):+.1%} |", flush=True)
    for group, errors in found.items():
        middle, most = scored.middle_and_most(errors)
        print(
            f"\n{scored.GROUPS[group]}, each source left out: median {middle:.1%}, 90th percentile {most:.1%}", end=""
        )
    print()


if __name__ == "__main__":
    main()
