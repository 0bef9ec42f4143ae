"""What launchers say of a rank, in torch's words, and what they leave out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from arriero.errors import UserError
from arriero.launch.environment import (
    address_to,
    first_host,
    host_variables,
    interface_to,
    launcher_variables,
    tasks_on,
)

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_srun() -> None:
    assert launcher_variables(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "12042",
    }
    assert launcher_variables(SRUN | {"MASTER_PORT": "77"}).get("MASTER_PORT") is None, "what is set stays"


def test_a_batch_scripts_own_shell_is_no_rank() -> None:
    assert launcher_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "41"}) == {}
    assert launcher_variables({}) == {}
    assert launcher_variables(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) == {}


def test_mpirun() -> None:
    found = launcher_variables(MPIRUN)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "1")
    assert found["MASTER_ADDR"] == "127.0.0.1"
    with pytest.raises(UserError, match="MASTER_ADDR isn't set"):
        launcher_variables(MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"})
    assert "MASTER_ADDR" not in launcher_variables(MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "a"})


def test_mpich_and_intel_mpi() -> None:
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a"}
    assert launcher_variables(hydra) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": "12000",
    }
    del hydra["MASTER_ADDR"]
    with pytest.raises(UserError, match="MASTER_ADDR isn't set"):
        launcher_variables(hydra)
    assert launcher_variables(hydra | {"MPI_LOCALNRANKS": "4"})["MASTER_ADDR"] == "127.0.0.1"


def test_what_a_launcher_leaves_out() -> None:
    assert host_variables({"LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, cores=16) == {
        "LOCAL_WORLD_SIZE": "4",
        "OMP_NUM_THREADS": "4",
    }, "DeepSpeed's launcher"
    assert host_variables({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, cores=16) == {
        "LOCAL_SIZE": "4"
    }, "torchrun"
    bound = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_PER_TASK": "12"}
    assert host_variables(bound, cores=12)["OMP_NUM_THREADS"] == "12", "srun gave this task its own cores"
    assert host_variables({"RANK": "0"}, cores=4) == {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "OMP_NUM_THREADS": "4",
    }, "a pod with one rank"


@pytest.mark.parametrize(("text", "node", "tasks"), [("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("8", 0, 8), ("1,2", 1, 2)])
def test_tasks_of_a_host(text: str, node: int, tasks: int) -> None:
    assert tasks_on(text, node) == tasks


def test_the_way_to_another_host() -> None:
    """By this machine's own interfaces: to an address of its own, it goes by the interface that has it."""
    assert address_to("127.0.0.1") is None
    assert address_to("no such host") is None
    outward = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.") and psutil.net_if_stats()[name].isup
    }
    for address, name in outward.items():
        assert address_to(address) == address
        assert interface_to(address) == name


# Writes down what a rank's environment is once it was adopted; lines that ranks print may run into one another.
_RANK = """
import json, os, pathlib
from arriero.launch.environment import adopt_launcher
adopt_launcher()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR")
found = {name: os.environ.get(name) for name in names}
pathlib.Path(__file__).with_name(f"rank-{found['RANK']}.json").write_text(json.dumps(found))
"""


def test_accelerate(tmp_path: Path) -> None:
    """The real one; on a CPU too it starts several processes only where it is told that they have GPUs."""
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "LOCAL_SIZE", "LOCAL_WORLD_SIZE")
    done = subprocess.run(
        [
            *[sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"],
            *["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"],
            str(script),
        ],
        env={key: value for key, value in os.environ.items() if key not in drop} | {"HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(file.read_text()) for file in tmp_path.glob("rank-*.json")]
    assert sorted(rank["RANK"] for rank in ranks) == ["0", "1"]
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_RANK"]) == ("2", rank["RANK"])
        assert (rank["LOCAL_WORLD_SIZE"], rank["LOCAL_SIZE"]) == ("2", "2")
        assert rank["OMP_NUM_THREADS"] == "1", "torchrun's choice stays"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,09],big1", "gpu03"), ("n1", "n1"), ("n1,n2", "n1"), ("rack-2-n[7]", "rack-2-n7"), ("a.b.c", "a.b.c")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
