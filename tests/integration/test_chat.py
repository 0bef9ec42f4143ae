"""``arriero chat``: with lines from a script, and at a terminal with Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_model import TEMPLATE, make_model
from workshop import Workshop, arriero

from arriero.inference.batching import Batcher
from arriero.inference.chat import Conversation, render
from arriero.inference.generate import load_for_generation
from arriero.inference.sampling import Sampling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small", template=TEMPLATE)


def chat(model: Path, text: str, *options: object) -> Any:
    command = [sys.executable, "-m", "arriero", "chat", str(model), "--temperature", "0", *map(str, options)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=True)


def test_a_script_talks(model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    lines = [
        "hello", f"/save {first}", "", " /not a command", "/reset", "/system Be brief.", "again", f"/save {second}",
        "/save", "/wrong", f"/save {tmp_path}/no/such", "/help", "/quit", "never said",
    ]  # fmt: skip
    done = chat(model, "\n".join(lines), "--max-new-tokens", 6, "--system", "Speak.")
    one, two = json.loads(first.read_text())["messages"], json.loads(second.read_text())["messages"]
    assert [turn["role"] for turn in one] == ["system", "user", "assistant"]
    assert (one[0]["content"], one[1]["content"]) == ("Speak.", "hello")
    assert [(turn["role"], turn["content"]) for turn in two[:2]] == [("system", "Be brief."), ("user", "again")]
    assert len(two) == 3, "what was said before /reset is forgotten"
    assert done.stdout.count("\n") >= 3
    assert one[2]["content"] in done.stdout
    assert "[cut off: --max-new-tokens]" in done.stderr
    for said in (
        "/save needs a file's name",
        "there is no /wrong; /help lists",
        "No such file",
        "/reset         forget",
    ):
        assert said in done.stderr, said
    assert "never said" not in done.stdout


def test_answers_follow_from_the_whole_conversation(model: Path) -> None:
    """Each answer is the greedy continuation of everything before it, as the template writes it."""
    loaded, tokenizer = load_for_generation(model, device="cpu")
    batcher = Batcher(loaded, tokenizer, max_rows=1)
    said: list[str] = []
    notes: list[str] = []
    conversation = Conversation(batcher, Sampling(max_new_tokens=8, temperature=0), say=said.append, note=notes.append)
    conversation.talk(["one", "two"])
    answers = "".join(said).rstrip("\n").split("\n")
    turns = conversation._turns
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model)
    for end in (1, 3):
        ids = tokenizer(render(tokenizer, turns[:end]), add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            out = theirs.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        assert turns[end]["content"] == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert answers[0] in turns[1]["content"]
    # A conversation that has outgrown the context is said to have, and goes on after /reset.
    notes.clear()
    conversation.talk(["x " * 300, "/reset", "one"])
    assert any("the model's context is" in note for note in notes)
    assert [turn["content"] for turn in conversation._turns[:1]] == ["one"]
    assert len(conversation._turns) == 2
    batcher.close()


def test_a_base_model_says_so_and_completes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "base")
    done = chat(model, f"import os\n/system x\n/save {tmp_path}/said\n", "--max-new-tokens", 5)
    assert "base has no chat template: it wasn't trained to converse" in done.stderr
    assert "no place for a system text" in done.stderr
    saved = json.loads((tmp_path / "said").read_text())
    alone = arriero("generate", model, "--prompt", "import os", "--max-new-tokens", 5, "--temperature", 0, "--json")
    assert saved == {"prompt": "import os", "text": json.loads(alone.stdout)["text"]}


def test_an_unfinished_run_talks_by_its_newest_checkpoint(workshop: Workshop) -> None:
    arriero("train", workshop.recipe("halfway", checkpoint={"save_steps": 1}, train={"max_steps": 2}), "--nproc", 1)
    run = workshop.run("halfway")
    whole = chat(run, "import\n", "--max-new-tokens", 5)
    (run / "final").rename(run / "not-yet")
    half = chat(run, "import\n", "--max-new-tokens", 5)
    assert "has not finished: this is checkpoint-2" in half.stderr
    assert half.stdout == whole.stdout


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    model = make_model(tmp_path / "long", template=TEMPLATE, context=8192)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "arriero", "chat", str(model), "--max-new-tokens", "8000", "--temperature", "0"]
    environment = os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    seen = ""

    def until(text: str, seconds: float = 120) -> None:
        nonlocal seen
        deadline = time.monotonic() + seconds
        while text not in seen:
            assert time.monotonic() < deadline, (text, seen)
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 4096).decode(errors="replace")
        seen = seen.partition(text)[2]

    try:
        until("> ")
        os.write(ours, b"hi\n")  # whose answer has no end
        until("hi\r\n")
        while len(seen) < 60:  # the answer has begun
            seen += os.read(ours, 4096).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        until("[stopped]", 20)
        until("> ")
        assert process.poll() is None
        time.sleep(1)  # the prompt is written a moment before the program listens to it
        process.send_signal(signal.SIGINT)
        until("/quit or Ctrl-D ends")
        os.write(ours, b"/quit\n")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        os.close(ours)
