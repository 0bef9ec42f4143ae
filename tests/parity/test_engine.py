"""The same mathematics in every layout: two launches train 61 layouts, compare each with a plain PyTorch loop, save
each, and load checkpoints of other layouts. The 16 that offload the optimizer need a C++ compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arriero.doctor.building import compiler_check

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
        [*command, str(WORKER), str(out), str(shared)], env=environment, capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(out.read_text())


def test_ranks_build_an_operation_one_after_the_other() -> None:
    """Two at once, with whatever is built already: the second finds the first's library. Also builds it for what
    follows, where that takes its minute: no other test then waits for the compiler."""
    if not compiler_check().ok:
        pytest.skip(f"nothing can be compiled: {compiler_check().detail}")
    code = (
        "import os\n"
        "from arriero.config.load import check_recipe; from arriero.engine.ops import build_ops, CPUAdamBuilder\n"
        "recipe = check_recipe({'output_dir': 'x', 'model': {'model_name_or_path': 'm'}, 'data': {'sources': [{'path': 'd'}]},"
        " 'train': {'max_steps': 1}, 'parallel': {'offload_optimizer': 'cpu'}}, 'test')\n"
        "build_ops(recipe); library = CPUAdamBuilder().load().__file__\n"
        "print(library, os.stat(library).st_mtime_ns)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [rank.communicate(timeout=550)[0].splitlines()[-1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0] == said[1], "one library, written once"


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    folder = tmp_path_factory.mktemp("engine")
    shared = folder / "shared"
    shared.mkdir()
    return {nproc: launch(nproc, folder / f"world{nproc}.json", shared) for nproc in (2, 1)}


def layouts(results: dict[int, dict]) -> list[dict]:
    return [layout for part in results.values() for layout in [*part["layouts"], *part["offload"]["layouts"]]]


@pytest.fixture(scope="session")
def offload(results: dict[int, dict]) -> list[dict]:
    problems = {part["offload"]["problem"] for part in results.values()} - {None}
    if problems:
        pytest.skip(f"optimizer offload is not tested: {problems.pop()}")
    return [part["offload"] for part in results.values()]


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
    # RoPE tables stay fp32 in every precision.
    assert {table for layout in found for table in layout["tables"]} == {"torch.float32"}
    assert all(layout["tables"] for layout in found)


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
    # World 2 reads what world 2 saved (4 checkpoints), world 1 also what world 1 saved; each at 2 stages.
    assert len(reloads) == 4 * 2 + 8 * 2
    assert all(reload["bit_equal"] for reload in reloads)
    for reload in reloads:
        expected = evaluated[reload["from"]]
        assert abs(reload["evaluated"] - expected) < 1e-5 * expected, reload


def test_offloaded_layouts_were_run(offload: list[dict]) -> None:
    assert sorted(len(part["layouts"]) for part in offload) == [2 * 5, 2 * 5 + 1]


def test_offloaded_checkpoints_load_anywhere_and_back_bit_for_bit(
    results: dict[int, dict], offload: list[dict]
) -> None:
    evaluated = {layout["name"]: layout["evaluated"] for layout in layouts(results)}
    for part in offload:
        assert {(reload["stage"], reload["optimizer"]) for reload in part["reloads"]} == {
            (0, "none"),
            (3, "none"),
            (2, "cpu"),
            (3, "cpu"),
        }
        for reload in part["reloads"]:
            assert reload["bit_equal"], reload
            expected = evaluated[reload["from"]]
            assert abs(reload["evaluated"] - expected) < 1e-5 * expected, reload


def test_an_offloaded_optimizer_goes_on_bit_for_bit(offload: list[dict]) -> None:
    for part in offload:
        assert part["resumed"] == {"1": True, "3": True}
