"""How the next token is chosen: what may be asked for, what a vocabulary allows, and the choice itself.

Shapes: V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    min_p: float = 0.0

    @property
    def plainly_greedy(self) -> bool:
        """Whether the most likely token is taken, whatever came before."""
        return self.temperature < 1e-5 and self.repetition_penalty == 1  # dividing by less than that overflows


@dataclass(frozen=True)
class Ask:
    """One prompt as ids, and how it is to be continued.

    first_allowed: the only ids that may come first, or None for any. The two penalties are OpenAI's: subtracted from a
    token's logit once, and once for each time that it was generated.
    """

    ids: list[int]
    sampling: Sampling
    first_allowed: list[int] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: bool = False


class Vocabulary:
    """A tokenizer, and what its model knows of ids."""

    def __init__(self, tokenizer: Any, config: Any, generation_config: Any) -> None:
        self.tokenizer = tokenizer
        self.size: int = config.vocab_size
        self.context: int = config.max_position_embeddings
        ids = generation_config.eos_token_id
        known = {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}
        self.eos: list[int] = sorted(known)
        self.unused: list[int] = generation_config.suppress_tokens or []
        self._spaced: list[int] | None = None

    def ask(
        self,
        prompt: str | list[int],
        sampling: Sampling,
        *,
        special: bool = True,
        presence: float = 0,
        frequency: float = 0,
        logprobs: bool = False,
    ) -> Ask:
        """A prompt as ids. special: whether the tokenizer adds its own (a chat template has written them already).

        Tokenizers join a space with the word that follows it, so a space left alone at the prompt's end is a token that
        training hardly saw, and what follows it is bad. It is left out and the first new token has to begin with it.
        Raises ``UserError`` where the prompt is empty, holds an id that the model doesn't have, or leaves no room.
        """
        allowed = None
        if isinstance(prompt, list):
            bad = next((token for token in prompt if not 0 <= token < self.size), None)
            if bad is not None:
                raise UserError(f"token id {bad} is not in the model's vocabulary of {self.size}")
            ids = prompt
        else:
            if prompt.endswith(" ") and not prompt[:-1].endswith((" ", "\n")) and prompt.strip():
                allowed = self._beginning_with_space() or None
            text = prompt[:-1] if allowed else prompt
            ids = list(self.tokenizer(text, add_special_tokens=special).input_ids)
        if not ids:
            raise UserError("the prompt has no tokens and this tokenizer adds none", "Give some text to continue.")
        if len(ids) + 1 > self.context:
            raise UserError(
                f"the prompt has {len(ids)} tokens, the model's context is {self.context}", "Shorten the prompt."
            )
        return Ask(ids, sampling, allowed, presence, frequency, logprobs)

    def _beginning_with_space(self) -> list[int]:
        if self._spaced is None:
            tokens = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
            self._spaced = [n for n, token in enumerate(tokens) if token and token[0] in "Ġ▁" and len(token) > 1]
        return self._spaced


def choose(logits: Tensor, ask: Ask, said: Sequence[int], eos: list[int], random: torch.Generator) -> int:
    """The next token from logits (V) in fp32, which are used up, after the prompt and what was ``said``.

    In the order of Transformers' processors: penalties, temperature, top-k, top-p, min-p.
    """
    sampling = ask.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*ask.ids, *said}), device=logits.device)
        scores = logits[seen]
        logits[seen] = torch.where(
            scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty
        )
    if said and (ask.presence_penalty or ask.frequency_penalty):
        tokens, counts = torch.unique(torch.tensor(said, device=logits.device), return_counts=True)
        logits[tokens] -= ask.presence_penalty + ask.frequency_penalty * counts
    if sampling.ignore_eos:
        logits[eos] = float("-inf")
    if ask.first_allowed and not said:
        kept = torch.full_like(logits, float("-inf"))
        kept[ask.first_allowed] = logits[ask.first_allowed]
        logits = kept
    if sampling.temperature < 1e-5:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits[logits < logits.topk(sampling.top_k).values[-1]] = float("-inf")
    probabilities = logits.softmax(-1)
    if sampling.top_p == 1 and sampling.min_p == 0:
        return int(torch.multinomial(probabilities, 1, generator=random))
    ordered, order = probabilities.sort(descending=True)
    # The first is always kept; the rest while what comes before them is less than top_p.
    left_out = (ordered.cumsum(-1) - ordered) >= max(sampling.top_p, 1e-9)
    ordered[left_out | (ordered < sampling.min_p * ordered[0])] = 0
    return int(order[torch.multinomial(ordered, 1, generator=random)])
