"""doctor: each check against the real thing, working and broken."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from typer.testing import CliRunner

from arriero.cli.info_commands import doctor_command
from arriero.config.schema import Recipe
from arriero.doctor import children, machine
from arriero.doctor.building import (
    build_turn,
    compiler_check,
    cuda_check,
    extension_folders,
    jit_lock_check,
    libaio_check,
)
from arriero.doctor.devices import gpu_check, peer_checks, precision_checks
from arriero.doctor.finding import Check, all_ok
from arriero.doctor.machine import (
    disk_check,
    launcher_variables_check,
    locked_memory_check,
    open_files_check,
    openmp_check,
    processes_check,
    shared_memory_check,
)
from arriero.doctor.network import gloo_check, host_name_check, rendezvous_check
from arriero.doctor.packages import (
    KNOWN_BAD,
    NAMED,
    bad_pair_check,
    conflict_check,
    installed_versions,
    module_of,
    own_requirements,
    package_checks,
)
from arriero.doctor.recipe import dry_run_checks

CPU_FACTS: Mapping[str, Any] = {
    "build": None,
    "devices": [],
    "memory": [],
    "peers": None,
    "nccl_failed": None,
    "link": None,
    "failed": None,
    "nccl": None,
    "capability": "AVX2",
    "bf16": True,
    "fp16": False,
}
RECIPE = """
output_dir: {folder}/run
model: {{config: {{hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1, vocab_size: 64}}, tokenizer: tok}}
data: {{sources: [{{path: {folder}/prepared}}, {{path: {folder}/missing}}]}}
train: {{max_steps: 1}}
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """Exit code and output of one real ``doctor RECIPE --json``, of whose two datasets one isn't there."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "prepared").mkdir()
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    app = typer.Typer()
    app.command()(doctor_command)
    result = CliRunner().invoke(app, [str(folder / "recipe.yaml"), "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_whole_answer(answer: tuple[int, dict[str, Any]]) -> None:
    code, said = answer
    checks = {check["name"]: check for check in said["checks"]}
    assert len(checks) == len(said["checks"]), "two checks of one name"
    assert all({"name", "ok", "detail", "remedy"} <= set(check) and check["detail"] for check in said["checks"])
    assert all(check["remedy"] for check in said["checks"] if not check["ok"])
    # What the rest of this suite needs in order to run at all:
    needed = [*NAMED, "python", "other packages", "versions agree", "gloo", "disk"]
    assert {name: checks[name]["detail"] for name in needed if not checks[name]["ok"]} == {}
    assert {"gpu", "bf16", "fp16", "build locks", "openmp", "shared memory", "open files"} <= set(checks)
    assert {"rendezvous", "processes", "locked memory", "cuda toolkit", "memory"} <= set(checks)
    assert checks["recipe"]["ok"]
    assert checks["memory"]["ok"]
    assert not checks["dry run"]["ok"]
    assert "/missing" in checks["dry run"]["detail"]
    assert "/prepared" not in checks["dry run"]["detail"]
    assert [line.split()[1] for line in checks["dry run"]["remedy"].splitlines()] == ["tokenizer", "prepare"]
    assert "MB/s: a checkpoint of" in checks["disk"]["detail"]
    assert (code, said["ok"]) == (1, False)


def test_only_required_checks_decide() -> None:
    note = Check("note", False, "to know", "do", required=False)
    assert all_ok([Check("a", True, ""), note])
    assert not all_ok([Check("a", True, ""), note, Check("b", False, "", "do")])


def test_version_ranges_are_our_metadata() -> None:
    requirements = own_requirements()
    assert {"torch", "deepspeed", "transformers", "tokenizers", "gigatoken"} <= set(requirements)
    assert "pytest" not in requirements  # an extra
    imported = dict.fromkeys([*(module for module, _ in NAMED.values()), *map(module_of, requirements)])
    installed = dict.fromkeys(requirements, "9999")
    by_name = {check.name: check for check in package_checks(requirements, installed, imported)}
    assert not by_name["deepspeed"].ok
    assert by_name["deepspeed"].detail == f"9999 is outside {requirements['deepspeed'].specifier}"
    assert f"'deepspeed{requirements['deepspeed'].specifier}'" in by_name["deepspeed"].remedy
    assert by_name["torch"].ok  # has no upper end
    fine = package_checks(requirements, installed_versions(), imported)
    assert [check for check in fine if not check.ok] == []


def test_missing_broken_and_unreached_packages_are_told_apart() -> None:
    requirements = {name: Requirement(text) for name, text in (("torch", "torch>=2"), ("tiktoken", "tiktoken"))}
    requirements |= {"numpy": Requirement("numpy>=2"), "pyyaml": Requirement("pyyaml"), "rich": Requirement("rich>=13")}
    installed = {"torch": "2.9.1+cpu", "numpy": "1.26", "pyyaml": "6.0", "rich": "13.0"}
    errors = {"torch": "ImportError: libtorch.so", "numpy": None, "yaml": None}
    checks = {check.name: check for check in package_checks(requirements, installed, errors)}
    assert checks["torch"].detail == "2.9.1+cpu; import fails: ImportError: libtorch.so"
    assert checks["tiktoken"].detail.startswith("not installed (needs tiktoken)")
    assert checks["other packages"].detail == "numpy: 1.26 is outside >=2; rich: 13.0; its import was not reached"
    assert checks["other packages"].remedy == "pip install 'numpy>=2' 'rich>=13'"
    (only,) = package_checks({}, installed, errors)
    assert not only.ok
    assert "isn't installed" in only.detail


def test_conflicts_further_down_are_found() -> None:
    installed = installed_versions()
    assert conflict_check(installed).ok
    broken = conflict_check({**installed, "huggingface-hub": "0.1"})  # which transformers requires, not we
    assert not broken.ok
    assert "transformers needs huggingface-hub" in broken.detail
    assert "installed is 0.1" in broken.detail
    missing = conflict_check({name: version for name, version in installed.items() if name != "huggingface-hub"})
    assert "which is missing" in missing.detail
    assert missing.remedy.startswith("pip install 'huggingface-hub")


def test_known_bad_pairs() -> None:
    for pair in KNOWN_BAD:
        assert Requirement(pair.one).name != Requirement(pair.other).name
        assert pair.reason
        assert pair.remedy
    assert bad_pair_check({"transformers": "5.24.0", "deepspeed": "0.19.8", "protobuf": "7.1"}).ok
    ours = bad_pair_check({"transformers": "5.1.0", "deepspeed": "0.19.8"})
    assert (ours.ok, ours.required) == (False, True)
    theirs = bad_pair_check({"swanlab": "0.10.3", "protobuf": "7.1"})
    assert (theirs.ok, theirs.required) == (False, False)
    assert "protobuf 6" in theirs.detail


def test_an_import_that_kills_the_interpreter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("print('noise on stdout')\nraise RuntimeError('two\\nlines')\n")
    (tmp_path / "killing_module.py").write_text("import os; os.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = children.Child(children.IMPORTS, "json", "broken_module", "killing_module", "never_reached")
    answers = children.Answers(*child.result(60))
    assert answers.errors["json"] is None
    assert answers.errors["broken_module"] == "RuntimeError: two"
    assert "died with code -6" in str(answers.errors["killing_module"])
    assert "never_reached" not in answers.errors
    assert answers.torch is None


def test_a_child_that_hangs_is_stopped() -> None:
    child = children.Child('import time; print(\'arriero-doctor {"begin": "m"}\', flush=True); time.sleep(60)')
    answers = children.Answers(*child.result(1.0))
    assert child.process.poll() is not None
    assert "no end within" in str(answers.errors["m"])


def test_gloo_on_an_interface_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-if")
    code, output = children.Child(children.GLOO).result(60)
    check = gloo_check(code, output, os.environ)
    assert not check.ok
    assert check.required
    assert "no-such-if" in check.detail
    assert check.remedy == "unset GLOO_SOCKET_IFNAME"
    assert "no answer" in gloo_check(None, "", {}).detail


def test_host_name() -> None:
    interfaces = [name for _, name in socket.if_nameindex()]
    assert host_name_check({"GLOO_SOCKET_IFNAME": interfaces[0]}).ok
    wrong = host_name_check({"GLOO_SOCKET_IFNAME": f"{interfaces[0]},nope"})
    assert not wrong.ok
    assert interfaces[0] in wrong.detail
    plain = host_name_check({})
    assert socket.gethostname() in plain.detail
    assert not plain.required
    assert plain.ok or plain.remedy.startswith("export GLOO_SOCKET_IFNAME=")


@pytest.fixture
def extensions(tmp_path: Path) -> Path:
    for name in ("py311_cpu/cpu_adam", "py311_cpu/deepspeed_shm_comm", "other"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def test_build_locks(extensions: Path) -> None:
    assert jit_lock_check([extensions, extensions / "missing"]).ok
    lock = extensions / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    descriptor = os.open(lock, os.O_CREAT | os.O_EXCL)  # as torch's FileBaton does
    building = jit_lock_check([extensions])
    os.close(descriptor)  # the builder was killed
    assert building.ok
    assert "deepspeed_shm_comm is being compiled" in building.detail
    stale = jit_lock_check([extensions])
    assert (stale.ok, stale.required, stale.remedy) == (False, False, f"rm '{lock}'")
    lock.rename(extensions / "other" / "lock")  # TORCH_EXTENSIONS_DIR has one level less
    other = jit_lock_check([extensions])
    assert (other.ok, other.required) == (False, False)


def test_extension_folders() -> None:
    assert extension_folders({"TORCH_EXTENSIONS_DIR": "/x"}) == [Path("/x")]
    assert extension_folders({"XDG_CACHE_HOME": "/c"}) == [Path("/c/torch_extensions")]
    assert extension_folders({}) == [Path.home() / ".cache" / "torch_extensions"]


def test_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    nothing = compiler_check()
    assert (nothing.ok, nothing.required) == (False, False)
    assert "c++ doesn't run" in nothing.detail
    assert "apt-get install g++" in nothing.remedy
    monkeypatch.setenv("PATH", path)
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    wrapper = tmp_path / "c++-without-openmp"
    wrapper.write_text('#!/bin/sh\necho "x.cpp:2: fatal error: omp.h: No such file or directory" >&2\nexit 1\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    broken = compiler_check()
    assert "omp.h" in broken.detail
    assert broken.remedy.splitlines()[0] == "unset CXX"


def test_ninja_that_is_only_in_the_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no ninja" in compiler_check().detail
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text("#!/bin/sh\necho 1.11\n")
    ninja.chmod(0o755)
    assert "ninja" not in compiler_check().detail.partition("(")[0]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    with build_turn(["anything"]):
        assert shutil.which("ninja") == str(ninja), "torch looks for it on PATH"


def offloading(device: str) -> Recipe:
    value = {
        "output_dir": "x",
        "model": {"model_name_or_path": "m"},
        "data": {"sources": [{"path": "d"}]},
        "train": {"max_steps": 1},
        "parallel": {"zero_stage": 3, "offload_optimizer": device, "nvme_path": "/disk" if device == "nvme" else None},
    }
    return Recipe.model_validate(value)


def test_what_offload_needs_is_required_by_a_recipe_that_offloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert not compiler_check().required
    assert not compiler_check(offloading("none")).required
    assert compiler_check(offloading("cpu")).required
    assert [libaio_check(offloading(device)).required for device in ("none", "cpu", "nvme")] == [False, False, True]


def test_libaio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the header the compiler's own words, and the package to install; with it, a program that links."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    wrapper = tmp_path / "c++-without-libaio"
    wrapper.write_text('#!/bin/sh\necho "1:10: fatal error: libaio.h: No such file or directory" >&2\nexit 1\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    missing = libaio_check()
    assert (missing.ok, missing.required, missing.remedy) == (False, False, "apt-get install libaio-dev")
    assert "libaio.h" in missing.detail
    monkeypatch.setenv("CXX", compiler)
    there = any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))
    assert libaio_check().ok == there


def test_a_turn_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time; a killed builder's turn ends with it, and what it left behind is removed and said."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    code = (
        "import os, sys, time\nfrom arriero.doctor.building import build_turn\n"
        "with build_turn(['cpu_adam']):\n"
        f"    lock = os.open({str(folder / 'lock')!r}, os.O_CREAT | os.O_EXCL)\n"
        "    print('building', flush=True); time.sleep(300)\n"
    )
    builder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert builder.stdout is not None
    assert builder.stdout.readline() == "building\n"
    entered: list[list[str]] = []

    def build_next() -> None:
        with build_turn(["cpu_adam"]) as said:
            entered.append(list(said))

    waiting = threading.Thread(target=build_next, daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive(), "the other is still building"
    builder.kill()
    waiting.join(30)
    assert entered == [[f"removed {folder / 'lock'}, left by a killed build of cpu_adam"]]
    assert not (folder / "lock").exists()
    builder.wait()
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_EXCL)
    with build_turn(["cpu_adam"]) as said:
        assert said == [], "a living process of another program holds it"
    os.close(descriptor)
    with build_turn(["async_io"]) as said:
        assert said == [], "another operation's lock is none of ours"


@pytest.mark.parametrize(
    ("environ", "cores", "ok", "remedy"),
    [
        ({}, os.cpu_count() or 1, True, ""),
        ({"OMP_NUM_THREADS": "1"}, 2, True, ""),
        ({"OMP_NUM_THREADS": "2"}, 2, True, ""),
        ({"OMP_NUM_THREADS": "64"}, 2, False, "unset OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "0"}, 2, False, "unset OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "4,2"}, 2, False, "unset OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "1", "KMP_AFFINITY": "compact"}, 2, False, "unset KMP_AFFINITY"),
    ],
)
def test_openmp(environ: dict[str, str], cores: int, ok: bool, remedy: str) -> None:
    check = openmp_check(environ, cores=cores)
    assert (check.ok, check.remedy) == (ok, remedy)


def test_openmp_under_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert openmp_check({}, cores=2).remedy == "export OMP_NUM_THREADS=2"
    assert openmp_check({"OMP_NUM_THREADS": "2"}, cores=2).ok


def test_left_over_launcher_variables() -> None:
    assert launcher_variables_check({"MASTER_PORT": "29500"}).ok
    left = launcher_variables_check({"RANK": "1", "WORLD_SIZE": "4"})
    assert (left.ok, left.remedy) == (False, "unset RANK WORLD_SIZE")
    assert launcher_variables_check({"RANK": "1", "TORCHELASTIC_RUN_ID": "none"}).ok


def test_open_files() -> None:
    assert open_files_check(resource.RLIM_INFINITY).ok
    assert open_files_check(1024).ok
    assert open_files_check(256).remedy == "ulimit -n 65536"


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(tmp_path) in disk_check(tmp_path / "not" / "yet").detail
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    in_the_way = disk_check(tmp_path / "file" / "run")
    assert (in_the_way.ok, in_the_way.required) == (False, True)
    monkeypatch.setattr(machine, "_FREE_DISK_BYTES", 2**62)
    assert "are needed" in disk_check(tmp_path).detail


def test_disk_has_room_for_a_checkpoint_and_is_fast_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path).free
    full = disk_check(tmp_path, 2 * free)
    assert (full.ok, full.required) == (False, True)
    assert "a checkpoint of" in full.detail
    monkeypatch.setattr(machine, "_SLOW_DISK_BYTES_S", 1e15)
    slow = disk_check(tmp_path)
    assert (slow.ok, slow.required) == (False, False)
    assert "set output_dir to a local disk" in slow.remedy


def test_limits() -> None:
    unlimited = resource.RLIM_INFINITY
    assert locked_memory_check(unlimited, needed_for="InfiniBand").ok
    assert locked_memory_check(65536, needed_for=None).ok
    low = locked_memory_check(65536, needed_for="NVMe offload")
    assert (low.ok, low.required) == (False, False)
    assert low.detail == "64.0 KiB may be locked; NVMe offload needs more"
    assert machine.needs_locked_memory(offloading("nvme")) == "NVMe offload"
    assert processes_check(unlimited).ok
    assert processes_check(1000).remedy == "ulimit -u 65536"


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory_check(tmp_path / "missing").ok
    monkeypatch.setattr(machine, "_SHARED_MEMORY_BYTES", 2**62)
    small = shared_memory_check(tmp_path)
    assert (small.ok, small.required) == (False, False)
    assert "--shm-size" in small.remedy


def test_gpu_answers() -> None:
    assert gpu_check(CPU_FACTS, has_nvidia=False).ok
    unseen = gpu_check(CPU_FACTS, has_nvidia=True)
    assert (unseen.ok, unseen.required) == (False, False)
    two = {**CPU_FACTS, "devices": ["H200", "H200"], "build": "13.0", "nccl": "2.28.3"}
    assert gpu_check(two, has_nvidia=True).detail == "2 x H200, CUDA 13.0, NCCL 2.28.3"
    assert not gpu_check({**two, "nccl": None}, has_nvidia=True).ok
    assert not all_ok([gpu_check({**two, "failed": "CUDA error: no kernel image"}, has_nvidia=True)])


def test_links_between_gpus() -> None:
    assert peer_checks(CPU_FACTS) == []
    eight: dict[str, Any] = {**CPU_FACTS, "devices": ["H100"] * 8, "peers": 56, "link": 2.9e11}
    (direct,) = peer_checks(eight)
    assert (direct.ok, direct.detail) == (
        True,
        "NCCL sums over 8 GPUs, all reach one another, 290 GB/s between the first two",
    )
    (through_host,) = peer_checks({**eight, "peers": 24})
    assert (through_host.ok, through_host.required) == (False, False)
    assert "32 of 56 ways between them go through the host" in through_host.detail
    (broken,) = peer_checks({**eight, "nccl_failed": "unhandled system error"})
    assert (broken.ok, broken.required) == (False, True)


def test_cuda_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what nvcc itself says, in the words of CUDA's own."""
    assert cuda_check(CPU_FACTS).ok
    gpu: dict[str, Any] = {**CPU_FACTS, "devices": ["H200"], "build": "13.0"}
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not cuda_check(gpu).required
    assert cuda_check(gpu, offloading("cpu")).required
    assert "no nvcc in" in cuda_check(gpu).detail
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    for release, ok in (("13.2, V13.2.51", True), ("12.8, V12.8.93", False)):
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}'\n")
        nvcc.chmod(0o755)
        assert cuda_check(gpu).ok == ok
    assert "torch was built with 13.0" in cuda_check(gpu).detail


def test_rendezvous() -> None:
    """A port that somebody listens at, one that nobody does, and addresses that lead nowhere."""
    assert rendezvous_check({}).ok
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
        assert rendezvous_check(here).detail.startswith("somebody listens at 127.0.0.1:")
    empty = rendezvous_check(here)
    assert (empty.ok, empty.required) == (True, False)
    assert "nobody listens there yet" in empty.detail
    unknown = rendezvous_check({"MASTER_ADDR": "no-such-host.invalid", "RANK": "1"})
    assert (unknown.ok, unknown.required) == (False, True)
    assert "doesn't resolve" in unknown.detail
    assert not rendezvous_check({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "many"}).ok


def test_what_a_dry_run_says() -> None:
    answer = {
        "steps": 20,
        "global_batch_size": 8,
        "layout": {"ranks": 2},
        "missing": [],
        "memory_bytes": {"total": 30 * 2**30},
        "parameters": 10,
    }
    said = f"[deepspeed] a warning\n{json.dumps(answer)}\n"
    gpus: dict[str, Any] = {**CPU_FACTS, "devices": ["H200", "H200"], "memory": [140 * 2**30, 140 * 2**30]}
    (run, memory), value = dry_run_checks(0, said, gpus)
    assert (run.ok, run.detail) == (True, "20 steps, 8 rows a step on 2 ranks")
    assert memory.ok
    assert value == answer
    (_, small), _ = dry_run_checks(0, said, {**gpus, "memory": [24 * 2**30, 24 * 2**30]})
    assert (small.ok, small.required) == (False, True)
    assert small.detail == "planned 30.0 GiB a rank, 24.0 GiB of a H200"
    (refused,), nothing = dry_run_checks(2, "noise\nerror: this layout can't be run:\n  3 ranks …\n", gpus)
    assert (refused.ok, refused.detail, nothing) == (False, "this layout can't be run:", {})
    assert refused.remedy == "3 ranks …"
    (hung,), _ = dry_run_checks(None, "", gpus)
    assert "no end within" in hung.detail
    assert hung.remedy


@pytest.fixture
def fp16_recipe(tmp_path: Path) -> Any:
    from arriero.config.load import load_recipe

    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    return load_recipe(tmp_path / "recipe.yaml", ["train.precision=fp16"])


def test_precision_is_required_where_the_recipe_asks_for_it(fp16_recipe: Any) -> None:
    assert all_ok(precision_checks(CPU_FACTS))
    assert not all_ok(precision_checks(CPU_FACTS, fp16_recipe))
    assert all_ok(precision_checks({**CPU_FACTS, "fp16": True}, fp16_recipe))
    assert all_ok(precision_checks({**CPU_FACTS, "devices": ["H200"]}, fp16_recipe))
    slow = precision_checks({**CPU_FACTS, "bf16": False})[0]
    assert (slow.ok, slow.required) == (False, False)
