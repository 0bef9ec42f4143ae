"""``arriero plan --calibrate`` on this machine: what it measures, and what it says of a busy one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_rates_of_a_busy_machine_are_called_too_low(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "arriero", "plan", "--calibrate", "--gpus", "2", "--json"],
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout)
    assert rates.keys() >= {"bf16_flops", "fp32_flops", "attention_flops", "masked_flops", "memory_bytes_s", "hop_s"}
    assert all(rate > 0 for rate in rates.values())
    assert rates["got_share"] < 0.85
    assert "other programs or a limit had the rest" in done.stderr
    assert "measure again when nothing else runs" in done.stderr
