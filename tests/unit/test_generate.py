"""Many prompts are continued as each would be alone, in their order; what is said of them is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import CONTEXT, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from arriero.cli.main import app
from arriero.errors import UserError
from arriero.inference.generate import generate, generate_many, load_for_generation
from arriero.inference.sampling import Sampling

PROMPTS = ["import os", "def ", "class A:\n    def f(self):\n        return 1", "x", "for i in range(10):\n", "赶骡人"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    return load_for_generation(folder, device="cpu")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=30, temperature=0),
        Sampling(max_new_tokens=30, temperature=0, repetition_penalty=1.4, ignore_eos=True),
        Sampling(max_new_tokens=20, temperature=0.8, top_p=0.9, top_k=40, min_p=0.02, seed=4),
    ],
    ids=["greedy", "penalty", "drawn"],
)
def test_together_is_as_alone(loaded: tuple[Any, Any], sampling: Sampling) -> None:
    alone = [generate(*loaded, prompt, sampling) for prompt in PROMPTS]
    for batch_size in (1, 4, 16):
        together = list(generate_many(*loaded, PROMPTS, sampling, batch_size=batch_size))
        assert [one.prompt for one in together] == PROMPTS
        for one, other in zip(together, alone, strict=True):
            assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
    assert len({one.text for one in alone}) == len(PROMPTS)


def test_log_probabilities_are_the_models(folder: Path, loaded: tuple[Any, Any]) -> None:
    """Of each token given what came before, whatever temperature and penalties chose it."""
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    sampling = Sampling(max_new_tokens=12, temperature=0.7, seed=2, repetition_penalty=1.2)
    for done in generate_many(*loaded, PROMPTS, sampling, logprobs=True):
        prompt = done.prompt.removesuffix(" ")
        ids = loaded[1](prompt).input_ids
        assert done.prompt_tokens == len(ids)
        with torch.no_grad():
            wanted = theirs(torch.tensor([[*ids, *done.token_ids]])).logits[0].log_softmax(-1)
        expected = [float(wanted[len(ids) - 1 + n, token]) for n, token in enumerate(done.token_ids)]
        assert done.logprobs == pytest.approx(expected, abs=1e-4)


def test_stop_strings_end_each_row_by_itself(loaded: tuple[Any, Any]) -> None:
    free = list(generate_many(*loaded, PROMPTS, Sampling(max_new_tokens=30, temperature=0)))
    stop = free[2].text[8:11]
    ended = list(generate_many(*loaded, PROMPTS, Sampling(max_new_tokens=30, temperature=0, stop=(stop,))))
    for one, other in zip(ended, free, strict=True):
        if stop in other.text:
            assert (one.text, one.finish_reason) == (other.text[: other.text.index(stop)], "stop")
            assert one.tokens < 30
        else:
            assert one.text == other.text
    assert ended[2].finish_reason == "stop"


def test_min_p_leaves_out_what_is_far_less_likely(loaded: tuple[Any, Any]) -> None:
    """At 1 only the likeliest is left, at any temperature."""
    greedy = generate(*loaded, "x", Sampling(max_new_tokens=20, temperature=0))
    drawn = generate(*loaded, "x", Sampling(max_new_tokens=20, temperature=3.0, min_p=1.0, seed=1))
    assert drawn.token_ids == greedy.token_ids
    assert generate(*loaded, "x", Sampling(max_new_tokens=20, temperature=3.0, seed=1)).token_ids != greedy.token_ids


def test_ids_that_no_token_stands_for_are_never_generated(loaded: tuple[Any, Any]) -> None:
    decoder, tokenizer = loaded
    free = generate(decoder, tokenizer, "x", Sampling(max_new_tokens=8, temperature=0))
    decoder.generation_config.suppress_tokens = free.token_ids[:2]
    try:
        done = generate(decoder, tokenizer, "x", Sampling(max_new_tokens=8, temperature=0))
    finally:
        decoder.generation_config.suppress_tokens = None
    assert not set(done.token_ids) & set(free.token_ids[:2])


def test_a_prompt_that_cannot_be_continued_is_named(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(UserError, match=f"^prompt 2 of 3: the prompt has .* tokens, the model's context is {CONTEXT}"):
        generate_many(*loaded, ["a", "x " * 300, "b"], Sampling())


def run(*arguments: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    assert done.exit_code == code or isinstance(done.exception, UserError), done.output
    return done


def test_a_file_of_prompts(folder: Path, loaded: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n\n" for text in PROMPTS))
    (tmp_path / "prompts.txt").write_text("import os\nx\n")
    greedy = ("--max-new-tokens", 9, "--temperature", 0)
    expected = [generate(*loaded, text, Sampling(max_new_tokens=9, temperature=0)).text for text in PROMPTS]
    run(folder, "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "out.jsonl", "--logprobs", *greedy)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["text"] for one in found] == expected
    assert all(len(one["logprobs"]) == len(one["token_ids"]) == one["tokens"] for one in found)
    lines = run(folder, "--prompts", tmp_path / "prompts.txt", *greedy).stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines if line.startswith("{")] == [expected[0], expected[3]]
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
    failed = run(folder, "--prompts", tmp_path / "bad.jsonl", code=2)
    assert "bad.jsonl, line 2: expected a JSON object" in str(failed.exception)
    assert "give either --prompt or --prompts" in str(run(folder, code=2).exception)


def test_the_tokenizer_is_loaded_as_training_loads_it(folder: Path, tmp_path: Path) -> None:
    """A Qwen 2 folder with a tokenizer of its own: the class that its type implies would read its text in another way."""
    import shutil

    other = tmp_path / "qwen"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "qwen2", "architectures": None}))
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "Qwen2Tokenizer"}))
    text = "import os, 'Zwo\u0308lf'"  # that class composes the letter, here it is as it was trained on
    wanted = PreTrainedTokenizerFast.from_pretrained(folder)(text).input_ids
    assert AutoTokenizer.from_pretrained(other)(text).input_ids != wanted
    assert load_for_generation(other, device="cpu")[1](text).input_ids == wanted
