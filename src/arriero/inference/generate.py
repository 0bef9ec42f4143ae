"""Text from a Hugging Face folder, by Transformers' own generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arriero.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, by Hugging Face's names; temperature 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Generated:
    """One continuation. finish_reason: ``stop`` (end of text or a stop string) or ``length``."""

    prompt: str
    text: str
    tokens: int
    tokens_per_second: float
    finish_reason: str


def load_for_generation(folder: Path, *, device: str = "auto") -> tuple[Any, Any]:
    """Model and tokenizer of an exported folder, in the folder's precision (bf16 where it is stored in fp32 on a GPU)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no Hugging Face model folder: it has no config.json")
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(where).eval()
    return model, tokenizer


def generate(
    model: Any, tokenizer: Any, prompt: str, sampling: Sampling, *, on_text: Callable[[str], None] | None = None
) -> Generated:
    """Continue one prompt; ``on_text`` gets the text piece by piece as it comes.

    Raises ``UserError`` where the prompt leaves no room in the model's context.
    """
    from transformers import StoppingCriteriaList, StopStringCriteria

    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    if inputs.input_ids.shape[1] == 0:
        raise UserError("the prompt has no tokens and this tokenizer adds none", "Give some text to continue.")
    used, context = inputs.input_ids.shape[1], model.config.max_position_embeddings
    if used + 1 > context:
        raise UserError(f"the prompt has {used} tokens, the model's context is {context}", "Shorten the prompt.")
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    limit = min(sampling.max_new_tokens, context - used)
    options: dict[str, Any] = {
        "max_new_tokens": limit,
        "do_sample": sampling.temperature > 0,
        "repetition_penalty": sampling.repetition_penalty,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        "streamer": _Streamer(tokenizer, on_text) if on_text else None,
    }
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    if sampling.ignore_eos:
        options |= {"min_new_tokens": limit}
    if sampling.stop:
        options["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, list(sampling.stop))])
    start = time.perf_counter()
    with torch.no_grad():
        output = model.generate(**inputs, **options)
    seconds = time.perf_counter() - start
    new = output[0, used:].tolist()
    text = tokenizer.decode(new, skip_special_tokens=True)
    ended = bool(new) and new[-1] in _eos_ids(model, tokenizer)
    for stop in sampling.stop:
        if stop in text:
            text, ended = text[: text.index(stop)], True
    return Generated(prompt, text, len(new), len(new) / max(seconds, 1e-9), "stop" if ended else "length")


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    ids = model.generation_config.eos_token_id
    known = ids if isinstance(ids, list) else [ids]
    return {token for token in [*known, tokenizer.eos_token_id] if token is not None}


class _Streamer:
    """Hands out text as soon as its characters are complete: a token may end inside one."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._ids: list[int] = []
        self._shown = 0
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._ids.extend(value.flatten().tolist())
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if not text.endswith("�"):
            self._on_text(text[self._shown :])
            self._shown = len(text)

    def end(self) -> None:
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        self._on_text(text[self._shown :])
