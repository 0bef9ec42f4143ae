"""What this machine can run, what is missing, and the line that mends it. Each check does the thing it speaks of.

Imports and gloo are tried in child processes: a broken build may abort the interpreter, and a network may hang.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from arriero.config.load import load_recipe
from arriero.config.schema import Recipe
from arriero.errors import UserError
from arriero.units import format_bytes


@dataclass(frozen=True)
class Check:
    """One finding. ``ok`` False with ``required`` False is something to know, not something in the way."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = True


@dataclass(frozen=True)
class BadPair:
    """Two installed packages that don't work together, whatever their own metadata says."""

    one: str
    other: str
    reason: str
    remedy: str
    required: bool = False
    """Whether it is training that breaks, or only the other package."""


KNOWN_BAD = (
    BadPair(
        "transformers>=5.1,<5.2",
        "deepspeed",
        "transformers 5.1 broke its ZeRO integration (huggingface/transformers#43780)",
        "pip install 'transformers>=5.16,<6'",
        required=True,
    ),
    BadPair(
        "swanlab<=0.10.3",
        "protobuf>=7",
        "swanlab 0.10 reads its files with protobuf 6",
        "pip install 'protobuf>=6.31,<7'",
    ),
    BadPair(
        "vllm<=0.33",
        "transformers>=5.21",
        "vllm 0.33 is written for transformers below 5.21 and its own torch",
        "install vllm in an environment of its own, or: pip install 'transformers>=5.16.1,<5.21'",
    ),
    BadPair(
        "mosaicml-streaming<=0.13",
        "transformers>=5",
        "mosaicml-streaming 0.13 needs transformers 4 and numpy below 2.2",
        "pip uninstall mosaicml-streaming",
    ),
    BadPair(
        "litgpt<=0.5.13",
        "huggingface-hub>=1.4",
        "litgpt 0.5.13 needs huggingface-hub below 1.4, transformers 5 a newer one",
        "install litgpt in an environment of its own",
    ),
    BadPair(
        "optimum-intel",
        "transformers>=5.6",
        "optimum-intel needs transformers below 5.6",
        "pip uninstall optimum-intel",
    ),
    BadPair(
        "fasttext<=0.9.3",
        "numpy>=2",
        "fasttext 0.9.3 calls what numpy 2 removed",
        "pip uninstall fasttext",
    ),
)

# Why a package matters is said where its absence gives a misleading error (transformers asks for tiktoken when it is
# sentencepiece or protobuf that it misses).
_NAMED = {
    "torch": ("torch", ""),
    "deepspeed": ("deepspeed", ""),
    "transformers": ("transformers", ""),
    "tokenizers": ("tokenizers", ""),
    "gigatoken": ("gigatoken", ""),
    "sentencepiece": ("sentencepiece", "reads tokenizer.model (Llama 1 and 2, Mistral)"),
    "protobuf": ("google.protobuf", "reads tokenizer.model (Llama 1 and 2, Mistral)"),
    "tiktoken": ("tiktoken", "reads Llama-3-style rank files"),
}
_OTHER_MODULES = {"pyyaml": "yaml"}
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CHILD_LIMIT_S = 180.0  # importing torch, deepspeed and transformers takes 3 s here, a minute from a cold network disk
_GLOO_LIMIT_S = 60.0
_FREE_DISK_BYTES = 2 * 1024**3  # the demo's run folder, dataset and tokenizer together stay below 1 GiB
_SHARED_MEMORY_BYTES = 512 * 1024**2  # Docker gives 64 MiB, too little for loader workers and for NCCL
_OPEN_FILES = 1024
_BUILD_AGE_S = 600.0  # async_io, the slowest of DeepSpeed's CPU builds, takes 180 s on two cores

# Each line that is ours carries a mark: importing deepspeed prints to stdout.
_MARK = "arriero-doctor "
_IMPORTS = """
import importlib, json, sys
def tell(**words): print("arriero-doctor " + json.dumps(words), flush=True)
for name in sys.argv[1:]:
    tell(begin=name)
    try:
        importlib.import_module(name)
    except BaseException as error:
        tell(module=name, error=f"{type(error).__name__}: {error}".splitlines()[0])
    else:
        tell(module=name, error=None)
try:
    import torch
except BaseException:
    sys.exit()
devices, failed = [], None
try:
    for index in range(torch.cuda.device_count()):
        devices.append(torch.cuda.get_device_name(index))
        square = torch.ones(256, 256, device=f"cuda:{index}")
        if (square @ square).sum().item() != 256.0 ** 3:
            failed = f"cuda:{index} gives a wrong product"
except Exception as error:
    failed = str(error).splitlines()[0]
distributed = torch.distributed.is_available()
nccl = distributed and torch.distributed.is_nccl_available()
tell(torch=dict(
    build=torch.version.cuda or torch.version.hip, devices=devices, failed=failed,
    nccl=".".join(map(str, torch.cuda.nccl.version())) if nccl and devices else None,
    capability=torch.backends.cpu.get_cpu_capability(),
    bf16=torch.ops.mkldnn._is_mkldnn_bf16_supported(), fp16=torch.ops.mkldnn._is_mkldnn_fp16_supported(),
))
"""
# Two ranks in two threads: a real store, a real full mesh over the interface that gloo picks, a real sum.
_GLOO = """
import datetime, threading, torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
limit, failed, sums = datetime.timedelta(seconds=10), [], {}
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
def work(rank):
    try:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit)
        group = ProcessGroupGloo(PrefixStore("doctor", client), rank, 2, limit)
        value = torch.tensor([rank + 1.0])
        group.allreduce([value]).wait()
        sums[rank] = value.item()
    except Exception as error:
        failed.append(str(error).splitlines()[0])
ranks = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
for rank in ranks: rank.start()
for rank in ranks: rank.join(20)
if sums != {0: 3.0, 1: 3.0}:
    raise SystemExit(failed[0] if failed else f"no answer within 20 s, sums {sums}")
"""


def run_checks(recipe_path: Path | None = None) -> list[Check]:
    """Every check, in the order in which they are best read; about five seconds.

    With a recipe, also what that recipe needs: its inputs, its precision, room in its output folder.
    """
    requirements = own_requirements()
    modules = [module for module, _ in _NAMED.values()]
    modules += [_module_of(name) for name in requirements if name not in _NAMED]
    imports, gloo = _Child(_IMPORTS, *modules), _Child(_GLOO)
    try:
        recipe, recipe_checks = _recipe_checks(recipe_path)
        installed, cores = installed_versions(), _usable_cores()
        answers = _Answers(*imports.result(_CHILD_LIMIT_S))
        return [
            _python_check(),
            *package_checks(requirements, installed, answers.errors),
            conflict_check(installed),
            bad_pair_check(installed),
            _machine_check(cores),
            *_torch_checks(answers.torch, recipe),
            compiler_check(recipe),
            libaio_check(recipe),
            jit_lock_check(_extension_folders(os.environ)),
            gloo_check(*gloo.result(_GLOO_LIMIT_S), os.environ),
            host_name_check(os.environ),
            launcher_variables_check(os.environ),
            openmp_check(os.environ, cores=cores),
            _shared_memory_check(Path("/dev/shm")),
            open_files_check(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
            disk_check(Path(recipe.output_dir) if recipe else Path.cwd()),
            *recipe_checks,
        ]
    finally:
        imports.stop()
        gloo.stop()


def all_ok(checks: Sequence[Check]) -> bool:
    """Whether no required check failed."""
    return all(check.ok or not check.required for check in checks)


# Packages


def own_requirements() -> dict[str, Requirement]:
    """Our core dependencies with their ranges, from the installed metadata; empty if arriero isn't installed."""
    try:
        texts = metadata.requires("arriero") or []
    except metadata.PackageNotFoundError:
        return {}
    return {canonicalize_name(requirement.name): requirement for requirement in _applicable(texts)}


def installed_versions() -> dict[str, str]:
    """Version by canonical name of everything that is installed; the first on the path wins, as in an import."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            versions.setdefault(canonicalize_name(name), distribution.version)
    return versions


def package_checks(
    requirements: Mapping[str, Requirement], installed: Mapping[str, str], import_errors: Mapping[str, str | None]
) -> list[Check]:
    """Version in our range and importable: one check for each package that people ask about, one for the rest.

    ``import_errors`` has a module's error, or None where the import worked; a module that is missing in it was never
    reached.
    """
    if not requirements:
        remedy = "pip install arriero  (or, in a source checkout: pip install -e .)"
        return [Check("packages", False, "arriero isn't installed, so its version ranges are unknown", remedy)]
    checks, others = [], []
    for name, requirement in requirements.items():
        module, purpose = _NAMED.get(name, (_module_of(name), ""))
        problem = _package_problem(requirement, installed.get(name), module, import_errors)
        if name in _NAMED:
            words = [installed.get(name, ""), purpose] if problem is None else [problem, purpose]
            detail = "; ".join(word for word in words if word)
            checks.append(Check(name, problem is None, detail, _install(requirement) if problem else ""))
        elif problem is not None:
            others.append((f"{name}: {problem}", requirement))
    checks.sort(key=lambda check: list(_NAMED).index(check.name))
    if others:
        remedy = "pip install " + " ".join(f"'{requirement}'" for _, requirement in others)
        checks.append(Check("other packages", False, "; ".join(problem for problem, _ in others), remedy))
    else:
        checks.append(Check("other packages", True, f"{len(requirements) - len(checks)} in their ranges, importable"))
    return checks


def conflict_check(installed: Mapping[str, str]) -> Check:
    """Whether our packages' own requirements hold, and theirs, down to the last: what ``pip check`` asks."""
    problems, seen, queue = [], {"arriero"}, ["arriero"]
    while queue:
        name = queue.pop()
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # named as missing by the package that requires it
        for requirement in _applicable(texts):
            needed = canonicalize_name(requirement.name)
            version = installed.get(needed)
            if version is None:
                problems.append((f"{name} needs {requirement}, which is missing", requirement))
            elif not requirement.specifier.contains(version, prereleases=True):
                problems.append((f"{name} needs {requirement}, installed is {version}", requirement))
            if needed not in seen:
                seen.add(needed)
                queue.append(needed)
    if not problems:
        return Check("versions agree", True, f"{len(seen) - 1} packages, no conflict among them")
    remedy = "pip install " + " ".join(dict.fromkeys(f"'{_bare(requirement)}'" for _, requirement in problems))
    return Check("versions agree", False, "; ".join(problem for problem, _ in problems), remedy)


def bad_pair_check(installed: Mapping[str, str]) -> Check:
    """Whether two installed packages are known not to work together."""
    found = [pair for pair in KNOWN_BAD if all(_matches(text, installed) for text in (pair.one, pair.other))]
    if not found:
        return Check("known bad pairs", True, f"none of {len(KNOWN_BAD)} installed")
    return Check(
        "known bad pairs",
        False,
        "; ".join(f"{pair.one} with {pair.other}: {pair.reason}" for pair in found),
        "\n".join(pair.remedy for pair in found),
        required=any(pair.required for pair in found),
    )


def _package_problem(
    requirement: Requirement, version: str | None, module: str, import_errors: Mapping[str, str | None]
) -> str | None:
    if version is None:
        return f"not installed (needs {requirement})"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is outside {requirement.specifier}"
    if module not in import_errors:
        return f"{version}; its import was not reached"
    error = import_errors[module]
    return None if error is None else f"{version}; import fails: {error}"


def _applicable(texts: Sequence[str]) -> Iterator[Requirement]:
    """The requirements that hold here without any extra."""
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _matches(text: str, installed: Mapping[str, str]) -> bool:
    requirement = Requirement(text)
    version = installed.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _module_of(name: str) -> str:
    return _OTHER_MODULES.get(name, name.replace("-", "_"))


def _bare(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _install(requirement: Requirement) -> str:
    return f"pip install --force-reinstall --no-deps '{_bare(requirement)}'"


# Python and the machine


def _python_check() -> Check:
    version = platform.python_version()
    try:
        wanted = metadata.metadata("arriero")["Requires-Python"] or ">=3.11"
    except metadata.PackageNotFoundError:
        wanted = ">=3.11"
    ok = Requirement(f"python{wanted}").specifier.contains(version, prereleases=True)
    return Check("python", ok, f"{version} ({sys.executable})", "" if ok else f"make a venv with Python {wanted}")


def _machine_check(cores: int) -> Check:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read(Path("/sys/fs/cgroup/memory.max"))
    if limit.isdigit():
        memory_bytes = min(memory_bytes, int(limit))
    text = (
        f"{platform.system()} {platform.machine()}, {cores} CPU core{'s' * (cores != 1)}, {format_bytes(memory_bytes)}"
    )
    return Check("machine", True, text, required=False)


def _usable_cores() -> int:
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


def disk_check(folder: Path) -> Check:
    """Room and permission to write where runs go; writes and syncs 1 MiB there to see."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 2**20)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Check("disk", False, f"{folder} can't be written: {error.strerror}", "set output_dir to another folder")
    ok = free >= _FREE_DISK_BYTES
    detail = f"{format_bytes(free)} free in {folder}"
    remedy = "" if ok else f"free some space: du -xh {folder} | sort -h | tail"
    return Check("disk", ok, detail + ("" if ok else f", less than {format_bytes(_FREE_DISK_BYTES)}"), remedy)


def _shared_memory_check(folder: Path) -> Check:
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


# Compiling


def compiler_check(recipe: Recipe | None = None) -> Check:
    """Compile a file as DeepSpeed's operations are: C++20 with OpenMP and Python's headers, and ask ninja's version."""
    required = recipe is not None and _offloads(recipe)
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


def _offloads(recipe: Recipe) -> bool:
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
    (root,) = _extension_folders(os.environ)
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
    (root,) = _extension_folders(os.environ)
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


def _extension_folders(environ: Mapping[str, str]) -> list[Path]:
    """Where torch builds extensions."""
    if folder := environ.get("TORCH_EXTENSIONS_DIR"):
        return [Path(folder)]
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [cache / "torch_extensions"]


# Ranks


def host_name_check(environ: Mapping[str, str]) -> Check:
    """Whether other machines could reach this one by the address that gloo picks, that of the host name."""
    host, names = socket.gethostname(), [name for _, name in socket.if_nameindex()]
    chosen = environ.get("GLOO_SOCKET_IFNAME")
    outside = [name for name in names if not name.startswith(("lo", "ifb", "dummy"))]
    remedy = f"export GLOO_SOCKET_IFNAME={outside[0] if outside else 'eth0'}"
    if chosen is not None:
        unknown = [name for name in chosen.split(",") if name not in names]
        detail = f"GLOO_SOCKET_IFNAME={chosen}" + (f", but the interfaces are {', '.join(names)}" if unknown else "")
        return Check("host name", not unknown, detail, remedy if unknown else "", required=False)
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError as error:
        detail = f"{host} doesn't resolve ({error.strerror}); fine for one machine, several need the interface"
        return Check("host name", False, detail, remedy, required=False)
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        detail = f"{host} is {', '.join(addresses)}, which no other machine reaches; fine for one machine"
        return Check("host name", False, detail, f"{remedy}  (only for runs on several machines)", required=False)
    return Check("host name", True, f"{host} is {', '.join(addresses)}", required=False)


def gloo_check(returncode: int | None, output: str, environ: Mapping[str, str]) -> Check:
    """From the child that summed over two ranks; ``returncode`` None: it didn't end in time."""
    if returncode == 0:
        return Check("gloo", True, "two ranks on this machine found each other and summed")
    lines = [line for line in output.splitlines() if line.strip()] or [f"exit code {returncode}"]
    problem = f"no answer within {_GLOO_LIMIT_S:.0f} s" if returncode is None else lines[-1]
    remedy = "unset GLOO_SOCKET_IFNAME" if environ.get("GLOO_SOCKET_IFNAME") else "export GLOO_SOCKET_IFNAME=lo"
    return Check("gloo", False, f"two ranks on this machine can't talk: {problem}", remedy)


def _torch_checks(facts: Mapping[str, Any] | None, recipe: Recipe | None) -> list[Check]:
    """GPU, bf16 and fp16 from what the import child saw; nothing where torch itself failed, which is said already."""
    if facts is None:
        return []
    return [gpu_check(facts, has_nvidia=Path("/dev/nvidia0").exists()), *precision_checks(facts, recipe)]


def gpu_check(facts: Mapping[str, Any], *, has_nvidia: bool) -> Check:
    """Which GPUs computed a product, or why there are none."""
    devices = facts["devices"]
    if facts["failed"]:
        remedy = "nvidia-smi  (then install the driver that your torch build asks for)"
        return Check("gpu", False, f"{', '.join(devices) or 'CUDA'}: {facts['failed']}", remedy)
    if devices:
        counts = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
        if facts["nccl"] is None and len(devices) > 1:
            return Check("gpu", False, f"{counts}, but this torch has no NCCL", "install the CUDA build of torch")
        return Check("gpu", True, f"{counts}, CUDA {facts['build']}, NCCL {facts['nccl'] or 'none'}", required=False)
    if has_nvidia:
        detail = f"an NVIDIA device is here, but torch ({facts['build'] or 'CPU build'}) doesn't see it; CPU is used"
        remedy = "pip install --force-reinstall torch  (the build for your CUDA; see pytorch.org)"
        return Check("gpu", False, detail, remedy, required=False)
    return Check(
        "gpu", True, "none: training runs on the CPU, ranks talk over gloo (NCCL isn't needed)", required=False
    )


def precision_checks(facts: Mapping[str, Any], recipe: Recipe | None = None) -> list[Check]:
    """bf16 and fp16 on what a run would use; required if the recipe asks for that precision."""
    wanted = recipe.train.precision if recipe else None
    if facts["devices"]:
        return [Check("bf16", True, "on the GPU", required=False), Check("fp16", True, "on the GPU", required=False)]
    bf16, fp16, kind = facts["bf16"], facts["fp16"], facts["capability"]
    return [
        Check(
            "bf16",
            bf16,
            f"computed by this CPU ({kind})" if bf16 else f"emulated on this CPU ({kind}): right, but slower than fp32",
            "" if bf16 else "arriero train RECIPE train.precision=fp32",
            required=False,
        ),
        Check(
            "fp16",
            fp16 or wanted != "fp16",
            "computed by this CPU" if fp16 else "DeepSpeed refuses it on this CPU; bf16 and fp32 work",
            "arriero train RECIPE train.precision=bf16" if not fp16 and wanted == "fp16" else "",
            required=wanted == "fp16",
        ),
    ]


# The recipe


def _recipe_checks(path: Path | None) -> tuple[Recipe | None, list[Check]]:
    if path is None:
        return None, []
    try:
        recipe = load_recipe(path)
    except UserError as error:
        return None, [Check("recipe", False, error.problem, error.remedy)]
    missing = [source.path for source in recipe.data.sources if not _dataset_exists(Path(source.path))]
    if missing:
        remedy = f"arriero prepare TEXT --tokenizer {recipe.model.tokenizer or 'DIR'} --out {missing[0]}"
        return recipe, [Check("recipe", False, f"{path} is valid, but not prepared: {', '.join(missing)}", remedy)]
    return recipe, [Check("recipe", True, f"{path} is valid, its {len(recipe.data.sources)} datasets are there")]


def _dataset_exists(path: Path) -> bool:
    return path.exists() or path.with_name(f"{path.name}.bin").exists()


# Children


class _Child:
    """``python -c script arguments…``, its output in one pipe."""

    def __init__(self, script: str, *arguments: str) -> None:
        command = [sys.executable, "-c", script, *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def result(self, limit_s: float) -> tuple[int | None, str]:
        """Exit code (None: stopped after ``limit_s``) and output."""
        try:
            output, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            return None, output
        return self.process.returncode, output

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


class _Answers:
    """What the import child said: an error or None by module, and facts about torch if it got that far."""

    def __init__(self, returncode: int | None, output: str) -> None:
        self.errors: dict[str, str | None] = {}
        self.torch: dict[str, Any] | None = None
        begun = None
        for line in output.splitlines():
            if not line.startswith(_MARK):
                continue
            said = json.loads(line.removeprefix(_MARK))
            begun = said.get("begin", begun)
            if "module" in said:
                self.errors[said["module"]] = said["error"]
            self.torch = said.get("torch", self.torch)
        if begun is not None and begun not in self.errors:
            how = f"no end within {_CHILD_LIMIT_S:.0f} s" if returncode is None else f"died with code {returncode}"
            self.errors[begun] = f"the interpreter {how} while importing it"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
