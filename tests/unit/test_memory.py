"""Memory of a rank by part, and the micro-batch that fits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.config.schema import ModelShape, Recipe
from arriero.planner.arithmetic import Setup, parameter_count, widths
from arriero.planner.memory import (
    ARRIERO,
    MemoryEstimate,
    Practice,
    auto_micro_batch,
    estimate_memory,
    logit_bytes,
    parameters_of_rank,
    practice_of,
)

LLAMA_7B = ModelShape(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
MODEL_T = ModelShape(
    hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
VOCAB = {id(LLAMA_7B): 32_000, id(MODEL_T): 259}


def peak_bytes(step: Callable[[], object], *before: Any) -> int:
    """Most bytes of tensors that there are at once during ``step`` besides those from before it."""
    spec = importlib.util.spec_from_file_location(
        "plan_benchmark", Path(__file__).parents[2] / "benchmarks" / "plan.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: int = module.peak_bytes(step, before) - sum(tensor.nbytes for tensor in before)
    return found


def memory(of: ModelShape = LLAMA_7B, practice: Practice = ARRIERO, **keys: Any) -> MemoryEstimate:
    """Of one row of 2,048 tokens, two micro-batches a step."""
    vocab = VOCAB[id(of)]
    seq_len, on_gpu = keys.pop("seq_len", 2048), keys.pop("on_gpu", True)
    layout = Setup(**{"ranks": 1, "zero_stage": 1, "accumulation": 2, **keys})
    return estimate_memory(
        of,
        layout,
        parameters=parameter_count(of, vocab),
        vocab_size=vocab,
        seq_len=seq_len,
        practice=practice,
        on_gpu=on_gpu,
    )


def per_parameter(estimate: MemoryEstimate, of: ModelShape) -> list[float]:
    count = parameter_count(of, VOCAB[id(of)])
    return [round(part / count, 3) for part in (estimate.parameters, estimate.gradients, estimate.optimizer)]


@pytest.mark.parametrize(
    ("precision", "stage", "ranks", "parts"),
    [
        # weights, sums of gradients, master and moments, in bytes per parameter of the whole model
        ("bf16", 1, 1, [2, 4, 12]),
        ("bf16", 1, 8, [2, 4, 1.5]),
        ("bf16", 2, 8, [2, 0.5, 1.5]),
        ("bf16", 3, 8, [0.25, 0.5, 1.5]),
        ("fp32", 0, 8, [4, 4, 8]),
        ("fp32", 1, 8, [4, 4, 1.5]),
        ("fp32", 3, 8, [0.5, 0.5, 1.5]),
    ],
)
def test_e04_model_states(precision: str, stage: int, ranks: int, parts: list[float]) -> None:
    for of in (LLAMA_7B, MODEL_T):
        found = memory(of, Practice(precision=precision), zero_stage=stage, ranks=ranks)
        assert per_parameter(found, of) == pytest.approx(parts, abs=2e-3)


def test_e04_a_7b_model_in_bf16() -> None:
    count = parameter_count(LLAMA_7B, 32_000)
    assert 16 <= memory(zero_stage=1).model_states / count <= 18


@pytest.mark.parametrize(
    ("precision", "width", "each", "wide"),
    [
        ("bf16", 2, 12, 14 * 1024 + 4 * 4096),
        ("fp32", 4, 8, 4 * 1024 + 8 * 4096),
    ],
)
def test_e04_logits(precision: str, width: int, each: int, wide: int) -> None:
    """A chunk of 1,024 tokens (256 of a narrow model), with the last one's gradient where there are several, beside the
    head's fp32 gradient; or that gradient and what a chunk adds to it, if that is more."""
    practice = Practice(precision=precision)
    assert memory(practice=practice).logits == 32_000 * wide
    assert memory(practice=practice, micro_batch=8).logits == 32_000 * wide, "chunks: not more for more rows"
    for tokens, bytes_each in ((100, each), (256, each), (1000, each + width)):
        found = logit_bytes(50_000, 64, tokens, Setup(), practice)
        assert found == min(tokens, 256) * 50_000 * bytes_each + 4 * 50_000 * 64


@pytest.mark.parametrize(("precision", "compute_dtype"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_the_loss_needs_what_is_planned(precision: str, compute_dtype: str) -> None:
    """Peak of the storages that the model's own loss makes, counted one by one; 600 tokens are three chunks."""
    import torch

    from arriero.model.loss import linear_cross_entropy

    dtype = getattr(torch, compute_dtype)
    hidden, weight = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((600, 16), (5000, 16)))
    targets = torch.arange(600)
    peak = peak_bytes(lambda: linear_cross_entropy(hidden, weight, targets)[0].backward(), hidden, weight, targets)
    assert peak == pytest.approx(logit_bytes(5000, 16, 600, Setup(), Practice(precision=precision)), rel=0.03)


def test_e04_activations() -> None:
    whole, spared = memory(), memory(checkpoint_every=1)
    assert memory(micro_batch=4).activations == 4 * whole.activations
    assert memory(seq_len=4096).activations == 2 * whole.activations, "nothing quadratic with flash kernels"
    # The inputs of 32 layers, 2·H a token.
    assert spared.activations == 2048 * 32 * 2 * 4096
    assert spared.model_states == whole.model_states
    assert whole.activations > memory(checkpoint_every=2).activations > spared.activations
    # Every third of 32 layers is 11 of them: the first, the fourth, … and the thirty-first.
    third = memory(checkpoint_every=3).activations
    assert third == pytest.approx(whole.activations * 21 / 32 + spared.activations * 11 / 32)


def test_activations_by_hand() -> None:
    """One token of one layer of the 7B model, operations one by one: two norms with input in fp32, normalised and scaled
    in bf16 (16·H), q, k, v and attention's output (8·H), its log-sums, and four times 11,008 in bf16."""
    each = 16 * 4096 + 8 * 4096 + 2 * 4 * 11008 + 4 * 32
    assert memory(practice=Practice(compiled=False)).activations == 2048 * 32 * each


def test_masks_and_scores_are_quadratic() -> None:
    flash = memory().activations
    assert memory(practice=Practice(attention="masked")).activations == flash + 2048 * 2048 * (1 + 2 * 32)
    assert memory(practice=Practice(attention="eager")).activations == flash + 32 * 3 * 2 * 2048 * 2048 * 32


def test_the_blocks_keep_weights_up_to_a_limit() -> None:
    """Two layers of width 64, heads of 16: of a query at most 8 × 16 weights a head, which is its block's width, so 128
    tokens keep 128 × 128; k and v are kept as they are, not repeated for every query head."""
    blocks, fused = (Practice(compiled=False, attention=name) for name in ("blocks", "flash"))
    found = memory(MODEL_T, blocks, seq_len=128).activations - memory(MODEL_T, fused, seq_len=128).activations
    weights, mask = 2 * 4 * 128 * 128 * 2, 128 * 128 * 2
    repeated, log_sums = 2 * 2 * 128 * (2 * 64 - 2 * 32), 2 * 4 * 4 * 128
    assert found == weights + mask - repeated - log_sums
    long, half = (memory(practice=blocks, seq_len=tokens).activations / tokens for tokens in (16_384, 8192))
    assert long / half == pytest.approx(1, abs=0.03), "not quadratic but for the mask"


@pytest.mark.parametrize(
    ("stage", "layout", "precision", "rows", "seen_mib"),
    [
        (1, {}, "bf16", 4, 279.5),
        (1, {"checkpoint_every": 1}, "bf16", 4, 212.0),
        (1, {"checkpoint_every": 2}, "bf16", 4, 242.4),
        (1, {}, "bf16", 8, 360.0),
        (2, {}, "bf16", 4, 263.2),
        (2, {"checkpoint_every": 1}, "bf16", 4, 188.9),
        (3, {}, "bf16", 4, 279.5),
        (3, {"checkpoint_every": 1}, "bf16", 4, 212.0),
        (0, {}, "fp32", 4, 297.5),
        (1, {}, "fp32", 2, 295.2),
        (2, {}, "fp32", 4, 337.7),
        (3, {}, "fp32", 2, 295.2),
        (1, {"ranks": 2}, "bf16", 4, 230.6),
        (1, {"ranks": 2, "checkpoint_every": 1}, "bf16", 4, 163.1),
        (2, {"ranks": 2}, "bf16", 4, 198.0),
        (2, {"ranks": 2, "checkpoint_every": 1}, "bf16", 4, 123.7),
        (3, {"ranks": 2}, "bf16", 4, 222.5),
        (1, {"ranks": 2, "tensor": 2}, "bf16", 4, 211.4),
        (1, {"ranks": 2, "sequence": 2}, "bf16", 4, 190.5),
        (1, {"ranks": 2, "pipeline": 2}, "bf16", 4, 163.9),
    ],
)
def test_what_a_tracker_saw(stage: int, layout: dict[str, int], precision: str, rows: int, seen_mib: float) -> None:
    """Peaks of tensors that a tracker of storages counted on CPU ranks (benchmarks/plan.py): 8.5M parameters, rows of 256
    tokens in two documents, two micro-batches."""
    shape = ModelShape(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    setup = Setup(zero_stage=stage, micro_batch=rows, accumulation=2, **layout)
    found = estimate_memory(
        shape,
        setup,
        parameters=parameter_count(shape, 8192),
        vocab_size=8192,
        seq_len=256,
        practice=practice_of(recipe(train={"precision": precision}), setup, on_gpu=False),
        on_gpu=False,
    )
    assert found.allocated / 2**20 == pytest.approx(seen_mib, rel=0.05)


def test_a_tracker_saw_what_zero_3_fetches() -> None:
    """Of 31.6M parameters on two ranks every weight is fetched ahead, and DeepSpeed's buffer stands beside them."""
    shape = ModelShape(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4
    )
    setup = Setup(2, 3, micro_batch=4, accumulation=2, checkpoint_every=1)
    practice = Practice(compiled=False, attention="blocks", reduce_bucket=2_000_000, overlap=False)
    given: dict[str, Any] = {"parameters": parameter_count(shape, 8192), "vocab_size": 8192, "seq_len": 256}
    found = estimate_memory(shape, setup, **given, practice=practice, on_gpu=False)
    assert found.allocated / 2**20 == pytest.approx(414.4, rel=0.02)


def test_the_total_is_at_least_each_part_and_at_most_all() -> None:
    for accumulation in (1, 4):
        found = memory(zero_stage=2, ranks=4, accumulation=accumulation)
        parts = [found.parameters, found.gradients, found.optimizer, found.activations, found.logits, found.buffers]
        assert max(parts) < found.total <= sum(parts)
        assert found.allocated + found.overhead == found.total


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bucket_that_a_recipe_asks_for_is_there_whatever_the_model(stage: int) -> None:
    """On a GPU, also beside an optimizer in the host's memory; the model has 100,000 parameters."""
    for offload in ("none", "cpu"):
        given: dict[str, Any] = {"zero_stage": stage, "offload_optimizer": offload}
        own, asked = (
            memory(MODEL_T, Practice(reduce_bucket=bucket), **given).allocated for bucket in (None, 500_000_000)
        )
        assert own < 0.1e9
        assert 1e9 < asked < 1.1e9


def test_parallel_ranks_hold_less() -> None:
    whole = memory(ranks=8)
    # DeepSpeed's tensor parallelism leaves embeddings, head and the last norm whole.
    ends = 2 * (2 * 32_000 * 4096 + 4096)
    assert memory(ranks=8, tensor=2).parameters == pytest.approx((whole.parameters + ends) / 2, rel=1e-6)
    assert memory(ranks=8, pipeline=2).parameters < 0.55 * whole.parameters
    assert memory(ranks=8, sequence=2).activations == whole.activations / 2
    # A stage of four holds a quarter of the layers for as many micro-batches as there are stages.
    assert memory(ranks=8, pipeline=4, accumulation=8).activations == pytest.approx(whole.activations, rel=1e-6)


def test_the_fullest_rank() -> None:
    """Of three layers and two embeddings: with DeepSpeed's tensor ranks half of the layers and both embeddings, of two
    stages two layers and one embedding."""
    shape = MODEL_T.model_copy(update={"num_hidden_layers": 3})
    size, vocab = widths(shape), 1000
    layer, head, whole = size.layer_weights + 2 * 64, vocab * 64, parameter_count(shape, vocab)
    assert whole == 3 * layer + 2 * head + 64
    assert parameters_of_rank(size, Setup(4), whole, vocab) == whole
    assert parameters_of_rank(size, Setup(4, sequence=2), whole, vocab) == whole
    assert parameters_of_rank(size, Setup(4, tensor=2), whole, vocab) == 1.5 * layer + 2 * head + 64
    assert parameters_of_rank(size, Setup(4, pipeline=2), whole, vocab) == 2 * layer + head


def test_muon_has_one_moment() -> None:
    adam, muon = memory(zero_stage=3), memory(zero_stage=3, practice=Practice(muon=True))
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    assert adam.optimizer - muon.optimizer == pytest.approx(4 * matrices)


def test_offload_moves_the_state_to_the_host() -> None:
    count = parameter_count(LLAMA_7B, 32_000)
    near, far = (memory(ranks=8, zero_stage=3, offload_optimizer=where) for where in ("none", "cpu"))
    assert (near.host, far.optimizer, far.gradients) == (0, 0, 0)
    assert far.host == pytest.approx(16 * count / 8)
    assert far.total < near.total - 11 * count / 8
    assert memory(ranks=8, zero_stage=3, offload_optimizer="cpu", offload_param="cpu").parameters == 0


@settings(max_examples=60, deadline=None)
@given(
    stage=st.integers(1, 3),
    ranks=st.sampled_from([1, 2, 8, 64]),
    rows=st.sampled_from([1, 2, 8]),
    every=st.sampled_from([0, 1, 3]),
    precision=st.sampled_from(["bf16", "fp32"]),
)
def test_more_work_never_needs_less(stage: int, ranks: int, rows: int, every: int, precision: str) -> None:
    practice = Practice(precision=precision)
    base: dict[str, Any] = {"zero_stage": stage, "ranks": ranks, "micro_batch": rows, "checkpoint_every": every}
    found = memory(practice=practice, **base)
    assert memory(practice=practice, **base | {"micro_batch": 2 * rows}).total >= found.total
    assert memory(practice=practice, **base, seq_len=4096).total >= found.total
    assert memory(practice=practice, **base | {"ranks": 2 * ranks}).total <= found.total
    assert memory(practice=practice, **base | {"checkpoint_every": 1}).total <= found.total or every == 1
    if stage < 3:
        assert memory(practice=practice, **base | {"zero_stage": stage + 1}).parameters <= found.parameters


def test_chunks_and_blocks_are_the_models() -> None:
    from arriero.model import attention, loss
    from arriero.planner import memory

    assert (memory._FEWEST_TOKENS, memory._MOST_TOKENS) == (loss._FEWEST_TOKENS, loss._MOST_TOKENS)
    assert memory._BLOCK_QUERIES == attention._BLOCK_QUERIES
    assert memory._KEPT_KEYS_PER_WIDTH == attention._KEPT_KEYS_PER_WIDTH


# -------------------------------------------------------------------------------------------------- the micro-batch of auto


def recipe(**sections: Any) -> Recipe:
    shape = {name: getattr(MODEL_T, name) for name in MODEL_T.model_fields_set}
    value: dict[str, Any] = {
        "output_dir": "unused",
        "model": {"config": {**shape, "vocab_size": 259}, "tokenizer": "unused"},
        "data": {"sources": [{"path": "unused"}]},
        "train": {"max_steps": 1},
    }
    return Recipe.model_validate({name: value.get(name, {}) | sections.get(name, {}) for name in [*value, *sections] if name != "output_dir"} | {"output_dir": "unused"})  # fmt: skip


def auto(
    batch: int, dp: int, seq_len: int, memory_bytes: int | None = None, *, on_gpu: bool = False, rows: Any = "auto"
) -> tuple[int, str]:
    train = {"global_batch_size": batch, "per_device_train_batch_size": rows}
    return auto_micro_batch(
        recipe(train=train, data={"seq_len": seq_len}),
        MODEL_T,
        Setup(dp),
        parameters=parameter_count(MODEL_T, 259),
        vocab_size=259,
        memory_bytes=memory_bytes,
        on_gpu=on_gpu,
    )


@pytest.mark.parametrize(
    ("batch", "dp", "seq_len", "rows"),
    [(16, 2, 256, 8), (64, 1, 1024, 4), (64, 1, 8192, 1), (12, 2, 1024, 3), (14, 2, 1024, 1), (3, 4, 128, 1)],
)
def test_auto_divides_the_share_and_stays_below_4096_tokens_on_a_cpu(
    batch: int, dp: int, seq_len: int, rows: int
) -> None:
    chosen, why = auto(batch, dp, seq_len)
    assert chosen == rows
    assert why.startswith(f"per_device_train_batch_size auto: {rows}, a divisor of the {max(batch // dp, 1)} rows")


def test_auto_takes_more_on_a_gpu_and_what_fits() -> None:
    assert auto(64, 1, 1024, 80 * 2**30, on_gpu=True)[0] == 16
    # 4 rows of 1,024 tokens are planned at so many bytes, of which nine tenths may be filled.
    four = estimate_memory(
        MODEL_T,
        Setup(micro_batch=4, accumulation=16),
        parameters=parameter_count(MODEL_T, 259),
        vocab_size=259,
        seq_len=1024,
    )
    chosen, why = auto(64, 1, 1024, int(four.total / 0.9) + 1, on_gpu=True)
    assert chosen == 4
    assert "planned memory" in why
    chosen, why = auto(64, 1, 1024, 2**29, on_gpu=True)
    assert chosen == 1
    assert "which may not be enough" in why


def test_a_given_micro_batch_is_kept() -> None:
    assert auto(64, 2, 10**4, 1, rows=7) == (7, "")


def test_how_a_recipe_is_computed() -> None:
    def of(layout: Setup = Setup(), *, on_gpu: bool = False, **sections: Any) -> Practice:
        return practice_of(recipe(**sections), layout, on_gpu=on_gpu)

    assert of(on_gpu=True) == ARRIERO
    cpu = of()
    assert (cpu.compiled, cpu.attention, cpu.overlap) == (False, "blocks", False)
    raw = {"zero_optimization": {"reduce_bucket_size": 5e7}}
    assert of(deepspeed=raw, on_gpu=True) == replace(ARRIERO, reduce_bucket=50_000_000)
    fp32 = {"precision": "fp32"}
    assert of(train=fp32).attention == "masked", "the blocks are for bf16"
    assert of(train=fp32, data={"isolate_documents": False}).attention == "flash"
    assert of(model={"attn_implementation": "sdpa"}).attention == "masked"
    assert of(model={"attn_implementation": "eager"}, on_gpu=True).attention == "eager"
    assert of(model={"attn_implementation": "flash_attention_2"}, on_gpu=True).attention == "flash"
    # Stages don't know where documents begin, and ranks that share rows have a mask of their own.
    assert of(Setup(2, pipeline=2), on_gpu=True).attention == "masked"
    assert of(Setup(2, pipeline=2)).attention == "blocks"
    assert of(Setup(2, sequence=2), on_gpu=True).attention == of(Setup(2, sequence=2)).attention == "masked"
