"""The report of runs that go on, served to this machine's own browsers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson

from arriero.errors import UserError
from arriero.monitor.record import read_record
from arriero.monitor.report import page, page_data

# Reading a run anew takes at most this share of a core, however long its metrics have become.
_SHARE = 0.1


class Live:
    """The newest data of these runs, read again when their folders have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._seen: object = None
        self._rest_until_s = 0.0
        self.data = page_data([read_record(folder) for folder in folders], live=True)
        self.tag = '"0"'

    def refresh(self) -> None:
        """Read what has changed; does nothing while a reading that took long is still recent.

        Raises ``UserError`` where a folder can't be read any more.
        """
        with self._lock:
            began_s = time.monotonic()
            seen = [_stamp(folder) for folder in self._folders]
            if seen == self._seen or began_s < self._rest_until_s:
                return
            self.data = page_data([read_record(folder) for folder in self._folders], live=True)
            self.tag, self._seen = f'"{time.monotonic_ns()}"', seen
            now_s = time.monotonic()
            self._rest_until_s = now_s + (now_s - began_s) / _SHARE


def _stamp(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files that a report is made of."""
    paths = [folder / "metrics.jsonl", folder / "run_state.json", folder / "config.yaml", *folder.glob("samples/*")]
    found = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        found.append((path.name, stat.st_size, stat.st_mtime_ns))
    return found


def open_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server at that port of 127.0.0.1 (0: a free one) whose page asks for newer data every two seconds.

    Raises ``UserError`` where the port is taken or a folder isn't a run's.
    """
    live = Live(folders)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(live))
    except OSError as error:
        raise UserError(f"can't listen on 127.0.0.1:{port}: {error.strerror}", "Give another --port.") from None
    server.daemon_threads = True
    return server


def _handler(live: Live) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answers: dict[str, Callable[[], tuple[bytes, str]]] = {
                "/": lambda: (page({**live.data, "tag": live.tag}).encode(), "text/html; charset=utf-8"),
                "/data.json": lambda: (orjson.dumps(live.data), "application/json"),
            }
            # A page elsewhere whose name was made to lead here must not read a run.
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            answer = answers.get(self.path) if host in {"127.0.0.1", "localhost"} else None
            if answer is None:
                self._send(HTTPStatus.NOT_FOUND, b"", "text/plain")
                return
            try:
                live.refresh()
            except UserError as error:
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode(), "text/plain; charset=utf-8")
                return
            if self.path != "/" and self.headers.get("If-None-Match") == live.tag:
                self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json")
                return
            body, kind = answer()
            self._send(HTTPStatus.OK, body, kind)

        def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("ETag", live.tag),
                ("Cache-Control", "no-cache"),
                ("X-Content-Type-Options", "nosniff"),
                ("X-Frame-Options", "DENY"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a line for each poll would hide what matters."""

    return Handler
