from __future__ import annotations

import math

import pytest

from arriero.monitor.health import WINDOW, Health


def steady(count: int = 20, loss: float = 4.0, norm: float = 1.0) -> Health:
    health = Health()
    for _ in range(count):
        health = health.after(loss, norm, applied=True)
    return health


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_fault_from_the_first_step_on(bad: float) -> None:
    assert "the loss is" in str(Health().fault(bad, 1.0, 3.0))
    assert "norm is" in str(Health().fault(9.0, bad, 3.0))
    assert Health().fault(9.0, 1.0, 3.0) is None


def test_a_spike_is_measured_against_the_median_of_the_last_updates() -> None:
    assert steady().fault(11.9, 29.0, 3.0) is None
    assert "12.1 is 3.02 times the usual 4" in str(steady().fault(12.1, 1.0, 3.0))
    assert "gradient norm" in str(steady().fault(4.0, 30.1, 3.0))
    # The median isn't moved by the few that got through.
    mixed = steady(20).after(1000.0, 1.0, applied=True)
    assert mixed.fault(12.1, 1.0, 3.0) is not None


def test_fifteen_updates_are_too_few_to_call_anything_a_spike() -> None:
    assert steady(15).fault(4000.0, 1e6, 3.0) is None
    assert steady(16).fault(4000.0, 1.0, 3.0) is not None


def test_skipped_steps_are_counted_and_not_looked_back_on() -> None:
    health = steady(20).after(500.0, 9.0, applied=False).after(math.nan, math.nan, applied=False)
    assert (health.skipped, health.skipped_in_row, max(health.losses)) == (2, 2, 4.0)
    assert health.after(4.0, 1.0, applied=True).skipped_in_row == 0
    assert len(steady(200).losses) == len(steady(200).norms) == WINDOW
