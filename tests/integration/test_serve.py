"""``arriero serve`` as clients see it: OpenAI's own package, curl, 64 clients at once, and a signal."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from small_model import CONTEXT, TEMPLATE, fetch, make_model, serving

from arriero.inference.chat import render
from arriero.inference.generate import generate, load_for_generation
from arriero.inference.sampling import Sampling

KEY = "a key of this test"
LIMITS = ("--max-running", 8, "--max-waiting", 80, "--max-request-bytes", 60_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small", template=TEMPLATE)


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(model, "--api-key", KEY, *LIMITS, log=tmp_path_factory.mktemp("log") / "serve.log") as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)


def post(url: str, body: Any, path: str = "/v1/completions", key: str = KEY) -> tuple[int, dict[str, Any]]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer, _ = fetch(url + path, raw, Authorization=f"Bearer {key}")
    return status, json.loads(answer)


def test_the_openai_client(client: openai.OpenAI, model: Path) -> None:
    assert [one.id for one in client.models.list().data] == ["small"]
    assert client.models.retrieve("small").owned_by == "arriero"
    loaded, tokenizer = load_for_generation(model, device="cpu")

    expected = generate(loaded, tokenizer, "import os", Sampling(max_new_tokens=24, temperature=0))
    done = client.completions.create(model="small", prompt="import os", max_tokens=24, temperature=0)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (expected.text, "length")
    assert done.usage is not None
    assert done.usage.completion_tokens == 24
    assert done.usage.prompt_tokens == len(tokenizer("import os").input_ids)
    stream = client.completions.create(
        model="small",
        prompt="import os",
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text
    assert len(chunks) > 10
    assert chunks[-1].usage == done.usage

    turns: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    rendered = render(tokenizer, [turns[0], {"role": "user", "content": "x"}])
    chat = client.chat.completions.create(model="small", messages=turns, max_completion_tokens=16, temperature=0)
    assert chat.choices[0].message.role == "assistant"
    assert chat.usage is not None
    # The template's own beginning of text, and no second one.
    assert chat.usage.prompt_tokens == len(tokenizer(rendered, add_special_tokens=False).input_ids)
    streamed = client.chat.completions.create(
        model="small", messages=turns, max_completion_tokens=16, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in streamed]
    assert "".join(deltas) == chat.choices[0].message.content

    several = client.completions.create(model="small", prompt=["a", "b"], n=2, max_tokens=6, seed=3)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    assert len({one.text for one in several.choices}) == 4
    again = client.completions.create(model="small", prompt=["a", "b"], n=2, max_tokens=6, seed=3)
    assert [one.text for one in again.choices] == [one.text for one in several.choices]
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4' here, but small"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


REFUSED: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", b"{nope", 400, "the body is no JSON"),
    ("/v1/completions", b"[1]", 400, "object"),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    ("/v1/completions", b"\xff\xfe", 400, "the body is no JSON"),
    ("/v1/completions", {}, 400, "prompt: Field required"),
    ("/v1/completions", {"prompt": ""} | {"prompt": []}, 400, "prompt"),
    (
        "/v1/completions",
        {"prompt": "x", "max_tokens": -5},
        400,
        "max_tokens: Input should be greater than or equal to 1",
    ),
    ("/v1/completions", {"prompt": "x", "max_tokens": "7"}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": True}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": CONTEXT}, 400, f"the model's context is {CONTEXT}"),
    ("/v1/completions", {"prompt": "x " * CONTEXT}, 400, f"the model's context is {CONTEXT}"),
    ("/v1/completions", {"prompt": [1, -4]}, 400, "token id -4"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "top_p": 7}, 400, "top_p"),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n: "),
    ("/v1/completions", {"prompt": "x", "logprobs": 3}, 400, "logprobs: isn't known or isn't served here"),
    ("/v1/completions", {"prompt": "x", "model": 3}, 400, "model"),
    ("/v1/completions", {"prompt": ["x"] * 60, "n": 2}, 400, "120 choices"),
    ("/v1/completions", {"prompt": "x" * 70_000}, 413, "larger than 60,000 bytes"),
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "no model 'other'"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": "x"}, 400, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]},
        400,
        "a system text comes first",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": []}, 400, "tools"),
    ("/v1/embeddings", {"input": "x"}, 404, "Not Found"),
    ("/v1/models", {}, 405, "Method Not Allowed"),
]


def test_bad_requests_are_refused_by_name(url: str) -> None:
    for path, body, expected, said in REFUSED:
        status, answer = post(url, body, path)
        assert status == expected, (path, body, answer)
        assert said in answer["error"]["message"], (path, body, answer)
        assert answer["error"]["type"] == "invalid_request_error"
    assert post(url, {"prompt": "x", "max_tokens": 2})[0] == 200, "and the server is none the worse"
    for key in ("", "wrong", KEY + "x"):
        status, answer = post(url, {"prompt": "x"}, key=key)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_curl(url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl isn't installed")

    def curl(*arguments: str) -> str:
        done = subprocess.run(
            ["curl", "-sS", "--max-time", "60", *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout

    assert json.loads(curl(f"{url}/health")) == {"status": "ok"}
    sent = ("-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json")
    answer = curl("-N", *sent, "-d", '{"prompt": "def", "max_tokens": 5, "stream": true}', f"{url}/v1/completions")
    events = answer.strip().split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] in {"length", "stop"}


def test_64_clients_at_once_and_none_lost(url: str) -> None:
    """Every third streams; their lengths differ; each gets what it gets alone."""

    def one(number: int) -> tuple[int, str, float]:
        start = time.perf_counter()
        body = {"prompt": f"x = {number % 8}", "max_tokens": 8 + number % 5, "temperature": 0}
        if number % 3:
            status, answer = post(url, body)
            text = answer["choices"][0]["text"] if status == 200 else ""
        else:
            raw = json.dumps(body | {"stream": True}).encode()
            status, streamed, _ = fetch(f"{url}/v1/completions", raw, Authorization=f"Bearer {KEY}")
            events = streamed.decode().strip().split("\n\n")
            assert events[-1] == "data: [DONE]"
            text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1])
        return status, text, time.perf_counter() - start

    alone = {number: one(number)[1] for number in range(40)}
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(one, range(64)))
    assert [status for status, _, _ in answers] == [200] * 64
    assert [text for _, text, _ in answers] == [alone[number % 40] for number in range(64)]
    seconds = sorted(answer[2] for answer in answers)
    print(f"64 clients: median {seconds[32]:.2f} s, slowest {seconds[-1]:.2f} s")


def test_too_many_are_told_to_come_back(url: str) -> None:
    body = json.dumps({"prompt": "x", "n": 44, "max_tokens": 150, "ignore_eos": True}).encode()

    def one(_: int) -> tuple[int, dict[str, str]]:
        status, _, headers = fetch(f"{url}/v1/completions", body, Authorization=f"Bearer {KEY}")
        return status, headers

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(one, range(4)))  # 176 choices for 88 places
    assert {status for status, _ in answers} == {200, 429}
    assert all(headers["retry-after"] == "1" for status, headers in answers if status == 429)


def test_metrics(url: str) -> None:
    status, text, headers = fetch(f"{url}/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
    before = float(values["arriero_generated_tokens_total"])
    assert post(url, {"prompt": "x", "max_tokens": 7, "ignore_eos": True})[0] == 200
    after = dict(line.rsplit(" ", 1) for line in fetch(f"{url}/metrics")[1].decode().splitlines() if line[0] != "#")
    assert float(after["arriero_generated_tokens_total"]) == before + 7
    done = 'arriero_requests_total{path="/v1/completions",status="200"}'
    assert int(after[done]) == int(values[done]) + 1
    assert after['arriero_requests_waiting{model="small"}'] == "0"
    assert int(after['arriero_request_seconds_bucket{le="+Inf"}']) == int(after["arriero_request_seconds_count"])


def test_a_client_that_goes_away_frees_its_place(url: str, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="small", prompt="x", max_tokens=150, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 20
    while b'arriero_requests_running{model="small"} 0' not in fetch(f"{url}/metrics")[1]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_sigterm_finishes_what_has_begun(tmp_path: Path) -> None:
    # Long enough that all four are seen at work: 1,500 tokens take two seconds on an idle machine.
    model = make_model(tmp_path / "long", context=2048)
    options = ("--temperature", 0, "--max-new-tokens", 9, "--ignore-eos")
    with serving(model, *options, log=tmp_path / "log") as (url, process):
        plain = json.loads(fetch(f"{url}/v1/completions", b'{"prompt": "x"}')[1])
        same = json.loads(fetch(f"{url}/v1/completions", b'{"prompt": "x", "temperature": 1e-9}')[1])
        assert plain["usage"]["completion_tokens"] == 9
        assert plain["choices"][0]["text"] == same["choices"][0]["text"]
        body = json.dumps({"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
        answers: list[bytes] = []
        clients = [
            threading.Thread(target=lambda: answers.append(fetch(f"{url}/v1/completions", body)[1])) for _ in range(4)
        ]
        for one in clients:
            one.start()
        deadline = time.monotonic() + 30
        while b'running{model="long"} 4' not in fetch(f"{url}/metrics")[1]:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        for one in clients:
            one.join()
        assert process.wait(timeout=60) == 0
    assert [answer.count(b"\ndata: [DONE]") for answer in answers] == [1] * 4
    assert (tmp_path / "log").read_text().endswith("stopped\n")


def test_usage_errors_before_anything_is_loaded(model: Path, url: str, tmp_path: Path) -> None:
    def fails(*arguments: object) -> str:
        command = [sys.executable, "-m", "arriero", "serve", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        return done.stderr

    assert "is neither a run folder nor a Hugging Face model folder" in fails(tmp_path)
    assert f"can't listen on 127.0.0.1:{url.rpartition(':')[2]}" in fails(model, "--port", url.rpartition(":")[2])
    assert "expected arriero or vllm" in fails(model, "--engine", "other")


def test_vllm_is_started_on_the_exported_folder(model: Path, tmp_path: Path) -> None:
    """vLLM pins another PyTorch, so it can't be installed beside the suite: a stand-in prints what it is started with."""
    command = [sys.executable, "-m", "arriero", "serve", str(model), "--engine", "vllm", "--port", "8001"]
    if importlib.util.find_spec("vllm") is None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2
        assert "pip install vllm" in done.stderr
    server = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text("import sys; print(*sys.argv[1:])", encoding="utf-8")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": paths})
    assert done.stdout.split() == [
        "--model", str(model), "--served-model-name", "small", "--host", "127.0.0.1", "--port", "8001",
    ]  # fmt: skip
