"""Saved in any layout, loaded in any other: all pairs of ZeRO stages 0 to 3 on 1, 2 and 4 ranks, by ``make survive``.

``tests/parity`` has a share of these pairs, and tensor, sequence and pipeline parallelism among them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("pairs_worker.py")
WORLDS = (1, 2, 4)

pytestmark = pytest.mark.skipif("SURVIVE" not in os.environ, reason="all 144 pairs of layouts: make survive")


def launch(what: str, ranks: int, folder: Path) -> list[dict]:
    out, shared = folder / f"{what}-{ranks}.json", folder / "shared"
    shared.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, str(WORKER), what, str(out), str(shared)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("pairs")
    return {what: [one for ranks in WORLDS for one in launch(what, ranks, folder)] for what in ("save", "load")}


@pytest.mark.timeout(6 * 900)
def test_a_resumed_run_is_the_same_run(found: dict[str, list[dict]]) -> None:
    assert len(found["save"]) == 3 * (4 + 3)
    assert [one["name"] for one in found["save"] if not (one["numbers_equal"] and one["state_equal"])] == []
    print(f"{len(found['save'])} layouts went on from a checkpoint bit for bit")


def test_any_layout_loads_any_checkpoint(found: dict[str, list[dict]]) -> None:
    pairs = {(one["from"], one["to"]) for one in found["load"]}
    assert len(pairs) == len(found["load"]) == 12 * 12
    assert [one for one in found["load"] if not one["bit_equal"]] == []
    worst = max(one["loss"] for one in found["load"])
    assert worst < 1e-5
    print(f"{len(pairs)} pairs of layouts, masters and moments bit-equal; losses that follow within {worst:.1e}")
