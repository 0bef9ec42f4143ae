"""OpenAI's requests and answers, as far as they are served: what is sent is checked, what isn't served is refused by name."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from arriero.inference.sampling import Sampling

Positive = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class BadRequest(Exception):
    """A request that can't be answered, and why: an HTTP status, OpenAI's code and the field."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.field = status, code, field

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
        error = {"message": str(self), "type": kind.get(self.status, "invalid_request_error")}
        return {"error": error | {"param": self.field, "code": self.code}}


class StreamOptions(BaseModel):
    """What a stream says besides the text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool = False


class _Shared(BaseModel):
    """What both kinds of requests may hold. Fields of OpenAI's that change nothing here are taken at that value only."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Hugging Face's, beyond OpenAI's.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    # For OpenAI's own accounts: nothing to do.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    def sampling(self, defaults: Sampling, max_new_tokens: int, choice: int) -> Sampling:
        """How one choice is drawn; what the request doesn't say is the server's default."""

        def said(value: Any, default: Any) -> Any:
            return default if value is None else value

        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        seed = said(self.seed, defaults.seed)
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=said(self.temperature, defaults.temperature),
            top_p=said(self.top_p, defaults.top_p),
            top_k=said(self.top_k, defaults.top_k),
            repetition_penalty=said(self.repetition_penalty, defaults.repetition_penalty),
            # Each choice has its own; a generator takes 64 bits.
            seed=None if seed is None else (seed + choice) % 2**63,
            stop=defaults.stop if stop is None else tuple(text for text in stop if text),
            ignore_eos=said(self.ignore_eos, defaults.ignore_eos),
            min_p=said(self.min_p, defaults.min_p),
        )


class CompletionRequest(_Shared):
    """``/v1/completions``: one text or several, as text or as ids."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1)]
    )
    max_tokens: Positive | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(BaseModel):
    """A part of a message's content: text is all that these models read."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(_Shared):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: Literal[False] | None = None


def parse(kind: type[BaseModel], body: bytes) -> Any:
    """The request in a body; ``BadRequest`` with every problem in it."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        if problems[0]["type"] == "json_invalid":
            raise BadRequest(f"the body is no JSON: {problems[0]['ctx']['error']}", code="invalid_json") from None
        # A union reports each of its members; the field is named once.
        said: dict[str, str] = {}
        for problem in problems:
            path = [str(part) for part in problem["loc"]]
            if problem["type"] == "extra_forbidden":
                said.setdefault(".".join(path), "isn't known or isn't served here")
            else:
                said.setdefault(path[0] if path else "body", problem["msg"])
        text = "; ".join(f"{field}: {message}" for field, message in said.items())
        raise BadRequest(text, code="invalid_value", field=next(iter(said))) from None


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def envelope(request_id: str, kind: str, model: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What every answer and every chunk of one has around it."""
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model, "choices": choices, **more}


def choice(number: int, text: str, reason: str | None, *, chat: bool, delta: bool) -> dict[str, Any]:
    """One choice of an answer, or (delta) what came next in it."""
    if not chat:
        return {"index": number, "text": text, "logprobs": None, "finish_reason": reason}
    if delta:
        return {"index": number, "delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": reason}
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": number, "message": message, "logprobs": None, "finish_reason": reason}
