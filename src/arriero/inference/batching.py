"""Many requests answered by one model at once, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from arriero.inference.decode import Decoder
from arriero.inference.rows import Piece, Row, Rows
from arriero.inference.sampling import Ask, Sampling, Vocabulary


class QueueFull(Exception):
    """No room to wait: try again later."""


class Batcher:
    """One thread that runs a model for every request at hand.

    max_rows: requests that run at once. max_waiting: further ones that may wait for a place.
    """

    def __init__(self, decoder: Decoder, tokenizer: Any, *, max_rows: int = 16, max_waiting: int = 256) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer, decoder.config, decoder.generation_config)
        self.context = self.vocabulary.context
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._rows = Rows(decoder, self.vocabulary, self._guarded)
        self._closing = False
        self._encoding = threading.Lock()
        self.ask("a", Sampling())  # a tokenizer's first call changes its settings, which no two threads may do at once
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        return sum(not row.finished for row in self._rows.running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._rows.running or self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def ask(self, prompt: str | list[int], sampling: Sampling, **how: Any) -> Ask:
        """A prompt as ids, by ``Vocabulary.ask``, from any thread."""
        with self._encoding:
            return self.vocabulary.ask(prompt, sampling, **how)

    def submit(self, asks: Sequence[Ask], on_piece: Callable[[int, Piece], None]) -> list[Row]:
        """Queue requests, all or none; ``on_piece(number, piece)`` is called in the decoding thread.

        Raises ``QueueFull`` where they don't fit.
        """
        with self._changed:
            room = self.max_waiting + max(0, self.max_rows - self.running) - len(self._waiting)
            if self._closing or len(asks) > room:
                raise QueueFull
            device = self._rows.decoder.device
            rows = [Row(number, ask, self.vocabulary, on_piece, device) for number, ask in enumerate(asks)]
            self._waiting.extend(rows)
            self._changed.notify()
        return rows

    def close(self, *, finish: bool = True) -> None:
        """Stop the thread, after what is queued has been answered or, without finish, at the next step."""
        with self._changed:
            self._closing = True
            if not finish:
                for row in [*self._waiting, *self._rows.running]:
                    row.cancel()
            self._changed.notify()
        self._thread.join()

    # ------------------------------------------------------------------------------------------- the decoding thread

    def _run(self) -> None:
        rows = self._rows
        while True:
            with self._changed:
                while not (self._waiting or rows.running or self._closing):
                    self._changed.wait()
                if not (self._waiting or rows.running):
                    return
                room = self.max_rows - len(rows.running)
                new = [self._waiting.popleft() for _ in range(min(len(self._waiting), room))]
            for row in new:
                if row.cancelled:
                    row.end("cancelled")
                else:
                    # One by one: beside a long prompt the others' padding would take as long.
                    self._guarded([row], partial(rows.join, [row]))
            if rows.running:
                self._guarded(rows.running, rows.step)
            rows.leave()

    def _guarded(self, rows: Sequence[Row], work: Callable[[], None]) -> None:
        """A fault ends the requests that it touched and not the server."""
        try:
            work()
        except Exception:
            logging.getLogger(__name__).exception("%d requests failed", len(rows))
            for row in rows:
                row.end("error")
