"""What a rank on a CPU does with the memory that a step frees."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Page faults of five times 40 MB, asked for and freed, after twenty rounds that aren't counted: aligned blocks leave slivers
# behind, up to seven of a size, that keep a freed block from joining its neighbours.
ROUNDS = """
import resource, sys, torch
from arriero.engine.parallel import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for number in range(25):
    if number == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_is_asked_for_again_without_page_faults() -> None:
    faults = {}
    for way in ("keep", "give back"):
        done = subprocess.run([sys.executable, "-c", ROUNDS, way], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        faults[way] = int(done.stdout)
    assert faults["keep"] <= 5
    # 51,200 in pages of 4 kB, 100 in pages of 2 MB.
    assert faults["give back"] >= 90
