"""Batches, lengths and sizes of a run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.config.schema import ModelShape, Train
from arriero.errors import UserError
from arriero.planner.arithmetic import (
    Setup,
    accumulation_steps,
    check_rows,
    divisors,
    flops_per_token,
    parameter_count,
    run_length,
)


def train(**keys: Any) -> Train:
    return Train.model_validate(keys)


# ---------------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize(("number", "expected"), [(1, [1]), (12, [1, 2, 3, 4, 6, 12]), (13, [1, 13])])
def test_divisors(number: int, expected: list[int]) -> None:
    assert divisors(number) == expected


def test_b13_batches_that_come_out() -> None:
    """Two ranks of 2 rows: 12 is three micro-batches each."""
    assert accumulation_steps(train(global_batch_size=12), dp=2, micro_batch=2) == 3


def test_b13_batches_that_do_not() -> None:
    with pytest.raises(UserError) as caught:
        accumulation_steps(train(global_batch_size=10), dp=2, micro_batch=2)
    assert caught.value.exit_code == 2
    assert caught.value.problem == (
        "train.global_batch_size 10 = per_device_train_batch_size 2 × accumulation × 2 data-parallel ranks has no whole "
        "accumulation (10 / 4 = 2.5)"
    )
    assert caught.value.remedy == "Nearest global_batch_size: 8 or 12. Or per_device_train_batch_size 1 with 10."
    with pytest.raises(UserError) as caught:
        accumulation_steps(train(global_batch_size=3), dp=4, micro_batch=2)
    assert caught.value.remedy == "Nearest global_batch_size: 8."


@given(wanted=st.integers(1, 500), dp=st.integers(1, 16), micro_batch=st.integers(1, 32))
def test_what_is_offered_instead_works(wanted: int, dp: int, micro_batch: int) -> None:
    try:
        steps = accumulation_steps(train(global_batch_size=wanted), dp=dp, micro_batch=micro_batch)
    except UserError as error:
        assert wanted % (dp * micro_batch)
        sizes, _, rows = error.remedy.partition(" Or per_device_train_batch_size ")
        for size in re.findall(r"\d+", sizes):
            accumulation_steps(train(global_batch_size=int(size)), dp=dp, micro_batch=micro_batch)
        assert bool(rows) == (wanted % dp == 0)
        if rows:
            accumulation_steps(train(global_batch_size=wanted), dp=dp, micro_batch=int(rows.split()[0]))
        return
    assert steps * dp * micro_batch == wanted


# ----------------------------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("keys", "steps", "rows"),
    [
        ({"max_steps": 10}, 10, 80),
        ({"max_tokens": 1}, 1, 8),
        ({"max_tokens": 512}, 1, 8),
        ({"max_tokens": 513}, 2, 16),
        # 100 rows an epoch in steps of 8: the last step of 13 has 4 rows.
        ({"num_train_epochs": 1}, 13, 100),
        ({"num_train_epochs": 2.5}, 32, 250),
        ({"num_train_epochs": 0.08}, 1, 8),
        ({"num_train_epochs": 0.01}, 1, 1),
    ],
)
def test_steps_and_rows(keys: dict[str, Any], steps: int, rows: int) -> None:
    settings = train(global_batch_size=8, **keys)
    assert run_length(settings, seq_len=64, epoch_rows=100) == (steps, rows)


@pytest.mark.parametrize(
    ("keys", "steps", "rows"),
    [
        # Five steps of 4 rows were done; the rest goes on in steps of 8.
        ({"max_steps": 10}, 10, 20 + 5 * 8),
        ({"max_steps": 3}, 5, 20),
        ({"max_tokens": 20 * 64 + 1}, 6, 28),
        ({"max_tokens": 64}, 5, 20),
        ({"num_train_epochs": 1}, 15, 100),
        ({"num_train_epochs": 0.1}, 5, 20),
    ],
)
def test_what_is_left_is_counted_in_todays_batches(keys: dict[str, Any], steps: int, rows: int) -> None:
    settings = train(global_batch_size=8, **keys)
    done = {"step": 5, "position": 20, "tokens": 20 * 64, "counted": 20}
    assert run_length(settings, seq_len=64, epoch_rows=100, **done) == (steps, rows)


@pytest.mark.parametrize(
    ("keys", "steps", "rows"),
    [
        # 5 steps of 4 rows of 32 tokens were done: 10 of today's 100 rows of 64. The rest goes on in steps of 8.
        ({"max_steps": 10}, 10, 20 + 5 * 8),
        ({"max_tokens": 20 * 32 + 1}, 6, 28),
        ({"max_tokens": 20 * 64 + 1}, 5 + 2, 20 + 2 * 8),
        ({"num_train_epochs": 1}, 5 + 12, 20 + 90),
        ({"num_train_epochs": 0.1}, 5, 20),
    ],
)
def test_after_a_change_of_seq_len_tokens_and_epochs_stay_what_they_are(
    keys: dict[str, Any], steps: int, rows: int
) -> None:
    settings = train(global_batch_size=8, **keys)
    done = {"step": 5, "position": 20, "tokens": 20 * 32, "counted": 10}
    assert run_length(settings, seq_len=64, epoch_rows=100, **done) == (steps, rows)


def test_a_run_of_no_steps_is_refused() -> None:
    settings = train(num_train_epochs=0.001)
    with pytest.raises(UserError, match=r"num_train_epochs 0.001 of 100 rows is less than one row"):
        run_length(settings, seq_len=64, epoch_rows=100)


def test_sources_that_end_before_the_run() -> None:
    check_rows(1_001, None, {})
    check_rows(1_000, 1_000, {})
    with pytest.raises(UserError) as caught:
        check_rows(1_001, 1_000, {"code": 2.0, "prose": 0.5})
    assert caught.value.problem == (
        "the run takes 1,001 rows, but with max_epochs its sources end after 1,000 (code: 2 epochs, prose: 0.5 epochs)"
    )


# ------------------------------------------------------------------------------------------------------------------ sizes

LLAMA_7B = ModelShape(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, tie_word_embeddings=False
)
MODEL_T = ModelShape(
    hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def test_sizes_that_are_published() -> None:
    """Llama 2 7B has 6,738,415,616 parameters, Llama 3 8B 8,030,261,248."""
    llama_3 = {"intermediate_size": 14336, "num_key_value_heads": 8}
    assert parameter_count(LLAMA_7B, 32_000) == 6_738_415_616
    assert parameter_count(LLAMA_7B.model_copy(update=llama_3), 128_256) == 8_030_261_248
    assert parameter_count(MODEL_T, 259) == 124_096
    assert parameter_count(MODEL_T.model_copy(update={"tie_word_embeddings": True}), 259) == 107_520


def test_a_layout_splits_its_ranks() -> None:
    layout = Setup(ranks=64, zero_stage=3, tensor=4, sequence=2, pipeline=2)
    assert (layout.dp, layout.zero_ranks) == (4, 8)
    assert replace(layout, shard_ranks=4).zero_ranks == 4


def test_flops_by_hand() -> None:
    """6 per weight but the input embedding's and the norms', and 6·L·q a layer for causal attention."""
    weights = 6_738_415_616 - 32_000 * 4096 - (2 * 32 + 1) * 4096
    assert flops_per_token(LLAMA_7B, 32_000, 4096) == 6 * weights + 6 * 32 * 4096 * 4096
