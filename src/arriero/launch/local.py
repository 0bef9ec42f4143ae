"""Start the ranks of a run on this host under torch's elastic agent, and say how they ended."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arriero.config.load import load_recipe

# Where rank 0 leaves its exit code and last words: launchers flatten every code to 1.
OUTCOME_VARIABLE = "ARRIERO_OUTCOME"
# How torch's collectives say that another rank is gone.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "DistBackendError", "DistNetworkError")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended."""

    exit_code: int
    message: str = ""


@dataclass(frozen=True)
class Hosts:
    """One of several hosts that each start their own ranks, as torchrun's options of these names say it."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int


def default_nproc(on_cpu: int = 1) -> int:
    """A rank per GPU, or ``on_cpu`` on a host without any; one rank's threads use all cores."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else on_cpu


def run_ranks(arguments: Sequence[str], nproc: int, *, max_restarts: int = 0, hosts: Hosts | None = None) -> Outcome:
    """Run ``python -m arriero`` with these arguments as ``nproc`` ranks and wait for them.

    A free port is chosen by the agent, so two runs on one host don't meet. SIGTERM, SIGINT and SIGUSR1 go on to every
    rank, which save and stop together. If a rank dies, the agent ends the others and starts all anew, at most
    ``max_restarts`` times; the first error of the last attempt is in the outcome. What can't be helped by trying again
    (a wrong recipe, a run that stopped as asked) isn't tried again. hosts: this host is one of several that do the same.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="arriero-") as scratch:
        outcome_file = Path(scratch) / "outcome.json"
        os.environ[OUTCOME_VARIABLE] = str(outcome_file)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
        os.environ["LOCAL_SIZE"] = str(nproc)
        config = LaunchConfig(
            nproc_per_node=nproc,
            max_restarts=max_restarts,
            monitor_interval=0.1,
            signals_to_handle="SIGQUIT",
            **_rendezvous(hosts),
        )
        try:
            with _forward_signals():
                elastic_launch(config, sys.executable)("-m", "arriero", *arguments)
        except ChildFailedError as error:
            return _failed(outcome_file, error)
        return _read(outcome_file) or Outcome(0)


def _rendezvous(hosts: Hosts | None) -> dict[str, Any]:
    """Of one host: a port that is free, which the ranks hear of. Of several: the port of the first one that all were told."""
    if hosts is None:
        return {
            "min_nodes": 1,
            "max_nodes": 1,
            "run_id": uuid.uuid4().hex,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "127.0.0.1:0",
            "local_addr": "127.0.0.1",
        }
    return {
        "min_nodes": hosts.nnodes,
        "max_nodes": hosts.nnodes,
        "run_id": f"{hosts.master_addr}:{hosts.master_port}",
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{hosts.master_addr}:{hosts.master_port}",
        "rdzv_configs": {"rank": hosts.node_rank},
    }


def train(recipe: str | Path, overrides: Sequence[str] = (), *, nproc: int | None = None) -> Outcome:
    """What ``arriero train RECIPE`` does: train, or continue, on ``nproc`` ranks (None: one per GPU, or one on a CPU).

    Raises ``UserError`` for a recipe that isn't right; the outcome's exit code says how the run ended, and its
    message why.
    """
    loaded = load_recipe(recipe, overrides)
    return run_ranks(["train", str(recipe), *overrides], nproc or default_nproc(loaded.parallel.replica_ranks))


def begin_attempt() -> None:
    """Forget how an attempt before this one ended; called by each rank when it starts."""
    path = os.environ.get(OUTCOME_VARIABLE)
    if path is not None and os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        Path(path).unlink(missing_ok=True)


def agent_code(exit_code: int) -> int:
    """What a rank tells the agent that started it: 0 where trying again would change nothing.

    The agent starts the ranks again for any other code; the real one is in the outcome.
    """
    told = os.environ.get(OUTCOME_VARIABLE)
    return 0 if told is not None and Path(told).is_file() else exit_code


def leave_outcome(exit_code: int, message: str = "") -> None:
    """Tell the process that started the ranks how this one ends, or the terminal where a launcher did; the first word
    counts."""
    path = os.environ.get(OUTCOME_VARIABLE)
    if path is None:
        print(f"error: {message}" if exit_code in (1, 2) else message, file=sys.stderr)
        return
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(json.dumps({"exit_code": exit_code, "message": message}))
    except OSError:  # another rank was first, or the one who asked is gone
        return


def end_with_launcher() -> None:
    """Ask the kernel to end this rank when the process that started it dies, however it dies: an orphan would go on
    training and hold the run folder against the same command started again."""
    if OUTCOME_VARIABLE in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _forward_signals() -> Iterator[None]:
    import psutil

    def forward(number: int, frame: Any) -> None:
        children = psutil.Process().children()
        if not children:  # nothing has been started that could save anything
            raise SystemExit(128 + number)
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(path: Path) -> Outcome | None:
    try:
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _failed(outcome_file: Path, error: Any) -> Outcome:
    told = _read(outcome_file)
    if told is not None:
        return told
    rank, failure = _root(error.failures)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        code = 128 - failure.exitcode if failure.exitcode in (-signal.SIGINT, -signal.SIGTERM) else 1
        return Outcome(code, f"rank {rank} was ended by {name} (pid {failure.pid}); the other ranks were stopped")
    return Outcome(1, f"rank {rank} failed:\n{_traceback(failure.message)}")


def _root(failures: dict[int, Any]) -> tuple[int, Any]:
    """The failure that the others followed from: a rank that dies closes its connections, and its peers fail too."""

    def follows(failure: Any) -> tuple[bool, int]:
        ended_by_agent = failure.exitcode == -signal.SIGTERM
        lost_its_peer = any(sign in str(failure.message) for sign in _LOST_PEER)
        return ended_by_agent or lost_its_peer, failure.timestamp

    return min(failures.items(), key=lambda item: follows(item[1]))


def _traceback(message: Any) -> str:
    """What torch's error file holds of the exception."""
    if isinstance(message, dict):
        return str(message.get("extraInfo", {}).get("py_callstack", message.get("message", message))).strip()
    return str(message)
