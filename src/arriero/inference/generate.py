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
    from transformers import LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

    healed = Healed(prompt, tokenizer)
    inputs = tokenizer(healed.prompt, return_tensors="pt").to(model.device)
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
        "streamer": _Streamer(on_text, healed) if on_text else None,
        "logits_processor": LogitsProcessorList([healed] if healed.allowed else []),
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
    text = healed.text(new)
    ended = bool(new) and new[-1] in eos_ids(model, tokenizer)
    for stop in sampling.stop:
        if stop in text:
            text, ended = text[: text.index(stop)], True
    return Generated(prompt, text, len(new), len(new) / max(seconds, 1e-9), "stop" if ended else "length")


def eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end a text, by the model and by its tokenizer."""
    ids = model.generation_config.eos_token_id
    known = ids if isinstance(ids, list) else [ids]
    return {token for token in [*known, tokenizer.eos_token_id] if token is not None}


class Healed:
    """A prompt that ends in a space, continued as it was trained on.

    Tokenizers join a space with the word that follows it, so a space left alone at the prompt's end is a token that
    training hardly saw, and what follows it is bad. The space is left out and the first new token has to begin with it.
    """

    def __init__(self, prompt: str, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.prompt, self.allowed, self._length = prompt, [], 0
        if prompt.endswith(" ") and not prompt[:-1].endswith((" ", "\n")) and prompt.strip():
            tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
            self.allowed = [n for n, token in enumerate(tokens) if token and token[0] in "Ġ▁" and len(token) > 1]
        if self.allowed:
            self.prompt = prompt[:-1]
            self._length = len(tokenizer(self.prompt).input_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Before the first new token: nothing but tokens that begin with a space."""
        if input_ids.shape[1] != self._length:
            return scores
        kept = torch.full_like(scores, float("-inf"))
        kept[:, self.allowed] = scores[:, self.allowed]
        return kept

    def text(self, new: list[int]) -> str:
        """What follows the prompt as it was given."""
        text: str = self._tokenizer.decode(new, skip_special_tokens=True)
        return text.removeprefix(" ") if self.allowed else text


class _Streamer:
    """Hands out text as soon as its characters are complete: a token may end inside one."""

    def __init__(self, on_text: Callable[[str], None], healed: Healed) -> None:
        self._on_text = on_text
        self._text = healed.text
        self._ids: list[int] = []
        self._shown = 0
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._ids.extend(value.flatten().tolist())
        text = self._text(self._ids)
        if not text.endswith("�"):
            self._on_text(text[self._shown :])
            self._shown = len(text)

    def end(self) -> None:
        text = self._text(self._ids)
        self._on_text(text[self._shown :])
