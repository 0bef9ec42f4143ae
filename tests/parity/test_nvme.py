"""NVMe offload, where DeepSpeed's async_io is built: ``make test-nvme`` builds it, minutes on two cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arriero.doctor.building import built

WORKER = Path(__file__).with_name("nvme_worker.py")
pytestmark = pytest.mark.skipif(
    not built("async_io"), reason="DeepSpeed's async_io isn't built here (minutes): make test-nvme builds it"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("nvme")
    (folder / "shared").mkdir()
    found = []
    for nproc in (2, 1):
        out = folder / f"{nproc}.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        done = subprocess.run(
            [*command, str(WORKER), str(out), str(folder / "shared")],
            env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            timeout=290,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        found.append(json.loads(out.read_text()))
    return found


def test_what_lies_in_files_trains_as_what_lies_in_memory(results: list[dict]) -> None:
    for part in results:
        in_memory, *swapped = part["layouts"]
        for layout in part["layouts"]:
            assert layout["loss"] < 1e-5, layout
            assert layout["norm"] < 1e-4, layout
            assert layout["parameters"]
            assert layout["finite"]
        for layout in swapped:
            assert all(abs(a - b) < 1e-5 * b for a, b in zip(layout["losses"], in_memory["losses"], strict=True))


def test_swapped_state_loads_anywhere_and_back_bit_for_bit(results: list[dict]) -> None:
    reloads = [reload for part in results for reload in part["reloads"]]
    # World 2 reads its own, world 1 also those of world 2: two that swap to three stages, and one that doesn't back.
    assert len(reloads) == (2 * 3 + 1) * (1 + 2)
    assert all(reload["bit_equal"] for reload in reloads)


def test_a_swapped_run_goes_on_bit_for_bit(results: list[dict]) -> None:
    assert [part["goes_on"] for part in results] == [True, True]
