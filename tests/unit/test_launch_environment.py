"""What srun and mpirun say of a rank, in torch's words."""

from __future__ import annotations

import pytest

from arriero.errors import UserError
from arriero.launch.environment import first_host, launcher_variables

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


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,09],big1", "gpu03"), ("n1", "n1"), ("n1,n2", "n1"), ("rack-2-n[7]", "rack-2-n7"), ("a.b.c", "a.b.c")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
