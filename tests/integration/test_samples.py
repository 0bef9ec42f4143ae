"""Prompts are continued while a run trains, by all ranks together, into files and TensorBoard."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from workshop import Workshop, arriero

from arriero.config.load import load_recipe
from arriero.data.tokenizer import load_tokenizer
from arriero.errors import UserError
from arriero.samples import prompt_ids

PROMPTS = ["import os\n", "def ", "class"]


def test_prompts_are_continued_while_a_run_trains(workshop: Workshop) -> None:
    """That no number of the run is another for it is shown in tests/parity/test_layouts.py."""
    sections = {"parallel": {"zero_stage": 3}, "train": {"max_steps": 3}, "checkpoint": {"save_steps": 3}}
    optim, log = {"learning_rate": 3e-3, "warmup_steps": 1}, {"sample_prompts": PROMPTS, "sample_steps": 2}
    arriero("train", workshop.recipe("said", optim=optim, log=log, **sections), "--nproc", 2)
    run = workshop.run("said")
    files = sorted(file.name for file in (run / "samples").iterdir())
    assert files == ["step-000002.jsonl", "step-000003.jsonl"]
    texts = {name: [json.loads(line) for line in (run / "samples" / name).read_text().splitlines()] for name in files}
    assert [one["prompt"] for one in texts[files[0]]] == PROMPTS
    assert {one["tokens"] for one in texts[files[0]]} <= set(range(1, 49))
    assert texts[files[0]] != texts[files[1]], "the model has learnt"
    _is_what_the_export_says(run, texts[files[1]])
    _is_in_tensorboard(run, texts)


def _is_what_the_export_says(run: Any, last: list[dict[str, Any]]) -> None:
    """The last step's continuations are the exported model's greedy ones."""
    from arriero.inference.generate import generate, load_for_generation
    from arriero.inference.sampling import Sampling

    loaded = load_for_generation(run / "final", device="cpu")
    done = generate(*loaded, "import os\n", Sampling(max_new_tokens=48, temperature=0))
    assert (done.text, done.tokens) == (last[0]["text"], last[0]["tokens"])


def _is_in_tensorboard(run: Any, texts: dict[str, list[dict[str, Any]]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tb"))
    events.Reload()
    shown = events.Tensors("samples/2")
    assert [event.step for event in shown] == [2, 3]
    assert shown[-1].tensor_proto.string_val[0].decode() == f"**class**{texts['step-000003.jsonl'][2]['text']}"


def test_a_prompt_that_fills_a_row_is_refused(workshop: Workshop) -> None:
    recipe = load_recipe(workshop.recipe("too-long", log={"sample_prompts": ["x", "a b " * 100]}))
    inputs: Any = SimpleNamespace(recipe=recipe, tokenizer=load_tokenizer(workshop.tokenizer))
    with pytest.raises(
        UserError, match=r"sample_prompts.1: 202 tokens; expected at least 1 and fewer than data.seq_len 128"
    ):
        prompt_ids(inputs)
