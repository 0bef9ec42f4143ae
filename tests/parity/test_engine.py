"""The same mathematics in every layout: two launches train 40 layouts, compare each with a plain PyTorch loop, save
each, and load checkpoints of other layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("engine_worker.py")
LIMITS = {
    # Relative differences of loss and gradient norm, absolute one of a weight after 5 updates of up to 1e-2 each.
    # Adam turns the last bit of a tiny gradient into a part of its step, hence the weights' width.
    "fp32": {"loss": 1e-5, "norm": 1e-4, "weights": 5e-4},
    # A bf16 gradient has 8 bits, and which sums are rounded depends on the split; a weight moves 1e-2 a step.
    "bf16": {"loss": 2e-3, "norm": 4e-2, "weights": 5e-2},
}


def launch(nproc: int, out: Path, shared: Path) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, str(WORKER), str(out), str(shared)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    folder = tmp_path_factory.mktemp("engine")
    shared = folder / "shared"
    shared.mkdir()
    return {nproc: launch(nproc, folder / f"world{nproc}.json", shared) for nproc in (2, 1)}


def layouts(results: dict[int, dict]) -> list[dict]:
    return [layout for part in results.values() for layout in part["layouts"]]


@pytest.mark.parametrize("measure", ["loss", "norm", "weights"])
def test_every_layout_equals_the_plain_loop(results: dict[int, dict], measure: str) -> None:
    wrong = [
        f"{layout['name']}: {layout[measure]:.2e}"
        for layout in layouts(results)
        if not layout[measure] <= LIMITS[layout["precision"]][measure]
    ]
    assert not wrong, f"{measure} beyond the limit: {wrong}"


def test_all_layouts_were_run_and_own_the_whole_model(results: dict[int, dict]) -> None:
    found = layouts(results)
    assert {(layout["precision"], layout["stage"], layout["world"]) for layout in found} == {
        (precision, stage, world)
        for precision in ("fp32", "bf16")
        for stage in range(4)
        for world in (1, 2)
        if not (precision == "bf16" and stage == 0)
    }
    assert all(layout["parameters"] and layout["finite"] for layout in found)


def test_plain_descent_moves_weights_as_the_gradient_says(results: dict[int, dict]) -> None:
    """Adam hardly sees a constant factor in the gradient; here one of 1.001 would move a weight by 1e-6 too far."""
    found = [layout for layout in layouts(results) if layout["name"].startswith("sgd")]
    assert len(found) == 2 * 4
    assert max(layout["weights"] for layout in found) < 1e-7


def test_layouts_equal_one_another_closely(results: dict[int, dict]) -> None:
    losses = [layout["losses"] for layout in layouts(results) if layout["name"].startswith("fp32")]
    worst = max(abs(a - b) / b for other in losses for a, b in zip(other, losses[0], strict=True))
    assert worst < 1e-5


def test_clipping_was_at_work(results: dict[int, dict]) -> None:
    # The recipe clips at 0.5; the norms logged are those before clipping.
    assert min(results[1]["norms"]) > 0.5


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_without_targets_moves_nothing_but_decay(results: dict[int, dict], world: int) -> None:
    for outcome in results[world]["masked"]:
        assert outcome["norm"] == 0.0, outcome
        assert outcome["moved_beyond_decay"] < 1e-7, outcome


def test_any_layout_loads_any_checkpoint_bit_for_bit(results: dict[int, dict]) -> None:
    reloads = [reload for part in results.values() for reload in part["reloads"]]
    evaluated = {layout["name"]: layout["evaluated"] for layout in layouts(results)}
    # World 2 reads what world 2 saved (4 checkpoints), world 1 also what world 1 saved; each at 4 stages.
    assert len(reloads) == 4 * 4 + 8 * 4
    assert all(reload["bit_equal"] for reload in reloads)
    for reload in reloads:
        expected = evaluated[reload["from"]]
        assert abs(reload["evaluated"] - expected) < 1e-5 * expected, reload
