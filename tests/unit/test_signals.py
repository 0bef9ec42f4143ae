"""Being asked to stop: in a process of its own, since handlers belong to the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from arriero.launch.signals import stop_requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_asks_for_a_stop_and_is_named(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_requests() as request:
        assert not request.requested
        assert request.signal_name is None
        os.kill(os.getpid(), number)
        assert request.requested
        assert request.signal_name == number.name
    assert signal.getsignal(number) is before, "handlers are put back"


def test_a_signal_during_the_start_is_kept() -> None:
    """Slurm's SIGUSR1 may come while a rank still opens its data; it used to end the process."""
    script = (
        "import os, signal\n"
        "from arriero.launch.signals import note_early_stop, stop_requests\n"
        "note_early_stop()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "with stop_requests() as request: print(request.signal_name)\n"
        "with stop_requests() as request: print(request.signal_name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("SIGUSR1\nNone\n", 0)


def test_handlers_are_put_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), stop_requests():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_interrupt_ends_the_process() -> None:
    script = (
        "import os, signal\n"
        "from arriero.launch.signals import stop_requests\n"
        "with stop_requests() as request:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print(request.signal_name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "SIGINT\n"
    assert done.returncode == -signal.SIGINT
