"""`arriero check`: it passes where the engine is right, and says what is wrong where it isn't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import Workshop, arriero


def test_every_layout_of_a_recipe_is_equal(workshop: Workshop) -> None:
    recipe = workshop.recipe(
        "checked", train={"precision": "bf16", "max_steps": 1000}, parallel={"tensor_parallel_size": 2}
    )
    done = arriero("check", recipe, "--json")
    outcome = json.loads(done.stdout)
    assert outcome["passed"] is True
    names = [check["name"] for check in outcome["checks"]]
    for ranks in (1, 2):
        for precision, stages in {"fp32": range(4), "bf16": range(1, 4)}.items():
            for stage in stages:
                found = [name for name in names if name.startswith(f"{precision} ZeRO-{stage} {ranks} × ")]
                assert len(found) == 2 * 4, found  # two splits; loss, gradient norm, weights, leak
    own = [name for name in names if "ZeRO-1 tensor 2, 1 × 8 × 1 rows" in name]
    assert len(own) == 2 * 4, "the recipe's own layout in both precisions"
    assert all(check["worst_difference"] <= check["tolerance"] for check in outcome["checks"])
    # Real numbers: two precisions of one recipe can't agree to the last bit.
    assert any(check["worst_difference"] > 0 for check in outcome["checks"])
    assert "bf16 ZeRO-3 2 × 4 × 1 rows  equal" in done.stderr
    assert not workshop.run("checked").exists(), "a self-test writes no run"


@pytest.mark.parametrize(("fault", "measure"), [("twice", "grad_norm"), ("own rows", "grad_norm"), ("leak", "leak")])
def test_a_broken_engine_is_found(workshop: Workshop, broken: dict[str, list[dict]], fault: str, measure: str) -> None:
    found = [check for check in broken[fault] if check["name"].endswith(f": {measure}")]
    assert found
    assert not all(check["passed"] for check in found)


@pytest.fixture(scope="module")
def broken(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    recipe = workshop.recipe("broken")
    worker = Path(__file__).with_name("check_worker.py")
    found = {}
    for fault in ("twice", "own rows", "leak"):
        out = tmp_path_factory.mktemp("broken") / "checks.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(
            [*command, str(worker), str(recipe), str(out), fault],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found[fault] = json.loads(out.read_text())
    return found
