"""What compiling DeepSpeed's operations needs, and taking turns at it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arriero.config.schema import Recipe
from arriero.doctor.finding import Check

_BUILD_AGE_S = 600.0  # async_io, the slowest of DeepSpeed's CPU builds, takes 180 s on two cores


def compiler_check(recipe: Recipe | None = None) -> Check:
    """Compile a file as DeepSpeed's operations are: C++20 with OpenMP and Python's headers, and ask ninja's version."""
    required = recipe is not None and offloads(recipe)
    needed_for = "needed only for offload, whose operations are compiled on first use"
    compiler = os.environ.get("CXX") or "c++"  # as torch.utils.cpp_extension chooses
    missing, remedies = [], []
    if problem := _compile_problem(compiler):
        missing.append(problem)
        remedies.append("unset CXX" if "CXX" in os.environ else "apt-get install g++ python3-dev")
    if not _ninja_runs():
        missing.append("no ninja")
        remedies.append("pip install ninja")
    if missing:
        detail = f"{'; '.join(missing)} ({needed_for})"
        return Check("c++ compiler", False, detail, "\n".join(remedies), required=required)
    return Check("c++ compiler", True, f"{compiler} and ninja work ({needed_for})", required=required)


def libaio_check(recipe: Recipe | None = None) -> Check:
    """Compile and link a file against libaio, through which DeepSpeed reads and writes NVMe."""
    required = recipe is not None and "nvme" in (recipe.parallel.offload_optimizer, recipe.parallel.offload_param)
    needed_for = "needed only for NVMe offload"
    compiler = os.environ.get("CXX") or "c++"
    source = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"
    with tempfile.TemporaryDirectory() as folder:
        problem = _run_compiler(compiler, source, ["-o", f"{folder}/aio", "-x", "c++", "-", "-laio"])
    if problem:
        return Check("libaio", False, f"{problem} ({needed_for})", "apt-get install libaio-dev", required=required)
    return Check("libaio", True, f"header and library are there ({needed_for})", required=required)


def cuda_check(facts: Mapping[str, Any], recipe: Recipe | None = None) -> Check:
    """CUDA's own compiler, in torch's version: DeepSpeed compiles its operations with it on a machine with GPUs."""
    required = recipe is not None and offloads(recipe)
    needed_for = "needed only for offload, whose operations are compiled on first use"
    if not facts["devices"]:
        return Check("cuda toolkit", True, "not needed without a GPU", required=False)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = next((path for path in (f"{home}/bin/nvcc", shutil.which("nvcc")) if path and Path(path).is_file()), None)
    wanted = str(facts["build"])
    if nvcc is None:
        remedy = f"install the CUDA toolkit {wanted} (nvcc), then: export CUDA_HOME=/usr/local/cuda-{wanted}"
        return Check("cuda toolkit", False, f"no nvcc in {home} or on PATH ({needed_for})", remedy, required=required)
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    version = f"{found[1]}.{found[2]}" if found else "unknown"
    if found is None or found[1] != wanted.partition(".")[0]:
        remedy = f"export CUDA_HOME=/usr/local/cuda-{wanted}  (a toolkit of torch's version)"
        detail = f"{nvcc} is version {version}, torch was built with {wanted}: DeepSpeed refuses that ({needed_for})"
        return Check("cuda toolkit", False, detail, remedy, required=required)
    return Check("cuda toolkit", True, f"nvcc {version} in {nvcc} ({needed_for})", required=required)


def offloads(recipe: Recipe) -> bool:
    return (recipe.parallel.offload_optimizer, recipe.parallel.offload_param) != ("none", "none")


def _compile_problem(compiler: str) -> str | None:
    source = (
        "#include <Python.h>\n#include <omp.h>\n#include <vector>\nint main() { return omp_get_max_threads() < 1; }\n"
    )
    include = sysconfig.get_path("include")
    return _run_compiler(
        compiler, source, ["-std=c++20", "-fopenmp", f"-I{include}", "-fsyntax-only", "-x", "c++", "-"]
    )


def _run_compiler(compiler: str, source: str, arguments: Sequence[str]) -> str | None:
    """What went wrong, or None."""
    command = [*compiler.split(), *arguments]
    try:
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} doesn't run: {error}"
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if "error" in line] or ["unknown error"]
    return f"{compiler} can't compile an extension: {errors[0]}"


def _ninja_runs() -> bool:
    """On PATH, or beside the interpreter, where pip puts it and ``build_turn`` finds it."""
    names = ("ninja", str(Path(sys.executable).parent / "ninja"))
    return any(_runs([name, "--version"]) for name in names)


def _runs(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def jit_lock_check(folders: Sequence[Path]) -> Check:
    """Whether a killed build of a DeepSpeed operation left its lock: the next process waits for it for ever, and says
    nothing. A lock that a living process of this machine holds open is a build under way.
    """
    stale: list[Path] = []
    building: list[Path] = []
    for lock in (lock for folder in folders for depth in ("*/lock", "*/*/lock") for lock in sorted(folder.glob(depth))):
        (building if _is_held(lock) else stale).append(lock)
    if stale:
        remedy = "rm " + " ".join(f"'{lock}'" for lock in stale)
        detail = f"left by a killed build of {', '.join(lock.parent.name for lock in stale)}; what uses it would wait for ever"
        return Check("build locks", False, detail, remedy, required=False)
    if building:
        return Check("build locks", True, f"{building[0].parent.name} is being compiled just now", required=False)
    return Check("build locks", True, "no killed build in the way", required=False)


def built(name: str) -> bool:
    """Whether the library of one of DeepSpeed's operations lies where torch builds extensions."""
    (root,) = extension_folders(os.environ)
    return any(root.glob(f"{name}/{name}.so")) or any(root.glob(f"*/{name}/{name}.so"))


@contextmanager
def build_turn(names: Sequence[str]) -> Iterator[list[str]]:
    """Be the only process of arriero on this host that builds these operations; gives what a person should be told.

    Waits for another's turn to end, however it ends: the kernel drops a killed process's file lock. Inside, a lock file
    that torch left behind in a killed build is removed, on which its next build would wait for ever; one that a living
    process holds, another program that builds the same, is left to it.
    """
    if shutil.which("ninja") is None:
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    (root,) = extension_folders(os.environ)
    root.mkdir(parents=True, exist_ok=True)
    with (root / "arriero-build.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        said = []
        for lock in (lock for depth in ("*/lock", "*/*/lock") for lock in root.glob(depth)):
            if lock.parent.name in names and not _is_held(lock):
                lock.unlink(missing_ok=True)
                said.append(f"removed {lock}, left by a killed build of {lock.parent.name}")
        yield said


def _is_held(lock: Path) -> bool:
    """torch's FileBaton keeps the lock file open for as long as it builds."""
    processes, wanted = Path("/proc"), lock.resolve()
    if not (processes / "self" / "fd").is_dir():
        return lock.exists() and time.time() - lock.stat().st_mtime < _BUILD_AGE_S
    for links in processes.glob("[0-9]*/fd"):
        try:
            if any(link.readlink() == wanted for link in links.iterdir()):
                return True
        except OSError:
            continue  # ended meanwhile, or another user's
    return not lock.exists()  # released while we looked


def extension_folders(environ: Mapping[str, str]) -> list[Path]:
    """Where torch builds extensions."""
    if folder := environ.get("TORCH_EXTENSIONS_DIR"):
        return [Path(folder)]
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [cache / "torch_extensions"]
