"""Text from a Hugging Face folder: one prompt, or many at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arriero.data.tokenizer import load_tokenizer
from arriero.errors import UserError
from arriero.inference.decode import Decoder
from arriero.inference.rows import Piece, Row, Rows
from arriero.inference.sampling import Ask, Sampling, Vocabulary


@dataclass(frozen=True)
class Generated:
    """One continuation. finish_reason: ``stop`` (end of text or a stop string) or ``length``."""

    prompt: str
    text: str
    tokens: int
    tokens_per_second: float
    """Its tokens over the seconds from the start of its prompt's forward pass to its last token; loading isn't in it."""
    finish_reason: str
    prompt_tokens: int
    token_ids: list[int]
    logprobs: list[float] | None
    """Of each token: the natural logarithm of the model's own probability, before temperature and the like."""


def load_for_generation(folder: Path, *, device: str = "auto", quantize: str | None = None) -> tuple[Decoder, Any]:
    """Model and tokenizer of an exported folder, in the folder's precision, or its matrices in ``quantize``'s."""
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return Decoder(load_model(folder, where), quantize=quantize), load_tokenizer_of(folder)


def load_model(folder: Path, device: str) -> Any:
    """Transformers' model of a folder, in the folder's precision."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no Hugging Face model folder: it has no config.json")
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()


def load_tokenizer_of(folder: Path) -> Any:
    """As training loads it: the class that a model's type implies splits some folders' texts in another way."""
    return load_tokenizer(folder, needs_end=False)


def generate(
    decoder: Decoder,
    tokenizer: Any,
    prompt: str,
    sampling: Sampling,
    *,
    logprobs: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Generated:
    """Continue one prompt; ``on_text`` gets the text piece by piece as it comes.

    Raises ``UserError`` where the prompt leaves no room in the model's context.
    """
    (done,) = generate_many(decoder, tokenizer, [prompt], sampling, logprobs=logprobs, on_text=on_text)
    return done


def generate_many(
    decoder: Decoder,
    tokenizer: Any,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    batch_size: int = 8,
    logprobs: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Iterator[Generated]:
    """Continue the prompts, ``batch_size`` at the same time and those of like length together; given out in their order.

    Each gets what it would get alone, by its own random numbers from the same seed. ``on_text``: gets the pieces of all.
    Raises ``UserError``, before anything runs, where a prompt can't be continued.
    """
    vocabulary = Vocabulary(tokenizer, decoder.config, decoder.generation_config)
    asks = [_asked(vocabulary, number, prompts, sampling, logprobs) for number in range(len(prompts))]
    return _run(decoder, vocabulary, prompts, asks, batch_size, on_text)


def _asked(vocabulary: Vocabulary, number: int, prompts: Sequence[str], sampling: Sampling, logprobs: bool) -> Ask:
    try:
        return vocabulary.ask(prompts[number], sampling, logprobs=logprobs)
    except UserError as error:
        if len(prompts) == 1:
            raise
        raise UserError(f"prompt {number + 1} of {len(prompts)}: {error.problem}", error.remedy) from None


def _run(
    decoder: Decoder,
    vocabulary: Vocabulary,
    prompts: Sequence[str],
    asks: Sequence[Ask],
    batch_size: int,
    on_text: Callable[[str], None] | None,
) -> Iterator[Generated]:
    done: dict[int, Generated] = {}
    began: dict[int, float] = {}
    texts = [""] * len(asks)

    def hear(number: int, piece: Piece) -> None:
        texts[number] += piece.text
        if on_text is not None:
            on_text(piece.text)
        if piece.finish_reason:
            row = rows[number]
            speed = piece.tokens / (time.perf_counter() - began[number])
            done[number] = Generated(
                prompts[number], texts[number], piece.tokens, speed, piece.finish_reason, len(row.ask.ids), row.ids,
                row.logprobs if row.ask.logprobs else None,
            )  # fmt: skip

    streamed = on_text is not None
    rows = [Row(n, ask, vocabulary, hear, decoder.device, streamed=streamed) for n, ask in enumerate(asks)]
    # The longest first: what doesn't fit into memory fails at once.
    waiting = deque(sorted(rows, key=lambda row: -len(row.ask.ids)))
    running, given = Rows(decoder, vocabulary), 0
    while waiting or running.running:
        if room := min(len(waiting), batch_size - len(running.running)):
            joining = [waiting.popleft() for _ in range(room)]
            began |= dict.fromkeys((row.number for row in joining), time.perf_counter())
            running.join(joining)
        if running.running:
            running.step()
            running.leave()
        while given in done:
            yield done.pop(given)
            given += 1
