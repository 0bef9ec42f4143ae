"""Which ranks share a model, and what is refused: no process, no model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.config.schema import Recipe
from arriero.errors import UserError
from arriero.planner.layouts import Layout, choose_layout

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def recipe(**sections: Any) -> Recipe:
    value: dict[str, Any] = {
        "output_dir": "run",
        "model": {"config": SHAPE, "tokenizer": "t"},
        "data": {"sources": [{"path": "d"}], "seq_len": 96},
        "train": {"max_steps": 1},
    }
    for section, keys in sections.items():
        value[section] = value.get(section, {}) | keys
    return Recipe.model_validate(value)


def refused(ranks: int, **sections: Any) -> str:
    one = recipe(**sections)
    with pytest.raises(UserError) as caught:
        choose_layout(one, one.model.config, ranks)
    assert caught.value.exit_code == 2
    return str(caught.value)


def chosen(ranks: int, **parallel: int) -> Layout:
    one = recipe(parallel=parallel)
    assert one.model.config is not None
    return choose_layout(one, one.model.config, ranks)


def test_ranks_by_axis() -> None:
    assert chosen(4) == Layout(4)
    assert chosen(4, tensor_parallel_size=2) == Layout(4, tensor=2)
    tensor, sequence, pipeline = Layout(4, tensor=2), Layout(4, sequence=2), Layout(4, pipeline=2)
    assert [tensor.dp_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [tensor.place(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [pipeline.dp_rank(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [pipeline.place(rank) for rank in range(4)] == [0, 0, 1, 1]
    # ZeRO splits over the ranks that hold the same: with shared rows these are all.
    assert [sequence.holder(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert [tensor.holder(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert (tensor.holders, sequence.holders, pipeline.holders) == (2, 4, 2)


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 8))
def test_every_layer_is_on_one_stage(layers: int, stages: int, dp: int) -> None:
    layout = Layout(stages * dp, pipeline=stages)
    parts = [layout.stage_layers(layers, stage) for stage in range(stages)]
    assert [number for part in parts for number in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    places = {(layout.dp_rank(rank), layout.place(rank)) for rank in range(layout.ranks)}
    assert len(places) == layout.ranks


@pytest.mark.parametrize(
    ("ranks", "sections", "words"),
    [
        (3, {"parallel": {"tensor_parallel_size": 2}}, "nearest: 2 or 4 ranks"),
        (1, {"parallel": {"pipeline_parallel_size": 2}}, "1 rank can't hold whole replicas of 2 ranks"),
        (8, {"parallel": {"tensor_parallel_size": 8}}, "8 doesn't divide num_key_value_heads 4; nearest: 4"),
        (3, {"parallel": {"tensor_parallel_size": 3}}, "num_attention_heads 8, num_key_value_heads 4, intermediate"),
        (4, {"parallel": {"sequence_parallel_size": 4}, "data": {"seq_len": 90}}, "data.seq_len 90; nearest: 3"),
        (4, {"parallel": {"pipeline_parallel_size": 4}}, "the model has only 3 layers"),
        (4, {"parallel": {"tensor_parallel_size": 2, "sequence_parallel_size": 2}}, "nearest: tensor_parallel_size 2"),
        (2, {"parallel": {"pipeline_parallel_size": 2, "zero_stage": 2}}, "nearest: zero_stage 1"),
        (2, {"parallel": {"pipeline_parallel_size": 2, "zero_stage": 3}}, "nearest: zero_stage 1"),
        (2, {"parallel": {"pipeline_parallel_size": 2}, "train": {"precision": "fp16"}}, "nearest: bf16"),
        (
            2,
            {
                "parallel": {"tensor_parallel_size": 2, "zero_stage": 3},
                "optim": {"optimizer": "muon", "max_grad_norm": 0},
            },
            "nearest: adamw",
        ),
        (
            2,
            {"parallel": {"tensor_parallel_size": 2, "offload_optimizer": "cpu"}},
            "nearest: offload none",
        ),
        (2, {"parallel": {"sequence_parallel_size": 2}, "model": {"attn_implementation": "eager"}}, "nearest: sdpa"),
    ],
)
def test_what_is_refused_names_the_nearest(ranks: int, sections: dict[str, Any], words: str) -> None:
    assert words in refused(ranks, **sections)


def test_all_problems_come_at_once() -> None:
    text = refused(5, parallel={"tensor_parallel_size": 3, "pipeline_parallel_size": 2, "zero_stage": 2})
    assert text.count("nearest") == 4
