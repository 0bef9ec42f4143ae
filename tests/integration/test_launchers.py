"""One recipe, three ways to start its ranks, one result; and a mixture counted by source."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from workshop import Workshop, metrics


def losses(run: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(run) if "loss" in row]


def begin(command: list[str], recipe: Path, *options: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, *command, "train", str(recipe), *options],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 0, said[-2000:] + errors[-4000:]


@pytest.fixture(scope="module")
def own(workshop: Workshop) -> list[tuple]:
    """By arriero's own start, while torchrun runs another on this host and somebody has the usual port.

    A mixture of two sources, in epochs, whose last step is not full.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # somebody else has it
            stack.enter_context(socket.create_server(("127.0.0.1", 29_500)))
        recipes = mixture(workshop, "own"), mixture(workshop, "by-torchrun")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "arriero"]
        both = begin(["-m", "arriero"], recipes[0], "--nproc", "2"), begin(torchrun, recipes[1])
        for process in both:
            finish(process)
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


def test_torchrun_at_the_same_time(workshop: Workshop, own: list[tuple]) -> None:
    assert losses(workshop.run("by-torchrun")) == own


def test_deepspeed(workshop: Workshop, own: list[tuple]) -> None:
    recipe = mixture(workshop, "by-deepspeed")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    # It puts --local_rank=N between the module and its command.
    launcher = ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port]
    finish(begin([*launcher, "--module", "arriero"], recipe))
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


def test_the_array_of_preparations_in_the_docs(workshop: Workshop, tmp_path: Path) -> None:
    """The page's script, run by bash as Slurm would for each task, and its merge: the dataset of one machine."""
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    script = re.search(r"```sh\n(#!/bin/bash\n#SBATCH --job-name=prepare\n.*?)```", page, re.DOTALL)
    merge = re.search(r"--wrap '(arriero prepare .* --merge)'", page)
    assert script is not None
    assert merge is not None
    programs = {"srun": 'exec "$@"', "arriero": f'exec {sys.executable} -m arriero "$@" --validation-split 0.05'}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "made"
    given = {"CORPUS": workshop.corpus, "TOKENIZER": workshop.tokenizer, "DATASET": out, "SHARDS": 2}
    environment = os.environ | {name: str(value) for name, value in given.items()}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    for line, task in ((script[1], "0"), (script[1], "1"), (merge[1], "")):
        subprocess.run(["bash", "-c", line], env=environment | {"SLURM_ARRAY_TASK_ID": task}, check=True, timeout=120)
    for file in workshop.dataset.iterdir():
        if file.is_file():
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name
