"""Transformers' learning-rate schedules as a function: number of the update in, multiplier out."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from transformers import get_scheduler

from arriero.config.schema import Optim


def warmup_updates(optim: Optim, steps: int) -> int:
    """Updates of linear warm-up: ``warmup_steps`` itself, or its share of the run where it is below 1."""
    share = optim.warmup_steps
    return round(share * steps) if share < 1 else int(share)


def learning_rates(optim: Optim, steps: int) -> Callable[[int], float]:
    """The learning rate of update u, counted from 1, in a run of ``steps`` updates.

    Update u takes Transformers' multiplier at u, so the first update already moves the weights and the last one takes
    the schedule's end: with 2 updates of warm-up in 10 of a cosine to 0 at 1e-3: 500, 1000, 961.94, …, 38.06, 0 (1e-6).
    After the warm-up the multiplier m becomes r + (1 − r)·m with r = ``min_lr_ratio``, as in Transformers'
    cosine_with_min_lr, for every shape.
    """
    warmup = warmup_updates(optim, steps)
    total = max(steps, warmup + 1)
    shape, specific = optim.lr_scheduler_type, dict(optim.lr_scheduler_kwargs)
    low, before = optim.min_lr_ratio, 0
    if shape == "warmup_stable_decay":
        # A decay longer than what the warm-up leaves would begin below the highest rate.
        specific["num_decay_steps"] = min(max(1, round(optim.decay_ratio * steps)), total - warmup)
    elif shape == "polynomial":
        specific["lr_end"] = 0.0
    elif shape in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        specific["min_lr_rate"] = 0.0
        # The latter counts updates from 0 and takes the end of each.
        before = 1 if shape == "cosine_warmup_with_min_lr" else 0
    # The schedules are made for an optimizer; a stand-in with rate 1 carries them.
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = get_scheduler(
        shape,
        optimizer=stand_in,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=specific,
    )
    multiplier = schedule.lr_lambdas[0]

    def rate(update: int) -> float:
        value = float(multiplier(update - before))
        if update > warmup:
            value = low + (1 - low) * value
        return optim.learning_rate * value

    return rate


def length_change(optim: Optim, before: int, now: int, updates: int) -> str | None:
    """The rule for a run whose length was changed, with the rates that follow from it."""
    if before == now or updates >= now:
        return None
    old, new = (learning_rates(optim, steps)(updates + 1) for steps in (before, now))
    return (
        f"the run's length changed from {before} to {now} steps: the schedule is from here on that of a run of {now}, as if "
        f"it had been so from the start; update {updates + 1} takes {new:.3g}"
        + (", as before" if math.isclose(old, new) else f" instead of {old:.3g}")
    )
