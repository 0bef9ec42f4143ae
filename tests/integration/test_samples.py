"""Prompts are continued while a run trains, by all ranks together, and not one of its numbers is another for it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from workshop import Workshop, arriero, metrics

from arriero.config.load import load_recipe
from arriero.data.tokenizer import load_tokenizer
from arriero.errors import UserError
from arriero.samples import prompt_ids

PROMPTS = ["import os\n", "def ", "class"]
LAYOUTS: dict[str, Any] = {"zero-3": {"zero_stage": 3}, "tensor": {"tensor_parallel_size": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_training_number_is_moved(workshop: Workshop, layout: str) -> None:
    sections = {"parallel": LAYOUTS[layout], "train": {"max_steps": 3}, "checkpoint": {"save_steps": 3}}
    optim = {"learning_rate": 3e-3, "warmup_steps": 1}
    log = {"sample_prompts": PROMPTS, "sample_steps": 2}
    arriero("train", workshop.recipe(f"quiet-{layout}", optim=optim, **sections), "--nproc", 2)
    arriero("train", workshop.recipe(f"said-{layout}", optim=optim, log=log, **sections), "--nproc", 2)
    quiet, said = workshop.run(f"quiet-{layout}"), workshop.run(f"said-{layout}")
    before, after = ([row for row in metrics(run) if "event" not in row] for run in (quiet, said))
    numbers = ("step", "loss", "grad_norm", "learning_rate", "position", "tokens", "target_tokens")
    assert len(before) == len(after) >= 2
    for one, other in zip(before, after, strict=True):
        assert [one[key] for key in numbers] == [other[key] for key in numbers]
    states = sorted(file.name for file in (quiet / "checkpoint-3").glob("*state-*.safetensors"))
    assert states[0] == "random_state-00000.safetensors"
    assert states[-1].startswith("state-")
    for name in states:
        mine, theirs = (load_file(run / "checkpoint-3" / name) for run in (quiet, said))
        # numpy's and Python's own generators begin otherwise in each process, and training draws from neither.
        keys = ["torch"] if name.startswith("random") else mine
        assert all(torch.equal(mine[key], theirs[key]) for key in keys), name
    assert not (quiet / "samples").exists()
    files = sorted(file.name for file in (said / "samples").iterdir())
    assert files == ["step-000002.jsonl", "step-000003.jsonl"]
    texts = {name: [json.loads(line) for line in (said / "samples" / name).read_text().splitlines()] for name in files}
    assert [one["prompt"] for one in texts[files[0]]] == PROMPTS
    assert {one["tokens"] for one in texts[files[0]]} <= set(range(1, 49))
    assert texts[files[0]] != texts[files[1]], "the model has learnt"
    if layout == "zero-3":
        _is_what_the_export_says(said, texts[files[1]])
        _is_in_tensorboard(said, texts)


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
