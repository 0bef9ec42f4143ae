"""`arriero eval --tasks`: lm-eval in process, on a task of our own, offline; its scores are those of plain PyTorch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from small_model import make_model
from typer.testing import CliRunner

from arriero.cli.main import app
from arriero.data.tokenizer import load_tokenizer
from arriero.errors import UserError

TASK = """\
task: mules
dataset_path: json
dataset_kwargs: {data_files: {test: mules.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
WORDS = ["import", "return", "class", "self", "lambda", "yield", "raise", "assert", "while", "None"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'arriero[eval]' (350 MB)")
    return make_model(tmp_path_factory.mktemp("tasks") / "model")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A folder with a task and its 40 questions, which lies elsewhere than anybody's working directory."""
    folder = tmp_path_factory.mktemp("my-tasks")
    asked = [
        {
            "question": f"def {WORDS[n % 10]}_{n}(",
            "choices": [f" {WORDS[(n + k) % 10]}" for k in (1, 4, 7)],
            "answer": n % 3,
        }
        for n in range(40)
    ]
    (folder / "mules.yaml").write_text(TASK)
    (folder / "mules.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    return folder, asked


def log_likelihood(model, tokenizer, context: str, choice: str) -> float:
    """Of the choice's tokens behind the context's, by one forward pass of plain Transformers."""
    before, whole = (tokenizer.encode(text) for text in (context, context + choice))
    with torch.no_grad():
        rates = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(rates[place - 1, whole[place]]) for place in range(len(before), len(whole)))


def test_a_task_of_one_s_own_is_scored_as_plain_pytorch_does(
    model: Path, questions: tuple[Path, list[dict]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    folder, asked = questions
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval(), load_tokenizer(model)
    right = 0
    for one in asked:
        rates = [log_likelihood(plain, tokenizer, one["question"], choice) for choice in one["choices"]]
        right += rates.index(max(rates)) == one["answer"]
    command = ["eval", str(model), "--tasks", "mules", "--task-folder", str(folder), "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    score = json.loads(done.stdout)["tasks"]["mules"]
    assert score["acc"] == pytest.approx(right / 40)
    assert 0 < right < 40, "a model that is always right or wrong would prove nothing"
    assert score["acc_stderr"] == pytest.approx((right / 40 * (1 - right / 40) / 39) ** 0.5)
    few = CliRunner().invoke(app, [*command[:-1], "--max-rows", "5"], catch_exceptions=False).stdout
    assert re.fullmatch(r"mules: acc (0|1|0\.[2468]), acc_stderr [\d.]+\n", few)
    with pytest.raises(UserError, match=r"there is no task molas in .*my-tasks") as caught:
        CliRunner().invoke(app, [*command[:2], "--tasks", "molas", *command[4:]], catch_exceptions=False)
    assert "Known: mules." in caught.value.remedy


def test_what_a_task_needs_is_said(
    tmp_path: Path, questions: tuple[Path, list[dict]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path  # nothing of it is read before
    (model / "config.json").write_text("{}")
    with pytest.raises(UserError, match="Neither --data nor --tasks"):
        CliRunner().invoke(app, ["eval", str(model)], catch_exceptions=False)
    with pytest.raises(UserError, match="there is no such folder"):
        CliRunner().invoke(
            app, ["eval", str(model), "--tasks", "x", "--task-folder", "nowhere"], catch_exceptions=False
        )
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)  # as if it weren't installed
    with pytest.raises(UserError, match="--tasks needs lm-eval") as caught:
        CliRunner().invoke(
            app, ["eval", str(model), "--tasks", "x", "--task-folder", str(questions[0])], catch_exceptions=False
        )
    assert caught.value.remedy == "pip install 'arriero[eval]'"
