"""Many requests answered by one model at once: rows join and leave the running decode between two steps.

Shapes: B rows that run, W positions in the cache (the longest row; shorter ones are padded on the left), V tokens.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arriero.errors import UserError
from arriero.inference.generate import Healed, Sampling, eos_ids


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


@dataclass(frozen=True)
class Piece:
    """Text that came next. The last piece has a finish_reason: stop, length, cancelled or error."""

    text: str
    tokens: int
    finish_reason: str | None = None


class QueueFull(Exception):
    """No room to wait: try again later."""


class Batcher:
    """One thread that runs a model for every request at hand.

    max_rows: requests that run at once. max_waiting: further ones that may wait for a place.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_rows: int = 16, max_waiting: int = 256) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.context: int = model.config.max_position_embeddings
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self._eos = sorted(eos_ids(model, tokenizer))
        self._changed = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._cache: Any = None  # a DynamicCache: in each layer keys and values, (B, heads, W, head size)
        self._closing = False
        self._encoding = threading.Lock()
        self.ask("a", Sampling())  # a tokenizer's first call changes its settings, which no two threads may do at once
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        return sum(not row.finished for row in self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def ask(
        self,
        prompt: str | list[int],
        sampling: Sampling,
        *,
        special: bool = True,
        presence: float = 0,
        frequency: float = 0,
    ) -> Ask:
        """A prompt as ids. special: whether the tokenizer adds its own (a chat template has written them already).

        Raises ``UserError`` where the prompt is empty, holds an id that the model doesn't have, or leaves no room.
        """
        if isinstance(prompt, list):
            size = self.model.config.vocab_size
            bad = next((token for token in prompt if not 0 <= token < size), None)
            if bad is not None:
                raise UserError(f"token id {bad} is not in the model's vocabulary of {size}")
            ids, allowed = prompt, None
        else:
            with self._encoding:
                healed = Healed(prompt, self.tokenizer)
                ids = list(self.tokenizer(healed.prompt, add_special_tokens=special).input_ids)
                allowed = healed.allowed or None
        if not ids:
            raise UserError("the prompt has no tokens and this tokenizer adds none", "Give some text to continue.")
        if len(ids) + 1 > self.context:
            raise UserError(
                f"the prompt has {len(ids)} tokens, the model's context is {self.context}", "Shorten the prompt."
            )
        return Ask(ids, sampling, allowed, presence, frequency)

    def submit(self, asks: Sequence[Ask], on_piece: Callable[[int, Piece], None]) -> list[Row]:
        """Queue requests, all or none; ``on_piece(number, piece)`` is called in the decoding thread.

        Raises ``QueueFull`` where they don't fit.
        """
        with self._changed:
            room = self.max_waiting + max(0, self.max_rows - self.running) - len(self._waiting)
            if self._closing or len(asks) > room:
                raise QueueFull
            rows = [Row(number, ask, self, on_piece) for number, ask in enumerate(asks)]
            self._waiting.extend(rows)
            self._changed.notify()
        return rows

    def close(self, *, finish: bool = True) -> None:
        """Stop the thread, after what is queued has been answered or, without finish, at the next step."""
        with self._changed:
            self._closing = True
            if not finish:
                for row in [*self._waiting, *self._rows]:
                    row.cancel()
            self._changed.notify()
        self._thread.join()

    # ------------------------------------------------------------------------------------------- the decoding thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._rows or self._closing):
                    self._changed.wait()
                if not (self._waiting or self._rows):
                    return
                new = [self._waiting.popleft() for _ in range(min(len(self._waiting), self.max_rows - len(self._rows)))]
            for row in new:
                self._guarded([row], partial(self._join, row))
            if self._rows:
                self._guarded(self._rows, self._step)
            self._leave()

    def _guarded(self, rows: list[Row], work: Callable[[], None]) -> None:
        """A fault ends the requests that it touched and not the server."""
        try:
            with torch.inference_mode():
                work()
        except Exception:
            logging.getLogger(__name__).exception("%d requests failed", len(rows))
            for row in rows:
                row.end("error")

    def _join(self, row: Row) -> None:
        """Run a prompt, choose its first token, and put its keys and values beside the others'."""
        from transformers import DynamicCache

        if row.cancelled:
            row.end("cancelled")
            return
        cache = DynamicCache()
        ids = torch.tensor([row.ask.ids], device=self.model.device)
        # By place: Transformers has renamed the fourth argument, past_key_values, to cache.
        logits = self.model(ids, None, None, cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        self._next(row, logits.float())
        if row.finished:
            return
        row.cached = len(row.ask.ids)
        if not self._rows:
            self._cache = cache
        else:
            for layer, mine in zip(self._cache.layers, cache.layers, strict=True):
                layer.keys, layer.values = _beside(layer.keys, mine.keys), _beside(layer.values, mine.values)
        self._rows.append(row)

    def _step(self) -> None:
        """One more token for every row."""
        device = self.model.device
        lengths = torch.tensor([row.cached for row in self._rows], device=device)  # (B)
        width = self._cache.get_seq_length()
        mask = None
        if len({row.cached for row in self._rows}) > 1:
            # (B, W + 1): a row's own positions are the last ones.
            mask = (torch.arange(width + 1, device=device) >= (width - lengths)[:, None]).long()
        last = torch.tensor([[row.ids[-1]] for row in self._rows], device=device)  # (B, 1)
        logits = self.model(last, mask, lengths[:, None], self._cache, use_cache=True).logits[:, -1]  # (B, V)
        for row, scores in zip(self._rows, logits.float(), strict=True):
            row.cached += 1
            if row.cancelled:
                row.end("cancelled")
            else:
                # By itself: one row's numbers mustn't end the others.
                self._guarded([row], partial(self._next, row, scores))

    def _next(self, row: Row, scores: Tensor) -> None:
        row.take(choose(scores, row, self._eos), self._eos)

    def _leave(self) -> None:
        """Take finished rows, and columns that nobody uses any more, out of the cache."""
        kept = [number for number, row in enumerate(self._rows) if not row.finished]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[number] for number in kept]
        if not kept:
            self._cache = None
            return
        width = max(row.cached for row in self._rows)
        index = torch.tensor(kept, device=self.model.device)
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[index, :, -width:], layer.values[index, :, -width:]


def _beside(rows: Tensor, row: Tensor) -> Tensor:
    """(B, heads, W, size) and (1, heads, W', size), padded on the left → (B + 1, heads, the wider, size)."""
    width = max(rows.shape[-2], row.shape[-2])
    padded = [torch.nn.functional.pad(one, (0, 0, width - one.shape[-2], 0)) for one in (rows, row)]
    return torch.cat(padded)


@dataclass
class Row:
    """A request on its way: what it has, and what it has said."""

    number: int
    ask: Ask
    batcher: Batcher
    on_piece: Callable[[int, Piece], None]
    ids: list[int] = field(default_factory=list)
    cached: int = 0
    finished: bool = False
    cancelled: bool = False

    def __post_init__(self) -> None:
        self._text = _Text(self.batcher.tokenizer, self.ask)
        self._limit = min(self.ask.sampling.max_new_tokens, self.batcher.context - len(self.ask.ids))
        self.random = torch.Generator(self.batcher.model.device)
        if self.ask.sampling.seed is None:
            self.random.seed()
        else:
            self.random.manual_seed(self.ask.sampling.seed)

    def cancel(self) -> None:
        """Nobody wants the rest: the row leaves before the next token."""
        self.cancelled = True

    def take(self, token: int, eos: list[int]) -> None:
        """One more token: hand out its text, and see whether it was the last."""
        self.ids.append(token)
        ended = token in eos and not self.ask.sampling.ignore_eos
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


class _Text:
    """Text of tokens as they come: whole characters only, and nothing that may turn out to be a stop string."""

    def __init__(self, tokenizer: Any, ask: Ask) -> None:
        self._tokenizer, self._stop = tokenizer, ask.sampling.stop
        # Some tokenizers drop a text's first space, so the prompt's end is decoded with what follows it.
        self._ids = ask.ids[-4:]
        self._start, self._read = 0, len(self._ids)
        self._held = ""
        self._drop_space = ask.first_allowed is not None

    def add(self, token: int) -> tuple[str, bool]:
        """(what may be shown, whether a stop string ended it)"""
        self._ids.append(token)
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


def choose(logits: Tensor, row: Row, eos: list[int]) -> int:
    """The next token from logits (V) in fp32, in the order of Transformers' processors: penalties, temperature, top-k, top-p."""
    ask, sampling = row.ask, row.ask.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*ask.ids, *row.ids}), device=logits.device)
        scores = logits[seen]
        logits[seen] = torch.where(
            scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty
        )
    if row.ids and (ask.presence_penalty or ask.frequency_penalty):
        tokens, counts = torch.unique(torch.tensor(row.ids, device=logits.device), return_counts=True)
        logits[tokens] -= ask.presence_penalty + ask.frequency_penalty * counts
    if sampling.ignore_eos:
        logits[eos] = float("-inf")
    if ask.first_allowed and not row.ids:
        kept = torch.full_like(logits, float("-inf"))
        kept[ask.first_allowed] = logits[ask.first_allowed]
        logits = kept
    if sampling.temperature < 1e-5:  # dividing by less than that overflows
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits[logits < logits.topk(sampling.top_k).values[-1]] = float("-inf")
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # The first is always kept; the rest while what comes before them is less than top_p.
        ordered[(ordered.cumsum(-1) - ordered) >= max(sampling.top_p, 1e-9)] = 0
        return int(order[torch.multinomial(ordered, 1, generator=row.random)])
    return int(torch.multinomial(probabilities, 1, generator=row.random))
