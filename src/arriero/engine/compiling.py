"""Whether compiling the decoder layers pays for a run: seconds in, the choice and its reason out."""

from __future__ import annotations

from dataclasses import dataclass

# What compiling saves of a step, and how long it takes before the first one, by the kind of device. On two cores of an
# EPYC the demo-size model's step loses 8 to 12 % and the first one takes 30 s more (4 s where the cache on the disk
# knows the graphs). The GPU's figures are cautious guesses: none was at hand.
_SAVED_SHARE = {"cpu": 0.08, "cuda": 0.15}
_COMPILE_S = {"cpu": 30.0, "cuda": 60.0}
# A step is two to three times its forward pass: backward has two products for each of forward's.
_STEP_PER_FORWARD = 3.0
# The gain has to be twice the price: both are estimates, and a run that is stopped early has paid in full.
_MARGIN = 2.0


@dataclass(frozen=True)
class Compiling:
    """The choice, and why, in words for a person."""

    chosen: bool
    reason: str


def choose_compiling(*, forward_s: float, steps: int, device: str, zero_stage: int) -> Compiling:
    """The choice for ``torch_compile: auto``: steps that are left against the price of compiling.

    forward_s: a step's forward passes on this rank, measured; device: cpu or cuda.
    """
    if zero_stage == 3:
        return Compiling(False, "not compiled: ZeRO-3 fetches weights inside the layers, and compiling gains nothing")
    step_s = _STEP_PER_FORWARD * forward_s
    gain_s, price_s = _SAVED_SHARE[device] * step_s * steps, _COMPILE_S[device]
    sums = f"{steps:,} steps of about {step_s:.2g} s would gain about {gain_s:,.0f} s, compiling takes about {price_s:.0f} s"
    if gain_s > _MARGIN * price_s:
        return Compiling(True, f"decoder layers are compiled: {sums}")
    return Compiling(False, f"not compiled: {sums}")
