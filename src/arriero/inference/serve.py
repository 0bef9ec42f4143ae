"""The server: OpenAI's API and one page, over HTTP, from one process.

Not Transformers' own: in 5.24 it takes ``temperature`` and stays greedy, answers wrong types and negative numbers with
500, generates past the model's context, lets anybody unload the model at ``/reset``, and runs requests one after another
(docs/serve.md has the measurements).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from arriero.errors import UserError
from arriero.inference.batching import Batcher, QueueFull
from arriero.inference.chat import has_template, render
from arriero.inference.generate import load_for_generation
from arriero.inference.measured import Measured
from arriero.inference.protocol import BadRequest, ChatRequest, CompletionRequest, choice, envelope, parse, usage
from arriero.inference.rows import Piece, Row
from arriero.inference.sampling import Ask, Sampling

_LOADED = 3  # models in memory: one more than the page compares
_BODY_S = 30  # a client that takes longer to send its request holds a connection for nothing
_STOP_S = 60  # after SIGTERM, what runs has this long to finish


@dataclass(frozen=True)
class Limits:
    """What a server takes on: choices that run at once and that wait, and bytes of one request's body."""

    max_running: int = 16
    max_waiting: int = 256
    max_request_bytes: int = 1 << 20


@dataclass(frozen=True)
class Defaults:
    """What a request gets that doesn't say. max_new_tokens None: 16 for a completion as at OpenAI, a chat what there is room for."""

    sampling: Sampling
    max_new_tokens: int | None = None


class Models:
    """The models of one server, each loaded when it is first asked for; the first is there from the start.

    folders: for each name a function that gives (and, for a checkpoint, first writes) the Hugging Face folder.
    """

    def __init__(
        self,
        folders: dict[str, Callable[[], Path]],
        limits: Limits,
        *,
        alias: str | None = None,
        quantize: str | None = None,
    ) -> None:
        self._folders, self._limits, self._quantize = folders, limits, quantize
        self.default = next(iter(folders))
        self._alias = alias
        self.loaded: dict[str, Batcher] = {}
        self._lock = asyncio.Lock()
        first = self._load(self.default)
        self.loaded[self.default] = first
        self.names = list(folders)
        self.context, self.chat = first.context, has_template(first.tokenizer)

    def _load(self, name: str) -> Batcher:
        decoder, tokenizer = load_for_generation(self._folders[name](), quantize=self._quantize)
        if decoder.note:
            print(f"{name}: {decoder.note}", file=sys.stderr)
        return Batcher(decoder, tokenizer, max_rows=self._limits.max_running, max_waiting=self._limits.max_waiting)

    async def get(self, asked: str | None) -> tuple[str, Batcher]:
        """The model of that name, or the first; ``BadRequest`` 404 where there is none."""
        name = self.default if asked is None or asked == self._alias else asked
        if name not in self._folders:
            raise BadRequest(
                f"there is no model {name!r} here, but {', '.join(self._folders)}",
                status=404,
                code="model_not_found",
                field="model",
            )
        if name not in self.loaded:
            await self._bring(name)
        # The most recently used comes last.
        self.loaded[name] = self.loaded.pop(name)
        return name, self.loaded[name]

    async def _bring(self, name: str) -> None:
        """Load a model, one at a time, and let the one go that was idle for longest; others answer meanwhile."""
        async with self._lock:
            if name in self.loaded:
                return
            try:
                new = await run_in_threadpool(self._load, name)
            except UserError as error:
                raise BadRequest(f"{name} can't be loaded: {error}", status=500) from None
            self.loaded[name] = new
            idle = [one for one, batcher in self.loaded.items() if not batcher.busy and one not in {self.default, name}]
            if len(self.loaded) > _LOADED and idle:
                await run_in_threadpool(self.loaded.pop(idle[0]).close)

    def close(self, *, finish: bool) -> None:
        for batcher in self.loaded.values():
            batcher.close(finish=finish)


def build_app(models: Models, limits: Limits, defaults: Defaults, *, api_key: str | None = None) -> Any:
    """The ASGI application: routes, errors in OpenAI's form, the key, and the counts for ``/metrics``."""
    measured = Measured()

    async def completions(request: Request) -> Response:
        wanted = parse(CompletionRequest, await _body(request, limits.max_request_bytes))
        name, batcher = await models.get(wanted.model)
        prompts = wanted.prompts()
        _check_number(len(prompts) * (wanted.n or 1), batcher)

        def asks() -> list[Ask]:
            usual = defaults.max_new_tokens or 16
            return [ask for one in prompts for ask in _asks(wanted, one, wanted.max_tokens, usual, batcher, defaults)]

        return await _answer(request, wanted, await run_in_threadpool(asks), name, batcher, measured)

    async def chat(request: Request) -> Response:
        wanted = parse(ChatRequest, await _body(request, limits.max_request_bytes))
        name, batcher = await models.get(wanted.model)
        if not has_template(batcher.tokenizer):
            raise BadRequest(
                f"{name} has no chat template, so it can't converse: use /v1/completions", field="messages"
            )
        _check_number(wanted.n or 1, batcher)

        def asks() -> list[Ask]:
            text = render(batcher.tokenizer, [turn.plain() for turn in wanted.messages])
            most, usual = wanted.max_completion_tokens or wanted.max_tokens, defaults.max_new_tokens
            return _asks(wanted, text, most, usual or batcher.context, batcher, defaults, special=False)

        return await _answer(request, wanted, await run_in_threadpool(asks), name, batcher, measured)

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name, models) for name in models.names]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in models.names:
            raise BadRequest(f"there is no model {name!r} here", status=404, code="model_not_found", field="model")
        return JSONResponse(_model(name, models))

    async def health(request: Request) -> Response:
        alive = all(batcher.alive for batcher in models.loaded.values())
        return JSONResponse({"status": "ok" if alive else "failed"}, status_code=200 if alive else 503)

    async def metrics(request: Request) -> Response:
        running = {name: (batcher.running, batcher.waiting) for name, batcher in models.loaded.items()}
        return PlainTextResponse(measured.text(running), media_type="text/plain; version=0.0.4; charset=utf-8")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(lambda: models.close(finish=False))

    routes = [
        Route("/", _page()),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        BadRequest: _refuse,
        UserError: _refuse,
        HTTPException: _refuse,
        QueueFull: _refuse,
        Exception: _refuse,
    }
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    return measured.around(_guarded(app, api_key), {route.path for route in routes})


# --------------------------------------------------------------------------------------------------- from request to answer


async def _body(request: Request, most: int) -> bytes:
    """The request's body, read no further than is allowed."""
    too_large = BadRequest(f"the request is larger than {most:,} bytes", status=413, code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise BadRequest(f"the request took longer than {_BODY_S} s to arrive", status=408) from None
    return bytes(body)


def _check_number(choices: int, batcher: Batcher) -> None:
    if choices > batcher.max_rows + batcher.max_waiting:
        raise BadRequest(f"{choices} choices in one request are more than this server ever takes on")


def _asks(
    wanted: Any,
    prompt: str | list[int],
    most: int | None,
    usual: int,
    batcher: Batcher,
    defaults: Defaults,
    *,
    special: bool = True,
) -> list[Ask]:
    """What one prompt asks of the model: n times the same, each with its own seed.

    most: tokens as the request says. usual: where it doesn't, as far as there is room.
    """
    first = batcher.ask(
        prompt,
        defaults.sampling,
        special=special,
        presence=wanted.presence_penalty or 0.0,
        frequency=wanted.frequency_penalty or 0.0,
    )
    room = batcher.context - len(first.ids)
    if most is not None and most > room:
        raise BadRequest(
            f"the prompt has {len(first.ids)} tokens, so max_tokens can be {room} at most and not {most}: the model's "
            f"context is {batcher.context}",
            code="context_length_exceeded",
            field="max_tokens",
        )
    tokens = most or min(usual, room)
    return [replace(first, sampling=wanted.sampling(defaults.sampling, tokens, n)) for n in range(wanted.n or 1)]


async def _answer(
    request: Request, wanted: Any, asks: list[Ask], name: str, batcher: Batcher, measured: Measured
) -> Response:
    """Queue the asks and hand their text out, streamed or whole; a client that goes away takes its rows with it."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

    def hand_over(number: int, piece: Piece) -> None:
        loop.call_soon_threadsafe(pieces.put_nowait, (number, piece))

    rows = batcher.submit(asks, hand_over)
    chat = isinstance(wanted, ChatRequest)
    prompt_tokens = sum(len(ask.ids) for ask in asks[:: wanted.n or 1])
    kind = ("chat.completion" if chat else "text_completion") + (".chunk" if chat and wanted.stream else "")
    frame = (("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex, kind, name)
    taken = measured.request(prompt_tokens)
    if wanted.stream:
        options = wanted.stream_options
        text = _events(pieces, rows, frame, chat, prompt_tokens, bool(options and options.include_usage), taken)
        return StreamingResponse(text, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    texts: list[str] = [""] * len(rows)
    reasons: list[str] = [""] * len(rows)

    async def whole() -> None:
        async for number, piece in _until_finished(pieces, rows, taken):
            texts[number] += piece.text
            reasons[number] = piece.finish_reason or ""

    answering, leaving = asyncio.create_task(whole()), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=499)  # nobody reads it
        answering.result()
    finally:
        leaving.cancel()
        answering.cancel()
        for row in rows:
            row.cancel()
    if "error" in reasons:
        raise BadRequest("the model failed on this request; the server's log says how", status=500)
    choices = [choice(n, text, reasons[n], chat=chat, delta=False) for n, text in enumerate(texts)]
    total = usage(prompt_tokens, sum(len(row.ids) for row in rows))
    return JSONResponse(envelope(*frame, choices, usage=total))


async def _events(
    pieces: asyncio.Queue[tuple[int, Piece]],
    rows: list[Row],
    frame: tuple[str, str, str],
    chat: bool,
    prompt_tokens: int,
    with_usage: bool,
    taken: Any,
) -> AsyncIterator[str]:
    """Server-sent events, as OpenAI's clients read them."""

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps(envelope(*frame, choices, **more), ensure_ascii=False)}\n\n"

    more = {"usage": None} if with_usage else {}
    try:
        if chat:
            for number in range(len(rows)):
                start = {"role": "assistant", "content": ""}
                yield event([{"index": number, "delta": start, "logprobs": None, "finish_reason": None}], **more)
        async for number, piece in _until_finished(pieces, rows, taken):
            if piece.finish_reason == "error":
                failed = BadRequest("the model failed on this request; the server's log says how", status=500)
                yield f"data: {json.dumps(failed.body())}\n\n"
                return
            yield event([choice(number, piece.text, piece.finish_reason, chat=chat, delta=True)], **more)
        if with_usage:
            yield event([], usage=usage(prompt_tokens, sum(len(row.ids) for row in rows)))
        yield "data: [DONE]\n\n"
    finally:
        for row in rows:
            row.cancel()


async def _until_finished(
    pieces: asyncio.Queue[tuple[int, Piece]], rows: list[Row], taken: Any
) -> AsyncIterator[tuple[int, Piece]]:
    left = len(rows)
    while left:
        number, piece = await pieces.get()
        left -= piece.finish_reason is not None
        taken(len(rows[number].ids) if piece.finish_reason else None)
        yield number, piece


async def _left(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: Exception) -> Response:
    """Any error, as OpenAI's clients read it."""
    headers = {}
    if isinstance(error, QueueFull):
        error = BadRequest("as many requests wait as this server takes on: try again", status=429, code="queue_full")
        headers = {"Retry-After": "1"}
    elif isinstance(error, UserError):
        error = BadRequest(str(error).replace("\n", ". "), code="invalid_value", field="prompt")
    elif isinstance(error, HTTPException):
        error = BadRequest(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    elif not isinstance(error, BadRequest):
        error = BadRequest("the server failed on this request; its log says how", status=500)
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _model(name: str, models: Models) -> dict[str, Any]:
    """One entry of the list; context and chat are beyond OpenAI's."""
    known = {"id": name, "object": "model", "created": 0, "owned_by": "arriero"}
    return known | {"context": models.context, "chat": models.chat}


def _guarded(app: Any, api_key: str | None) -> Any:
    """Nothing under /v1/ without the key, where there is one."""
    if api_key is None:
        return app

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + api_key.encode()):
                error = BadRequest(
                    "this server wants its key: Authorization: Bearer …", status=401, code="invalid_api_key"
                )
                await JSONResponse(error.body(), status_code=401)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def _page() -> Any:
    """The page, which may run its own script and style and talk to this server, and nothing else."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    def hashes(tag: str) -> str:
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inside
        )

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}

    async def page(request: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    return page


# ------------------------------------------------------------------------------------------------------- running it


class _Server(uvicorn.Server):
    """Says where it listens once it does."""

    said = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        print(self.said, flush=True)


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address, before a model is loaded for it; port 0 takes a free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"can't listen on {host}:{port}: {error.strerror or error}", "Give another --port or --host."
        ) from None


def run(models: Models, limits: Limits, defaults: Defaults, at: socket.socket, *, api_key: str | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C; what has begun is finished first, for at most a minute."""
    config = uvicorn.Config(
        build_app(models, limits, defaults, api_key=api_key),
        log_level="warning",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_STOP_S,
        server_header=False,
        ws="none",
    )
    server = _Server(config)
    host, port = at.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    server.said = (
        f"serving {', '.join(models.names)} at http://{shown}:{port} (the API: /v1, a page: /). Ctrl-C stops it."
    )
    # uvicorn raises the signal again when it has stopped; that it was asked to is no failure.
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)
    server.run(sockets=[at])
    print("stopped", file=sys.stderr)
