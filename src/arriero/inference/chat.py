"""A conversation in the terminal, or with a script that writes lines."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from arriero.errors import UserError
from arriero.inference.batching import Batcher
from arriero.inference.rows import Piece
from arriero.inference.sampling import Sampling

HELP = """/system TEXT   what the model is told before the conversation; without TEXT: nothing
/reset         forget the conversation; what /system said stays
/save FILE     write the conversation, one JSON object a line
/help          this
/quit          end (or Ctrl-D); Ctrl-C stops an answer
A line that begins with a space is never a command."""


def has_template(tokenizer: Any) -> bool:
    """Whether the model was given a form of conversation."""
    return bool(tokenizer.chat_template)


def render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The conversation as the model was trained to read it, its special tokens included; the assistant's turn is next.

    Raises ``UserError`` where the template refuses the turns, as some do with a system text.
    """
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise UserError(f"the model's chat template refuses this conversation: {error}") from None
    return text


class Conversation:
    """What was said, and the next answer. Without a chat template each line is a text to continue, alone."""

    def __init__(
        self, batcher: Batcher, sampling: Sampling, *, say: Callable[[str], None], note: Callable[[str], None]
    ) -> None:
        """say: gets the model's text. note: gets a line about the program."""
        self._batcher, self._sampling, self._say, self._note = batcher, sampling, say, note
        self.chat = has_template(batcher.tokenizer)
        self._system = ""
        self._turns: list[dict[str, str]] = []

    def talk(self, lines: Iterable[str]) -> None:
        """Answer line by line until they end or one is /quit; a problem is said and the conversation goes on."""
        for line in lines:
            if line.strip() == "/quit":
                return
            try:
                if line.startswith("/"):
                    self._command(*line.strip().partition(" ")[::2])
                elif line.strip():
                    self._answer(line.strip() if self.chat else line)
            except (UserError, OSError) as error:
                self._note(f"error: {error}")

    def _command(self, name: str, rest: str) -> None:
        rest = rest.strip()
        if name == "/help":
            self._note(HELP)
        elif name == "/reset":
            self._turns = []
            self._note("forgotten")
        elif name == "/system":
            if not self.chat:
                raise UserError("this model has no chat template, so there is no place for a system text")
            self._system = rest
            self._note("from the next answer on" if rest else "no system text")
        elif name == "/save":
            if not rest:
                raise UserError("/save needs a file's name")
            path = Path(rest).expanduser()
            turns = [{"messages": self._messages()}] if self.chat else self._turns
            path.write_text("".join(json.dumps(turn, ensure_ascii=False) + "\n" for turn in turns), encoding="utf-8")
            self._note(f"saved to {path}")
        else:
            raise UserError(f"there is no {name}; /help lists what there is", "Begin with a space to send it as text.")

    def _messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self._system}] if self._system else []), *self._turns]

    def _answer(self, text: str) -> None:
        """Stream the answer; an interrupted one stays in the conversation as far as it came."""
        if self.chat:
            messages = [*self._messages(), {"role": "user", "content": text}]
            prompt = render(self._batcher.tokenizer, messages)
        else:
            prompt = text
        ask = self._batcher.ask(prompt, self._sampling, special=not self.chat)
        pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        (row,) = self._batcher.submit([ask], lambda _, piece: pieces.put(piece))
        said = ""
        piece = Piece("", 0)
        while not piece.finish_reason:
            try:
                piece = pieces.get()
                said += piece.text
                self._say(piece.text)
            except KeyboardInterrupt:
                row.cancel()
        self._say("\n")
        if piece.finish_reason == "error":
            raise UserError("the model failed on this; its error is above")
        if piece.finish_reason == "cancelled":
            self._note("[stopped]")
        elif piece.finish_reason == "length":
            at_end = len(ask.ids) + piece.tokens >= self._batcher.context
            why = (
                f"the model's context of {self._batcher.context} tokens is full: /reset"
                if at_end
                else "--max-new-tokens"
            )
            self._note(f"[cut off: {why}]")
        if self.chat:
            self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
        else:
            self._turns.append({"prompt": text, "text": said})
