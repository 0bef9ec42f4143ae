"""A LLaMA with random weights and a real tokenizer, for tests of what answers requests: made in a second, no training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTEXT = 192
TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}{% if turn.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system text comes first') }}{% endif %}<|{{ turn.role }}|>{{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(folder: Path, *, template: str | None = None, context: int = CONTEXT) -> Path:
    """Write the model to ``folder``; its logits are spread widely, so that rounding doesn't decide greedy choices."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from arriero.data.tokenizer import train_tokenizer

    root = Path(sysconfig.get_path("stdlib"))
    texts = [(root / name).read_text(encoding="utf-8") for name in ("abc.py", "bisect.py", "copy.py", "heapq.py")]
    train_tokenizer([*texts, "Zwölf Boxkämpfer. 赶骡人在黎明前装好货物。🫏🫏"], 512, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(model: Path, *options: object, log: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``arriero serve`` on a free port, as a person starts it: its address and its process."""
    command = [sys.executable, "-m", "arriero", "serve", str(model), "--port", "0", *map(str, options)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w+", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True, env=environment)
        try:
            deadline = time.monotonic() + 120
            while not (found := re.search(r"at (http://\S+) ", log.read_text(encoding="utf-8"))):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"no server: {log.read_text(encoding='utf-8')}")
                time.sleep(0.05)
            yield found[1], process
        finally:
            process.kill()
            process.wait()


def fetch(url: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """(status, body, headers) of a GET, or of a POST of JSON where there is a body."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)
