"""Killed at any write of a checkpoint, or on a disk that is full, a run goes on and comes out the same; a flipped bit
is found. ``make survive N=200`` does more of the same and prints the figures."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import Workshop, metrics

import arriero
from arriero.checkpoint.layout import list_checkpoints, newest_intact

WORKER = Path(__file__).with_name("zygote.py")
KILLS = int(os.environ.get("SURVIVE", "12"))
FLIPS = int(os.environ.get("SURVIVE", "60"))


@pytest.fixture(scope="module")
def outcome(workshop: Workshop) -> dict:
    short = workshop.folder / "short"
    (workshop.folder / "short.txt").write_text("def carry(load):\n    return load + 1\n" * 12, encoding="utf-8")
    arriero.prepare(workshop.folder / "short.txt", tokenizer=workshop.tokenizer, out=short, validation_split=0)
    sources = [{"path": str(workshop.dataset), "name": "code", "weight": 1}]
    sources.append({"path": str(short), "name": "short", "weight": 1})
    recipe = workshop.recipe(
        "killed",
        data={"seq_len": 32, "sources": sources},
        train={"max_steps": 10, "global_batch_size": 2, "per_device_train_batch_size": 2},
        checkpoint={"save_steps": 2, "save_total_limit": 2},
        eval={"eval_steps": None, "max_rows": 2},
        log={"report_to": []},
    )
    out = workshop.folder / "kills.json"
    done = subprocess.run(
        [sys.executable, str(WORKER), str(recipe), str(out), str(KILLS), "1"],
        capture_output=True,
        text=True,
        timeout=60 * KILLS + 300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    epochs = [row["epoch"]["short"] for row in metrics(workshop.run("straight")) if "epoch" in row]
    assert epochs[0] < 1 < epochs[-1], "an epoch ends within the run"
    print(f"{found['kills']} kills in {found['starts']} starts of {found['rounds']} runs, {len(found['wrong'])} wrong")
    return found


@pytest.mark.timeout(60 * KILLS + 600)
def test_killed_at_any_write_the_run_comes_out_the_same(outcome: dict) -> None:
    assert outcome["kills"] >= KILLS
    assert outcome["boundaries"] > 50
    assert outcome["wrong"] == []


def test_a_disk_that_is_full_for_a_moment_is_waited_for(outcome: dict) -> None:
    assert outcome["moment"]["outcome"]["code"] == 0
    assert outcome["moment"]["same"]


def test_a_disk_that_stays_full_ends_the_run_and_harms_nothing(outcome: dict) -> None:
    full = outcome["full"]
    assert full["outcome"]["code"] == 1
    assert "could not be written" in full["outcome"]["error"]
    assert "No space left on device" in full["outcome"]["error"]
    assert [name for name in full["left"] if not name.startswith("tmp-")], "an older checkpoint is there"
    assert outcome["again"]["outcome"]["code"] == 0
    assert outcome["again"]["same"]


def test_a_flipped_bit_is_found_in_any_file(workshop: Workshop, outcome: dict) -> None:
    run = workshop.run("straight")
    newest, older = list_checkpoints(run)[-1], list_checkpoints(run)[-2]
    chance = random.Random(2)
    files = sorted(path for path in newest.iterdir() if path.is_file())
    for _ in range(FLIPS):
        path = chance.choice(files)
        place, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        flip(path, place, bit)
        found, passed_over = newest_intact(run)
        flip(path, place, bit)
        assert found == older, f"{path.name}, byte {place}, bit {bit}"
        assert [verdict.path for verdict in passed_over] == [newest]
        assert passed_over[0].reason
    assert newest_intact(run) == (newest, [])
    print(f"{FLIPS} bit flips in {len(files)} files, all found")


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ bit]))
