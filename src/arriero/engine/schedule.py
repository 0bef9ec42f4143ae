"""Transformers' learning-rate schedules as a function: number of the update in, multiplier out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    specific: dict[str, Any] = {}
    if optim.lr_scheduler_type == "warmup_stable_decay":
        # A decay longer than what the warm-up leaves would begin below the highest rate.
        specific = {"num_decay_steps": min(max(1, round(optim.decay_ratio * steps)), total - warmup)}
    if optim.lr_scheduler_type == "polynomial":
        specific = {"lr_end": 0.0}
    # The schedules are made for an optimizer; a stand-in with rate 1 carries them.
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = get_scheduler(
        optim.lr_scheduler_type,
        optimizer=stand_in,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=specific,
    )
    multiplier = schedule.lr_lambdas[0]
    low = optim.min_lr_ratio

    def rate(update: int) -> float:
        value = float(multiplier(update))
        if update > warmup:
            value = low + (1 - low) * value
        return optim.learning_rate * value

    return rate
