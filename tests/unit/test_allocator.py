"""What a rank on a CPU does with the memory that a step frees."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

# Page faults of five times 40 MB, asked for and freed, after twenty rounds that aren't counted: aligned blocks leave slivers
# behind, up to seven of a size, that keep a freed block from joining its neighbours.
ROUNDS = """
import os, resource, sys, torch
from arriero.engine.parallel import join_world
if sys.argv[1] == "keep":
    join_world()
for number in range(25):
    if number == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_memory_is_asked_for_again_without_page_faults() -> None:
    faults = {}
    for way in ("keep", "give back"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            alone = {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free.getsockname()[1]),
            }
        done = subprocess.run(
            [sys.executable, "-c", ROUNDS, way], env=os.environ | alone, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        faults[way] = int(done.stdout)
    assert faults["keep"] <= 5
    # 51,200 in pages of 4 kB, 100 in pages of 2 MB.
    assert faults["give back"] >= 90
