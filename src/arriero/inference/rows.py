"""Rows that one model continues at the same time: they join and leave between two steps.

Shapes: B rows that run, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from arriero.inference.decode import Cache, Decoder
from arriero.inference.sampling import Ask, Vocabulary, choose


@dataclass(frozen=True)
class Piece:
    """Text that came next. The last piece has a finish_reason: stop, length, cancelled or error."""

    text: str
    tokens: int
    finish_reason: str | None = None


class Rows:
    """The rows that run, and their keys and values.

    guard: called with rows and the work on them; what it does with an error is its own affair.
    """

    def __init__(
        self,
        decoder: Decoder,
        vocabulary: Vocabulary,
        guard: Callable[[list[Row], Callable[[], None]], None] = lambda rows, work: work(),
    ) -> None:
        self.decoder, self.vocabulary = decoder, vocabulary
        self.running: list[Row] = []
        self._cache = Cache([])
        self._guard = guard

    @torch.inference_mode()
    def join(self, rows: Sequence[Row]) -> None:
        """Run the rows' prompts together, choose their first tokens, and let those that go on run with the others."""
        width = max(len(row.ask.ids) for row in rows)
        cache = Cache([width - len(row.ask.ids) for row in rows])
        ids = torch.tensor([[0] * start + row.ask.ids for start, row in zip(cache.starts, rows, strict=True)])
        self._choose(rows, self.decoder(cache, ids.to(self.decoder.device)))
        going_on = [number for number, row in enumerate(rows) if not row.finished]
        if not going_on:
            return
        cache.keep(going_on)
        if self.running:
            self._cache.beside(cache)
        else:
            self._cache = cache
        self.running = [*self.running, *(rows[number] for number in going_on)]

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every row."""
        last = torch.tensor([[row.ids[-1]] for row in self.running], device=self.decoder.device)
        self._choose(self.running, self.decoder(self._cache, last))

    def leave(self) -> None:
        """Take finished rows out."""
        kept = [number for number, row in enumerate(self.running) if not row.finished]
        if len(kept) < len(self.running):
            self.running = [self.running[number] for number in kept]
            self._cache.keep(kept)

    def _choose(self, rows: Sequence[Row], logits: Tensor) -> None:
        """The next token of each row from logits (B, V)."""
        wanted = [row for row in rows if row.ask.logprobs]
        chances = logits.log_softmax(-1) if wanted else None
        if self.vocabulary.unused:
            logits[:, self.vocabulary.unused] = float("-inf")
        best = logits.argmax(-1).tolist() if any(row.greedy for row in rows) else []
        for number, row in enumerate(rows):
            if row.cancelled:
                row.end("cancelled")
            elif row.greedy and not (row.ask.sampling.ignore_eos and best[number] in self.vocabulary.eos):
                row.take(best[number], chances[number] if chances is not None else None)
            else:
                # By itself: one row's numbers mustn't end the others.
                self._guard(
                    [row], partial(self._draw, row, logits[number], None if chances is None else chances[number])
                )

    def _draw(self, row: Row, logits: Tensor, chances: Tensor | None) -> None:
        row.take(choose(logits, row.ask, row.ids, self.vocabulary.eos, row.random), chances)


@dataclass
class Row:
    """A request on its way: what it has, and what it has said.

    streamed: whether somebody wants text before the end. logprobs: of what it has said, where they were asked for.
    """

    number: int
    ask: Ask
    vocabulary: Vocabulary
    on_piece: Callable[[int, Piece], None]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    streamed: bool = True
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    cancelled: bool = False

    def __post_init__(self) -> None:
        self._text = Text(self.vocabulary.tokenizer, self.ask, streamed=self.streamed)
        self._limit = min(self.ask.sampling.max_new_tokens, self.vocabulary.context - len(self.ask.ids))
        self._plain = self.ask.sampling.plainly_greedy and not (self.ask.presence_penalty or self.ask.frequency_penalty)

    @cached_property
    def random(self) -> torch.Generator:
        """Its own random numbers, made when they are needed: five kilobytes, and prompts may be many."""
        made = torch.Generator(self.device)
        if self.ask.sampling.seed is None:
            made.seed()
        else:
            made.manual_seed(self.ask.sampling.seed)
        return made

    @property
    def greedy(self) -> bool:
        """Whether its next token is simply the likeliest."""
        return self._plain and bool(self.ids or not self.ask.first_allowed)

    def cancel(self) -> None:
        """Nobody wants the rest: the row leaves before the next token."""
        self.cancelled = True

    def take(self, token: int, chances: Tensor | None = None) -> None:
        """One more token: hand out its text, and see whether it was the last. chances: log-probabilities of all, (V)."""
        self.ids.append(token)
        if self.ask.logprobs and chances is not None:
            self.logprobs.append(float(chances[token]))
        ended = token in self.vocabulary.eos and not self.ask.sampling.ignore_eos
        text, stopped = ("", False) if ended else self._text.add(token)
        if ended or stopped:
            self.end("stop", text)
        elif len(self.ids) >= self._limit:
            self.end("length", text)
        elif text:
            self.on_piece(self.number, Piece(text, len(self.ids)))

    def end(self, reason: str, text: str = "") -> None:
        """The last piece: what was held back unless a stop string ended it."""
        if not self.finished:
            self.finished = True
            self.on_piece(self.number, Piece(text + self._text.rest(), len(self.ids), reason))


class Text:
    """Text of tokens as they come: whole characters only, and nothing that may turn out to be a stop string."""

    def __init__(self, tokenizer: Any, ask: Ask, *, streamed: bool = True) -> None:
        self._tokenizer, self._stop = tokenizer, ask.sampling.stop
        self._waits = not streamed and not self._stop  # two calls of a tokenizer for each token take 0.1 ms
        # Some tokenizers drop a text's first space, so the prompt's end is decoded with what follows it.
        self._ids = ask.ids[-4:]
        self._start, self._read = 0, len(self._ids)
        self._held = ""
        self._drop_space = ask.first_allowed is not None

    def add(self, token: int) -> tuple[str, bool]:
        """(what may be shown, whether a stop string ended it)"""
        self._ids.append(token)
        if self._waits:
            return "", False
        self._held += self._decoded(final=False)
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            text, self._held, self._read = self._held[: min(found)], "", len(self._ids)
            return text, True
        kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return text, False

    def rest(self) -> str:
        text, self._held = self._held + self._decoded(final=True), ""
        return text

    def _decoded(self, *, final: bool) -> str:
        if self._read == len(self._ids):
            return ""
        before = self._tokenizer.decode(self._ids[self._start : self._read], skip_special_tokens=True)
        whole = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)
        # Four bytes at most make a character; more tokens than that will not complete it.
        if whole.endswith("�") and not final and len(self._ids) - self._read < 4:
            return ""
        self._start, self._read = self._read, len(self._ids)
        text: str = whole[len(before) :]
        if self._drop_space and text:
            text, self._drop_space = text.removeprefix(" "), False
        return text


def _overlap(text: str, stop: str) -> int:
    """How many of the text's last characters begin the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
