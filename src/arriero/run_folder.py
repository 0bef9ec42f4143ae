"""The run folder: names of its files, who may write into it, and how a run stands."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arriero.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    """Everything that one run writes lies under ``path``."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def state(self) -> Path:
        return self.path / "run_state.json"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def model(self) -> Path:
        """Configuration and tokenizer files of the model, as Hugging Face names them; no weights."""
        return self.path / "model"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def tracker(self, name: str) -> Path:
        """Holds the id of this run at a tracker."""
        return self.path / "trackers" / f"{name}.txt"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank_{rank}.log"

    def write_state(self, **fields: Any) -> None:
        """Replace ``run_state.json``: status, reason, step, tokens, last_checkpoint, exit_code."""
        replace_text(self.state, json.dumps(fields, indent=2) + "\n")

    def read_state(self) -> dict[str, Any]:
        """The last state, or nothing where no run has begun."""
        try:
            return dict(json.loads(self.state.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}

    def write_failure(self, reason: str, exit_code: int) -> None:
        """Note that the run ended badly; what the last state said of step and checkpoint stays."""
        self.write_state(**{**self.read_state(), "status": "failed", "reason": reason, "exit_code": exit_code})

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for this process; ``UserError`` while another live process has it.

        The kernel gives a flock up when its process ends, however it ends, so a crash leaves nothing to clean.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "run.lock").open("a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise UserError(
                    f"{self.path} is in use by a live process ({lock.read().strip() or 'unknown'})",
                    "Wait for it or stop it, or give this run another output_dir.",
                ) from None
            lock.truncate(0)
            lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
            yield


def replace_text(path: Path, text: str) -> None:
    """Write a whole file under another name, then rename: readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
