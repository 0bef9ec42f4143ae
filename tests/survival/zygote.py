"""Faults at every place where a checkpoint touches the disk. Not a test file itself.

python tests/survival/zygote.py RECIPE OUT.json KILLS SEED

A process that has imported everything forks a child for each start of the run, so that hundreds of starts take minutes.
A child is ended by SIGKILL at its k-th write, sync, rename or removal of checkpoint files, k drawn anew each time; the
same run is started again and again until it is done. Then every loss, gradient norm and rate of it is compared with a
run that was never killed. Two more starts meet a disk that is full for a moment, and one that stays full.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", module=r"torch|deepspeed|transformers")
os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

import torch
import torch.distributed as dist

from arriero import training
from arriero.checkpoint import save
from arriero.config.load import load_recipe
from arriero.engine.parallel import World
from arriero.errors import UserError
from arriero.monitor.metrics import latest_by_step, read_metrics
from arriero.planner.layouts import Layout

# What happens at boundary number n (from 1), before or behind the call itself; whether the call takes space.
Fault = Callable[[int, bool, Any, bool], None]


def no_fault(number: int, behind: bool, path: Any, writes: bool) -> None:
    return None


def kill_at(place: int, cut: bool) -> Fault:
    """SIGKILL before the call, or behind it with the file that it wrote cut to its half."""

    def fault(number: int, behind: bool, path: Any, writes: bool) -> None:
        if number == place and behind == cut:
            if cut and isinstance(path, Path) and path.is_file():
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    return fault


def full_disk(first: int, times: int) -> Fault:
    """ENOSPC from boundary ``first`` on, ``times`` times."""
    left = [times]

    def fault(number: int, behind: bool, path: Any, writes: bool) -> None:
        if number >= first and writes and not behind and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    return fault


def install(fault: Fault) -> list[int]:
    """Put boundaries into everything with which checkpoints are written; returns their count as it grows."""
    count = [0]

    def bounded(call: Any, place: int, *, writes: bool = False) -> Any:
        def boundary(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            number, path = count[0], arguments[place] if len(arguments) > place else None
            fault(number, False, path, writes)
            value = call(*arguments, **options)
            fault(number, True, path, writes)
            return value

        return boundary

    save.save_file = bounded(save.save_file, 1, writes=True)
    save._write_json = bounded(save._write_json, 1, writes=True)
    save.sync_folder = bounded(save.sync_folder, 0)
    os.fsync = bounded(os.fsync, 0, writes=True)
    shutil.rmtree = bounded(shutil.rmtree, 0)
    Path.rename = bounded(Path.rename, 0)
    Path.unlink = bounded(Path.unlink, 0)
    return count


def child(recipe: Path, overrides: list[str], fault: Fault, report: Path) -> None:
    count = install(fault)
    world = World(0, 1, 0, torch.device("cpu"), Layout(1))
    store = tempfile.mktemp(dir=report.parent)
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    try:
        code, error = training.train(load_recipe(recipe, overrides), overrides, world), ""
    except UserError as problem:
        code, error = problem.exit_code, str(problem)
    report.write_text(json.dumps({"code": code, "error": error, "boundaries": count[0]}))
    os._exit(0)


def start(recipe: Path, overrides: list[str], fault: Fault, report: Path) -> dict[str, Any] | None:
    """One start of the run; None where it was killed."""
    report.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            child(recipe, overrides, fault, report)
        except BaseException:  # noqa: BLE001 - shown, and the child ends without the parent's clean-up
            traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    return dict(json.loads(report.read_text())) if report.exists() else {"code": status, "error": "it crashed"}


def losses(run: Path) -> list[Any]:
    """Loss, gradient norm and rate of each step of the run as it went in the end."""
    return [
        [row["step"], row["loss"], row["grad_norm"], row["learning_rate"]]
        for row in latest_by_step(read_metrics(run / "metrics.jsonl"))
        if "event" not in row
    ]


def main() -> None:
    recipe, out, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(seed)
    run, report = Path(load_recipe(recipe).output_dir), out.with_suffix(".report")
    straight = run.with_name("straight")
    first = start(recipe, [f"output_dir={straight}"], no_fault, report)
    assert first is not None
    assert first["code"] == 0, first
    truth, most = losses(straight), first["boundaries"]
    done: dict[str, Any] = {"boundaries": most, "kills": 0, "starts": 0, "rounds": 0, "wrong": []}
    while done["kills"] < kills:
        shutil.rmtree(run, ignore_errors=True)
        done["rounds"] += 1
        outcome = None
        while outcome is None:
            # A start that has little left to do meets few boundaries: then the kill never comes and the run ends.
            outcome = start(recipe, [], kill_at(chance.randint(1, most // 2), chance.random() < 0.5), report)
            done["starts"] += 1
            done["kills"] += outcome is None
        if outcome["code"] != 0 or losses(run) != truth:
            done["wrong"].append({**outcome, "same": losses(run) == truth})
    for name, times in (("moment", 2), ("full", 10**6)):
        shutil.rmtree(run, ignore_errors=True)
        outcome = start(recipe, [], full_disk(most // 2, times), report)
        done[name] = {
            "outcome": outcome,
            "same": losses(run) == truth,
            "left": sorted(path.name for path in run.glob("*checkpoint-*")),
        }
        if name == "full":
            done["again"] = {"outcome": start(recipe, [], no_fault, report), "same": losses(run) == truth}
    out.write_text(json.dumps(done))


if __name__ == "__main__":
    main()
