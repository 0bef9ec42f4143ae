"""A model that DeepSpeed has split over two ranks says what the whole one says, and each rank holds less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_model import make_model
from workshop import arriero

from arriero.inference.generate import generate, load_for_generation, load_model
from arriero.inference.sampling import Sampling


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "small")
    how = ("--max-new-tokens", 60, "--temperature", 0.8, "--top-k", 30, "--seed", 3, "--logprobs", "--json")
    done = arriero("generate", folder, "--prompt", "import os", *how, "--engine", "deepspeed", "--nproc", 2)
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert "LlamaForCausalLM runs by Transformers' own forward, split by DeepSpeed" in done.stderr
    loaded = load_for_generation(folder, device="cpu")
    sampling = Sampling(max_new_tokens=60, temperature=0.8, top_k=30, seed=3)
    whole = generate(*loaded, "import os", sampling, logprobs=True)
    assert whole.tokens == 60
    assert (found["text"], found["token_ids"]) == (whole.text, whole.token_ids)
    assert found["logprobs"] == pytest.approx(whole.logprobs, abs=1e-4)
    all_bytes = sum(part.nbytes for part in load_model(folder, "cpu").parameters())
    assert found["ranks"] == len(found["weights_bytes"]) == 2
    assert max(found["weights_bytes"]) < 0.8 * all_bytes, "the embedding and norms are whole on each"
