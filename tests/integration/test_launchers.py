"""One recipe, three ways to start its ranks, one result; and a mixture counted by source."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import Workshop, arriero, metrics


def losses(run: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(run) if "loss" in row]


def start(command: list[str], recipe: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *command, "train", str(recipe)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def own(workshop: Workshop) -> list[tuple]:
    """By arriero's own start. A mixture of two sources, in epochs, whose last step is not full."""
    arriero("train", mixture(workshop, "own"), "--nproc", 2)
    return losses(workshop.run("own"))


def mixture(workshop: Workshop, name: str) -> Path:
    """Two sources, of the same text here, seven rows to three."""
    sources = [
        {"path": str(workshop.dataset), "name": "code", "weight": 0.7},
        {"path": str(workshop.dataset), "name": "again", "weight": 0.3, "max_epochs": 2},
    ]
    return workshop.recipe(
        name,
        data={"sources": sources, "seq_len": 256},
        train={"max_steps": None, "num_train_epochs": 0.0195, "global_batch_size": 8, "per_device_train_batch_size": 1},
        eval={"max_rows": 4},
    )


def test_sources_are_counted_apart(workshop: Workshop, own: list[tuple]) -> None:
    rows = [row for row in metrics(workshop.run("own")) if "loss" in row]
    for row in rows:
        targets = {name: row[f"target_tokens/{name}"] for name in ("code", "again") if f"loss/{name}" in row}
        assert sum(targets.values()) == row["target_tokens"]
        mean = sum(row[f"loss/{name}"] * count for name, count in targets.items()) / row["target_tokens"]
        assert abs(mean - row["loss"]) < 1e-9
    last = rows[-1]
    assert last["tokens"] == last["position"] * 256
    scores = [row for row in metrics(workshop.run("own")) if row.get("event") == "eval"]
    assert {"eval_loss/code", "eval_loss/again"} <= scores[-1].keys()


def test_the_last_step_takes_what_is_left(workshop: Workshop, own: list[tuple]) -> None:
    from arriero.config.load import load_recipe
    from arriero.resolve import resolve

    plan = resolve(load_recipe(workshop.folder / "own.yaml"), 2).plan
    assert plan.end % 8 != 0
    assert plan.steps == len(own) == -(-plan.end // 8)
    assert [row["position"] for row in metrics(workshop.run("own")) if "loss" in row][-1] == plan.end


def test_torchrun(workshop: Workshop, own: list[tuple]) -> None:
    recipe = mixture(workshop, "by-torchrun")
    start(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "arriero"], recipe)
    assert losses(workshop.run("by-torchrun")) == own


def test_deepspeed(workshop: Workshop, own: list[tuple]) -> None:
    recipe = mixture(workshop, "by-deepspeed")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    # It puts --local_rank=N between the module and its command.
    launcher = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port]
    start([*launcher, "--module", "arriero"], recipe)
    assert losses(workshop.run("by-deepspeed")) == own


def test_srun(workshop: Workshop, own: list[tuple]) -> None:
    """Two processes with the variables that srun gives its tasks."""
    recipe = mixture(workshop, "by-srun")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "arriero", "train", str(recipe)],
            env=os.environ | common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert losses(workshop.run("by-srun")) == own
