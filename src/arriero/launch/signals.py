"""Being asked to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @property
    def requested(self) -> bool:
        return self.signal_name is not None


_early = StopRequest()


def note_early_stop() -> None:
    """Keep a SIGUSR1 that comes while a rank starts for ``stop_requests``: it would end the process otherwise.

    Slurm sends it before a job's time is over, and a start may take minutes; then one step is done and saved.
    """

    def note(number: int, frame: Any) -> None:
        _early.signal_name = signal.Signals(number).name

    signal.signal(signal.SIGUSR1, note)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """SIGTERM, SIGUSR1, SIGHUP and the first SIGINT ask for a stop at the next step; a second SIGINT ends the process at once."""
    request = StopRequest()
    request.signal_name, _early.signal_name = _early.signal_name, None

    def ask(number: int, frame: Any) -> None:
        request.signal_name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
