"""Python, cores, limits, memory and disk of this machine, and what is left in its environment."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from arriero.config.schema import Recipe
from arriero.doctor.finding import Check
from arriero.units import format_bytes, format_time

_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_FREE_DISK_BYTES = 2 * 1024**3  # the demo's run folder, dataset and tokenizer together stay below 1 GiB


_SHARED_MEMORY_BYTES = 512 * 1024**2  # Docker gives 64 MiB, too little for loader workers and for NCCL


_OPEN_FILES = 1024
_PROCESSES = 4096
_SLOW_DISK_BYTES_S = 50e6


def python_check() -> Check:
    """The interpreter's version against ours."""
    version = platform.python_version()
    try:
        wanted = metadata.metadata("arriero")["Requires-Python"] or ">=3.11"
    except metadata.PackageNotFoundError:
        wanted = ">=3.11"
    ok = Requirement(f"python{wanted}").specifier.contains(version, prereleases=True)
    return Check("python", ok, f"{version} ({sys.executable})", "" if ok else f"make a venv with Python {wanted}")


def usable_memory_bytes() -> int:
    """Memory of this machine, or of the container."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read(Path("/sys/fs/cgroup/memory.max"))
    return min(memory_bytes, int(limit)) if limit.isdigit() else memory_bytes


def machine_check(cores: int) -> Check:
    """What it is; never a fault."""
    memory = format_bytes(usable_memory_bytes())
    text = f"{platform.system()} {platform.machine()}, {cores} CPU core{'s' * (cores != 1)}, {memory}"
    return Check("machine", True, text, required=False)


def usable_cores() -> int:
    """Cores this process may use: its affinity, and a container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def openmp_check(environ: Mapping[str, str], *, cores: int) -> Check:
    """Whether OMP_NUM_THREADS and its relatives are left from another job. Unset is right."""
    threads, cpus = environ.get("OMP_NUM_THREADS"), os.cpu_count() or 1
    pinned = [name for name in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES") if name in environ]
    problems, remedies = [], []
    if threads is None and cores < cpus:
        # Two threads on one busy core made steps nine times slower; torch counts the machine's cores, not the quota's.
        problems.append(f"{cores} of {cpus} cores may be used here, but OpenMP starts {cpus} threads")
        remedies.append(f"export OMP_NUM_THREADS={cores}")
    elif threads is not None and not (threads.isdigit() and 1 <= int(threads) <= cores):
        problems.append(f"OMP_NUM_THREADS={threads} with {cores} usable core{'s' * (cores != 1)}")
        remedies.append("unset OMP_NUM_THREADS")
    if pinned:
        problems.append(f"{', '.join(pinned)} would bind the threads of all ranks to the same cores")
        remedies.append(f"unset {' '.join(pinned)}")
    if problems:
        return Check("openmp", False, "; ".join(problems), "\n".join(remedies), required=False)
    return Check(
        "openmp", True, f"OMP_NUM_THREADS={threads}" if threads else "not set, as it should be", required=False
    )


def launcher_variables_check(environ: Mapping[str, str]) -> Check:
    """Whether RANK and its relatives are left in the shell: ``arriero train`` would wait as one rank of many."""
    left = [name for name in _LAUNCHER_VARIABLES if name in environ]
    if "RANK" in environ and "TORCHELASTIC_RUN_ID" not in environ:
        detail = "set: " + ", ".join(f"{name}={environ[name]}" for name in left)
        detail += "; arriero train takes itself for a rank that a launcher started, and waits for the others"
        return Check("launcher variables", False, detail, f"unset {' '.join(left)}", required=False)
    return Check("launcher variables", True, "RANK is not set; arriero train starts its own ranks", required=False)


def open_files_check(limit: int) -> Check:
    """Whether enough files may be open at once for a corpus of many shards and its loader."""
    text = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    ok = limit == resource.RLIM_INFINITY or limit >= _OPEN_FILES
    detail = f"{text} may be open at once" + ("" if ok else f"; fewer than {_OPEN_FILES} stop a run with many shards")
    return Check("open files", ok, detail, "" if ok else "ulimit -n 65536", required=False)


def locked_memory_check(limit: int, *, needed_for: str | None) -> Check:
    """Whether memory may be pinned without a limit, which InfiniBand and NVMe offload need. needed_for: None: neither."""
    text = "any amount" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    if limit == resource.RLIM_INFINITY or needed_for is None:
        why = f"{text} may be locked" + ("" if needed_for else "; nothing here needs more")
        return Check("locked memory", True, why, required=False)
    remedy = "ulimit -l unlimited  (in Docker: --ulimit memlock=-1; for Slurm: LimitMEMLOCK=infinity of slurmd)"
    return Check("locked memory", False, f"{text} may be locked; {needed_for} needs more", remedy, required=False)


def processes_check(limit: int) -> Check:
    """Whether enough processes and threads may be started: each rank has dozens."""
    ok = limit == resource.RLIM_INFINITY or limit >= _PROCESSES
    text = "any number" if limit == resource.RLIM_INFINITY else str(limit)
    detail = f"{text} may run" + ("" if ok else f"; fewer than {_PROCESSES} stop ranks with 'can't start new thread'")
    return Check("processes", ok, detail, "" if ok else "ulimit -u 65536", required=False)


def needs_locked_memory(recipe: Recipe | None) -> str | None:
    """What on this machine, or in the recipe, pins memory."""
    if recipe is not None and "nvme" in (recipe.parallel.offload_optimizer, recipe.parallel.offload_param):
        return "NVMe offload"
    cards = Path("/sys/class/infiniband")
    return "InfiniBand" if cards.is_dir() and any(cards.iterdir()) else None


def disk_check(folder: Path, checkpoint_bytes: int | None = None) -> Check:
    """Room, permission and speed where runs go: writes and syncs 64 MiB there. checkpoint_bytes: of the recipe's model."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            block, began = os.urandom(4 * 2**20), time.perf_counter()  # what compresses would tell of the compression
            for _ in range(16):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            speed = 16 * len(block) / (time.perf_counter() - began)
    except OSError as error:
        return Check("disk", False, f"{folder} can't be written: {error.strerror}", "set output_dir to another folder")
    detail = f"{format_bytes(free)} free in {folder}, written at {speed / 1e6:.0f} MB/s"
    if checkpoint_bytes is not None:
        detail += f": a checkpoint of {format_bytes(checkpoint_bytes)} takes {format_time(checkpoint_bytes / speed)}"
    wanted = max(checkpoint_bytes or 0, _FREE_DISK_BYTES)
    if free < wanted:
        remedy = f"free some space: du -xh {folder} | sort -h | tail"
        return Check("disk", False, f"{detail}; {format_bytes(wanted)} are needed", remedy)
    if speed < _SLOW_DISK_BYTES_S:
        remedy = "set output_dir to a local disk; a slow one makes checkpoints late, not wrong"
        return Check("disk", False, f"{detail}, less than {_SLOW_DISK_BYTES_S / 1e6:.0f} MB/s", remedy, required=False)
    return Check("disk", True, detail)


def shared_memory_check(folder: Path) -> Check:
    """Room in what loader workers and NCCL share."""
    if not folder.is_dir():
        return Check("shared memory", True, f"no {folder} on this system; nothing here needs it", required=False)
    free = shutil.disk_usage(folder).free
    ok = free >= _SHARED_MEMORY_BYTES
    detail = f"{format_bytes(free)} free in {folder}" + ("" if ok else "; loader workers and NCCL need more")
    return Check(
        "shared memory",
        ok,
        detail,
        "" if ok else "mount -o remount,size=8G /dev/shm  (in Docker: docker run --shm-size=8g …)",
        required=False,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
