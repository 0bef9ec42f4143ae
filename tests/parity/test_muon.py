"""Muon at the stages that have it, on one rank and two, against a plain PyTorch loop; its checkpoints in each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("muon_worker.py")
LIMITS = {
    # As for AdamW (test_engine.py), but no second moment blows up a last bit in fp32.
    "fp32": {"loss": 1e-5, "norm": 1e-4, "weights": 5e-5},
    "bf16": {"loss": 2e-3, "norm": 4e-2, "weights": 5e-2},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("muon")
    (folder / "shared").mkdir()
    found = []
    # DeepSpeed's Newton-Schulz runs eagerly here: compiling it for each shape would take a minute.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_COMPILE_DISABLE": "1"}
    for nproc in (2, 1):
        out = folder / f"{nproc}.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        done = subprocess.run(
            [*command, str(WORKER), str(out), str(folder / "shared")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=290,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        found.append(json.loads(out.read_text()))
    return found


def test_every_stage_that_has_muon_equals_the_plain_loop(results: list[dict]) -> None:
    layouts = [layout for part in results for layout in part["layouts"]]
    assert {(layout["precision"], layout["stage"], layout["world"]) for layout in layouts} == {
        (precision, stage, world) for precision, stage in (("fp32", 0), ("fp32", 3), ("bf16", 3)) for world in (1, 2)
    }
    for layout in layouts:
        limits = LIMITS[layout["precision"]]
        assert all(layout[measure] <= limit for measure, limit in limits.items()), layout
        assert layout["parameters"]
        assert layout["finite"]


def test_momentum_loads_into_every_stage_and_world_bit_for_bit(results: list[dict]) -> None:
    reloads = [reload for part in results for reload in part["reloads"]]
    # World 2 reads its own two checkpoints at two stages, world 1 also those of world 2.
    assert len(reloads) == 2 * 2 + 4 * 2
    assert all(reload["bit_equal"] for reload in reloads)
    # A master for all 21 parameters, one momentum for the 14 matrices of two layers, two moments for the other 7.
    assert {reload["kinds"] for reload in reloads} == {21 + 14 + 2 * 7}


def test_another_optimizers_checkpoint_is_refused_by_name(results: list[dict]) -> None:
    for part in results:
        assert "has no exp_avg in it: it was trained by another optimizer" in part["adamw"]


def test_a_step_that_is_left_out_moves_nothing(results: list[dict]) -> None:
    for part in results:
        assert part["left_out"] == {"applied": False, "moved": 0.0}
