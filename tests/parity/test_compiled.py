"""Compiled layers train as eager ones do, alone and recomputed, on two ranks at once; and they resume bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("compiled_worker.py")
KINDS = ["kept", "recomputed"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # A cache of its own: the ranks compile the same graphs at the same time, as in a first run.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    out = folder / "out.json"
    done = subprocess.run(
        [*command, str(WORKER), str(out), str(folder)], env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_were_compiled(results: dict[str, dict], kind: str) -> None:
    """One graph before attention and one after it serve all layers; the loss is another."""
    assert results[f"{kind}, eager"]["graphs"] == 0
    assert results[f"{kind}, compiled"]["graphs"] >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_the_eager_ones(results: dict[str, dict], kind: str) -> None:
    """In bf16, with the limits that other layouts have; fused operations round less often."""
    eager, compiled = results[f"{kind}, eager"], results[f"{kind}, compiled"]
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=2e-3)
    assert compiled["norms"] == pytest.approx(eager["norms"], rel=4e-2)
    assert compiled["losses"] != eager["losses"], "nothing was fused"


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_recomputing_changes_no_number(results: dict[str, dict], mode: str) -> None:
    assert results[f"recomputed, {mode}"]["losses"] == results[f"kept, {mode}"]["losses"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_resumed_it_goes_on_bit_for_bit(results: dict[str, dict], kind: str, mode: str) -> None:
    assert results[f"{kind}, {mode}"]["resumed"]
    assert results[f"{kind}, {mode}"]["state"]
