"""The learning rate of each update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from arriero.config.load import check_recipe
from arriero.config.schema import Optim
from arriero.engine.schedule import learning_rates, length_change, warmup_updates
from arriero.errors import UserError

SHAPES: tuple[str, ...] = get_args(Optim.model_fields["lr_scheduler_type"].annotation)
REFUSED = ("greedy", "reduce_lr_on_plateau")
# Those that end at min_lr_ratio; the others stay where they are, or fall for ever.
ENDING = ("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "linear", "polynomial", "warmup_stable_decay")


def rates(steps: int, **keys: Any) -> list[float]:
    rate = learning_rates(Optim(**keys), steps)
    return [rate(update) for update in range(1, steps + 1)]


def near(expected: Sequence[float]) -> Any:
    return pytest.approx(expected, abs=1e-8)


def test_b05_the_second_documented_sequence() -> None:
    """1e-3, 2 updates of warm-up, a cosine to 0 over 10 updates; by the formula and by the printed numbers."""
    found = rates(10, learning_rate=1e-3, warmup_steps=2, min_lr_ratio=0)
    cosine = [0.5e-3 * (1 + math.cos(math.pi * k / 8)) for k in range(1, 9)]
    assert found == near([0.5e-3, 1e-3, *cosine])
    printed = [500, 1000, 961.94, 853.55, 691.34, 500, 308.66, 146.45, 38.06, 0]
    assert [rate * 1e6 for rate in found] == pytest.approx(printed, abs=5e-3)


def test_the_shapes_by_hand() -> None:
    keys = {"learning_rate": 1.0, "warmup_steps": 2, "min_lr_ratio": 0.0}
    assert rates(6, lr_scheduler_type="linear", **keys) == near([0.5, 1, 0.75, 0.5, 0.25, 0])
    assert rates(6, lr_scheduler_type="polynomial", **keys) == near([0.5, 1, 0.75, 0.5, 0.25, 0])
    assert rates(4, lr_scheduler_type="constant_with_warmup", **keys) == near([0.5, 1, 1, 1])
    assert rates(4, lr_scheduler_type="constant", **keys) == near([1, 1, 1, 1])
    assert rates(8, lr_scheduler_type="inverse_sqrt", **keys) == near(
        [0.5, 1, *(math.sqrt(2 / update) for update in range(3, 9))]
    )
    # Half of 8 updates decay: from update 4, which is still the highest, to update 8.
    assert rates(8, lr_scheduler_type="warmup_stable_decay", decay_ratio=0.5, **keys) == near(
        [0.5, 1, 1, 1, *(0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(1, 5))]
    )


def test_all_of_transformers_names() -> None:
    from transformers import SchedulerType

    assert {*SHAPES, *REFUSED} == {name.value for name in SchedulerType}


@pytest.mark.parametrize("name", REFUSED)
def test_schedules_that_follow_the_loss_are_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(
        ValidationError, match=f"{name} follows the losses of a run.*warmup_stable_decay is the nearest"
    ):
        Optim(lr_scheduler_type=name)


@pytest.mark.parametrize("shape", ["cosine_with_min_lr", "cosine_warmup_with_min_lr"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_cosines_with_a_floor_are_the_cosine_with_a_floor(shape: str, warmup: int) -> None:
    keys = {"learning_rate": 1e-3, "warmup_steps": warmup, "min_lr_ratio": 0.2}
    assert rates(12, lr_scheduler_type=shape, **keys) == near(rates(12, lr_scheduler_type="cosine", **keys))


def test_a_shapes_own_numbers() -> None:
    keys = {"learning_rate": 1.0, "warmup_steps": 0, "min_lr_ratio": 0.0}
    twice = rates(8, lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}, **keys)
    half = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(1, 4)]
    assert twice == near([*half, 1, *half, 0])
    squared = rates(4, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2}, **keys)
    assert squared == near([0.75**2, 0.5**2, 0.25**2, 0])
    slow = rates(3, lr_scheduler_type="inverse_sqrt", lr_scheduler_kwargs={"timescale": 2}, **keys)
    assert slow == near([math.sqrt(2 / 3), math.sqrt(2 / 4), math.sqrt(2 / 5)])
    wsd = {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.5, **keys}
    assert rates(4, lr_scheduler_kwargs={"decay_type": "linear"}, **wsd) == near([1, 1, 0.5, 0])
    assert rates(4, lr_scheduler_kwargs={"decay_type": "1-sqrt"}, **wsd) == near([1, 1, 1 - math.sqrt(0.5), 0])
    keys["warmup_steps"] = 3
    warm = {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"warmup_lr_rate": 0.2}}
    assert rates(6, **warm, **keys)[:3] == near([0.2, 0.6, 1.0])


@pytest.mark.parametrize(
    ("shape", "kwargs", "problem"),
    [
        ("cosine", {"power": 2}, "power: cosine has no such number; it has num_cycles"),
        ("linear", {"num_cycles": 2}, "num_cycles: linear has no such number; it has none"),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, "min_lr_rate: use optim.min_lr_ratio"),
        ("warmup_stable_decay", {"num_decay_steps": 10}, "num_decay_steps: use optim.decay_ratio"),
        ("warmup_stable_decay", {"decay_type": "steps"}, "expected one of cosine, linear, 1-sqrt, got 'steps'"),
        ("polynomial", {"power": True}, "expected a number above 0, got True"),
    ],
)
def test_numbers_that_a_shape_does_not_have(shape: str, kwargs: dict[str, Any], problem: str) -> None:
    value = {
        "output_dir": "x",
        "model": {"model_name_or_path": "m"},
        "data": {"sources": [{"path": "d"}]},
        "train": {"max_steps": 1},
        "optim": {"lr_scheduler_type": shape, "lr_scheduler_kwargs": kwargs},
    }
    with pytest.raises(UserError) as caught:
        check_recipe(value, "test")
    assert problem in str(caught.value)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("low", [0.0, 0.1, 1.0])
def test_min_lr_ratio(shape: str, low: float) -> None:
    """After the warm-up the multiplier m becomes r + (1 − r)·m; before it nothing changes."""
    keys = {"learning_rate": 2e-3, "warmup_steps": 5, "lr_scheduler_type": shape}
    found, plain = rates(50, min_lr_ratio=low, **keys), rates(50, min_lr_ratio=0, **keys)
    assert found[:5] == plain[:5]
    assert found[5:] == near([2e-3 * (low + (1 - low) * rate / 2e-3) for rate in plain[5:]])
    assert all(rate >= 2e-3 * low - 1e-12 for rate in found[5:])
    if shape in ENDING:
        assert found[-1] == near(2e-3 * low)
        assert found[4] == near(2e-3)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    steps=st.integers(1, 60),
    warmup=st.floats(0, 0.999) | st.integers(1, 80),
    decay=st.floats(0.001, 1),
    low=st.floats(0, 1),
)
def test_every_rate_is_finite_and_at_most_the_highest(
    shape: str, steps: int, warmup: float, decay: float, low: float
) -> None:
    optim = Optim(learning_rate=3e-4, lr_scheduler_type=shape, warmup_steps=warmup, decay_ratio=decay, min_lr_ratio=low)
    rate = learning_rates(optim, steps)
    found = [rate(update) for update in range(1, steps + 1)]
    assert all(math.isfinite(value) and 0 <= value <= 3e-4 * (1 + 1e-12) for value in found)
    first = warmup_updates(optim, steps)
    if shape != "constant":
        assert found[:first] == near(
            [3e-4 * min(update / max(first, 1), 1) for update in range(1, len(found) + 1)][:first]
        )
    if first >= 2 and shape != "constant":
        assert found[0] <= 1.5e-4 + 1e-12, "never the full rate at update 1"
    falling = found[max(first - 1, 0) :]
    if shape != "cosine_with_restarts":
        assert all(later <= earlier + 1e-12 for earlier, later in pairwise(falling))


@pytest.mark.parametrize(
    ("warmup", "steps", "updates"),
    [
        (0, 100, 0),
        (0.02, 100, 2),
        (0.02, 10, 0),
        (0.5, 9, 4),
        (0.999, 10, 10),
        (1, 100, 1),
        (20, 100, 20),
        (200, 100, 200),
    ],
)
def test_warm_up_as_a_share_and_as_a_count(warmup: float, steps: int, updates: int) -> None:
    assert warmup_updates(Optim(warmup_steps=warmup), steps) == updates


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    assert rates(4, learning_rate=1.0, warmup_steps=8) == near([1 / 8, 2 / 8, 3 / 8, 4 / 8])


def test_a_decay_longer_than_the_rest_begins_at_the_highest_rate() -> None:
    found = rates(
        10, learning_rate=1.0, warmup_steps=5, min_lr_ratio=0, decay_ratio=1, lr_scheduler_type="warmup_stable_decay"
    )
    assert found[4:] == near([0.5 * (1 + math.cos(math.pi * k / 5)) for k in range(6)])


def test_a_rate_depends_on_its_update_alone() -> None:
    rate = learning_rates(Optim(), 100)
    forwards = [rate(update) for update in range(1, 101)]
    assert [rate(update) for update in range(100, 0, -1)] == forwards[::-1]


def test_a_changed_length_follows_a_printed_rule() -> None:
    """The schedule of the new length, as if it had been so from the start; a stable part goes on as it was."""
    cosine = Optim(learning_rate=1.0, warmup_steps=0, min_lr_ratio=0)
    note = length_change(cosine, 10, 20, 5)
    assert note is not None
    assert "from 10 to 20 steps" in note
    assert f"update 6 takes {learning_rates(cosine, 20)(6):.3g} instead of {learning_rates(cosine, 10)(6):.3g}" in note
    stable = Optim(learning_rate=1.0, warmup_steps=2, lr_scheduler_type="warmup_stable_decay")
    assert str(length_change(stable, 10, 20, 5)).endswith("update 6 takes 1, as before")
    assert length_change(cosine, 10, 10, 5) is None
    assert length_change(cosine, 10, 5, 5) is None, "nothing is left to train"
