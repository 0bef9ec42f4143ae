"""Ranks that see different things say so by name, all of them, before anything starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import Workshop, arriero


@pytest.fixture(scope="module")
def said(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks had to say, case by case."""
    folder = tmp_path_factory.mktemp("agreement")
    other = folder / "other"
    arriero("prepare", workshop.corpus, "--tokenizer", workshop.tokenizer, "--out", other, "--validation-split", 0.1)
    worker = Path(__file__).with_name("agreement_worker.py")
    done = subprocess.run(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            *[worker, workshop.recipe("agree"), other, folder / "said"],
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"said-{rank}").read_text()) for rank in (0, 1)]


HOST = socket.gethostname()


def test_nothing_is_said_where_they_agree(said: list[dict[str, str]]) -> None:
    for one in said:
        assert (one["alike"], one["inputs alike"], one["left"]) == ("nothing", "nothing", "")


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (
            "recipe",
            f"the ranks have different recipes:\n  rank 1 on {HOST}: optim.learning_rate is 0.001 for rank 0 and 0.002 here",
        ),
        (
            "folder",
            "output_dir must be one folder for all ranks, since each writes its part of a checkpoint there:\n  rank 1 on",
        ),
        ("data", f"the ranks see different data:\n  rank 1 on {HOST}: the dataset code is "),
        ("deepspeed", f"the ranks see different data:\n  rank 1 on {HOST}: DeepSpeed's JSON (ds.json) is "),
        ("missing on one", f"some ranks can't start:\n  rank 1 on {HOST}: there is no dataset at /nowhere"),
        ("missing on both", "there is no dataset at /nowhere"),
    ],
    ids=["recipe", "folder", "data", "deepspeed", "missing on one", "missing on both"],
)
def test_each_difference_is_named_on_every_rank(said: list[dict[str, str]], case: str, problem: str) -> None:
    for one in said:
        assert one[case].startswith(problem)
