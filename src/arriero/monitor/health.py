"""Whether a step is fit to be applied: numbers in, a reason out. The policy is the recipe's, the acting is the loop's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# Updates that are looked back on, and how many of them there must be before a step can be called a spike: the first
# steps of a run fall from ln V and have gradients of any size.
WINDOW = 64
_ENOUGH = 16
# A gradient norm swings far more than a loss does, and max_grad_norm tames most of it.
_NORM_MARGIN = 10.0


@dataclass(frozen=True)
class Health:
    """What the loop remembers of its last updates; part of a checkpoint, so that a resumed run judges alike."""

    losses: tuple[float, ...] = ()
    """Loss of each of the last applied updates, oldest first."""
    norms: tuple[float, ...] = ()
    """Gradient norm of each, before clipping."""
    skipped: int = 0
    """Updates that were not applied, in the whole run."""
    skipped_in_row: int = 0
    """Of these, the ones since the last applied update."""

    def after(self, loss: float, norm: float, *, applied: bool) -> Health:
        """The same once one more step is done."""
        if not applied:
            return Health(self.losses, self.norms, self.skipped + 1, self.skipped_in_row + 1)
        return Health((*self.losses, loss)[-WINDOW:], (*self.norms, norm)[-WINDOW:], self.skipped, 0)

    def fault(self, loss: float, norm: float, spike_factor: float) -> str | None:
        """Why a step with this loss (nats per target) and gradient norm must not be applied; None: it may.

        A loss above ``spike_factor`` times the median of the last 64 applied ones is a spike, and so is a gradient norm
        above ten times that factor. 16 updates must have been applied before.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}"
        return _spike("loss", loss, self.losses, spike_factor) or _spike(
            "gradient norm", norm, self.norms, spike_factor * _NORM_MARGIN
        )


def _spike(name: str, value: float, before: Sequence[float], factor: float) -> str | None:
    if len(before) < _ENOUGH:
        return None
    usual = median(before)
    if value <= factor * usual or usual == 0:
        return None
    return f"the {name} {value:.4g} is {value / usual:.3g} times the usual {usual:.4g}"
