"""What the server counts, in Prometheus' text format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Seconds, counted up to each of a few bounds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[sum(seconds > bound for bound in _SECONDS)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        total, found = 0, []
        for bound, count in zip([*map(str, _SECONDS), "+Inf"], self._counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Measured:
    """Counts of one server, changed in its event loop alone."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens = self._generated_tokens = 0
        self._seconds, self._first = Histogram(), Histogram()

    def request(self, prompt_tokens: int) -> Callable[[int | None], None]:
        """Count a request that was taken; the function is told of each piece, and of a finished choice's tokens."""
        start, seen = time.perf_counter(), False
        self._prompt_tokens += prompt_tokens

        def piece(tokens: int | None) -> None:
            nonlocal seen
            if not seen:
                self._first.add(time.perf_counter() - start)
                seen = True
            self._generated_tokens += tokens or 0

        return piece

    def around(self, app: Any, paths: set[str]) -> Any:
        """The application, its requests counted by path and status; paths that it doesn't have are one."""

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status, start = 500, time.perf_counter()

            async def watched(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, watched)
            finally:
                path = scope["path"] if scope["path"] in paths else "other"
                self._requests[path, status] += 1
                if path.endswith("completions"):
                    self._seconds.add(time.perf_counter() - start)

        return counted

    def text(self, at_work: dict[str, tuple[int, int]]) -> str:
        """at_work: for each model the requests that run and that wait."""
        lines: list[str] = []

        def metric(name: str, kind: str, meaning: str, values: list[str]) -> None:
            lines.extend([f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *values])

        counts = [
            f'arriero_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._requests.items())
        ]
        metric("arriero_requests_total", "counter", "Requests answered.", counts)
        for name, value, meaning in (
            ("arriero_prompt_tokens_total", self._prompt_tokens, "Tokens of prompts taken."),
            ("arriero_generated_tokens_total", self._generated_tokens, "Tokens generated."),
        ):
            metric(name, "counter", meaning, [f"{name} {value}"])
        for place, name in enumerate(("arriero_requests_running", "arriero_requests_waiting")):
            # A model's name is a folder's, which may hold what ends a label.
            values = [f"{name}{{model={_label(model)}}} {both[place]}" for model, both in at_work.items()]
            metric(name, "gauge", f"Choices {name.rpartition('_')[2]} now.", values)
        for name, histogram, meaning in (
            ("arriero_request_seconds", self._seconds, "From a request to the end of its answer."),
            ("arriero_first_token_seconds", self._first, "From a request's place in the queue to its first text."),
        ):
            metric(name, "histogram", meaning, histogram.lines(name))
        return "\n".join(lines) + "\n"


def _label(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
