"""Batches, lengths and memory of a run."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.config.schema import ModelShape, Train
from arriero.errors import UserError
from arriero.planner.arithmetic import (
    accumulation_steps,
    check_rows,
    divisors,
    flops_per_token,
    micro_batch_rows,
    parameter_count,
    run_length,
)
from arriero.planner.memory import MemoryEstimate, estimate_memory


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


@pytest.mark.parametrize(
    ("global_batch_size", "dp", "seq_len", "rows"),
    [(16, 2, 256, 8), (64, 1, 1024, 4), (64, 1, 8192, 1), (12, 2, 1024, 3), (14, 2, 1024, 1), (3, 4, 128, 1)],
)
def test_auto_micro_batches_divide_the_share_and_stay_below_4096_tokens(
    global_batch_size: int, dp: int, seq_len: int, rows: int
) -> None:
    assert micro_batch_rows(train(global_batch_size=global_batch_size), dp=dp, seq_len=seq_len) == rows


def test_a_given_micro_batch_is_kept() -> None:
    assert micro_batch_rows(train(per_device_train_batch_size=7), dp=2, seq_len=10**6) == 7


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


def test_flops_by_hand() -> None:
    """6 per weight but the input embedding's and the norms', and 6·L·q a layer for causal attention."""
    weights = 6_738_415_616 - 32_000 * 4096 - (2 * 32 + 1) * 4096
    assert flops_per_token(LLAMA_7B, 32_000, 4096) == 6 * weights + 6 * 32 * 4096 * 4096


# ----------------------------------------------------------------------------------------------------------------- memory


def memory(of: ModelShape = LLAMA_7B, **keys: Any) -> MemoryEstimate:
    vocab = 32_000 if of is LLAMA_7B else 259
    given = {
        "parameters": parameter_count(of, vocab),
        "vocab_size": vocab,
        "precision": "bf16",
        "zero_stage": 0,
        "dp": 1,
        "micro_batch": 1,
        "seq_len": 2048,
        "activation_checkpointing": False,
    }
    return estimate_memory(of, **{**given, **keys})


def per_parameter(estimate: MemoryEstimate, of: ModelShape = LLAMA_7B) -> list[float]:
    count = parameter_count(of, 32_000 if of is LLAMA_7B else 259)
    return [round(part / count, 3) for part in (estimate.parameters, estimate.gradients, estimate.optimizer)]


@pytest.mark.parametrize(
    ("precision", "stage", "dp", "parts"),
    [
        # weights, gradients, master and moments, in bytes per parameter of the whole model
        ("bf16", 0, 1, [2, 2, 12]),
        ("bf16", 1, 1, [2, 4, 12]),
        ("bf16", 1, 8, [2, 4, 1.5]),
        ("bf16", 2, 8, [2, 0.5, 1.5]),
        ("bf16", 3, 8, [0.25, 0.5, 1.5]),
        ("fp32", 0, 8, [4, 4, 8]),
        ("fp32", 1, 8, [4, 4, 1.5]),
        ("fp32", 3, 8, [0.5, 0.5, 1.5]),
    ],
)
def test_e04_model_states(precision: str, stage: int, dp: int, parts: list[float]) -> None:
    for of in (LLAMA_7B, MODEL_T):
        assert per_parameter(memory(of, precision=precision, zero_stage=stage, dp=dp), of) == pytest.approx(
            parts, abs=2e-3
        )


def test_e04_a_7b_model_in_bf16() -> None:
    count = parameter_count(LLAMA_7B, 32_000)
    for stage in (0, 1):
        assert 16 <= memory(zero_stage=stage).model_states / count <= 18


@pytest.mark.parametrize(("precision", "width"), [("bf16", 12), ("fp32", 8)])
def test_e04_logits(precision: str, width: int) -> None:
    """The head works through 256 tokens at a time, twice in fp32, in bf16 twice more, and sums an fp32 gradient."""
    head = 4 * 32_000 * 4096
    assert memory(precision=precision).logits == 256 * 32_000 * width + head
    assert memory(precision=precision, micro_batch=8).logits == memory(precision=precision).logits
    assert memory(precision=precision, seq_len=100).logits == 100 * 32_000 * width + head


def test_e04_activations() -> None:
    whole, spared = memory(), memory(activation_checkpointing=True)
    assert memory(micro_batch=4).activations == 4 * whole.activations
    assert memory(seq_len=4096).activations == 2 * whole.activations
    # One layer whole and the inputs of all: 2·H a token for each of 32 layers.
    assert spared.activations == whole.activations // 32 + 2048 * 32 * 2 * 4096
    assert (spared.model_states, spared.logits) == (whole.model_states, whole.logits)
    # Every third of 32 layers is 11 of them.
    third = memory(activation_checkpointing=3)
    assert third.activations == whole.activations // 32 * 22 + 2048 * 11 * 2 * 4096
    assert memory(activation_checkpointing=1) == spared


def test_the_whole_is_its_parts() -> None:
    estimate = memory(zero_stage=2, dp=4)
    assert estimate.model_states == estimate.parameters + estimate.gradients + estimate.optimizer
    assert estimate.total == estimate.model_states + estimate.activations + estimate.logits


def test_the_loss_chunk_is_the_models() -> None:
    from arriero.model.loss import _CHUNK_TOKENS
    from arriero.planner.memory import _LOSS_CHUNK_TOKENS

    assert _LOSS_CHUNK_TOKENS == _CHUNK_TOKENS
