"""Ranks that srun or mpirun has started, told in the words that torch understands."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from arriero.errors import UserError


def adopt_launcher() -> None:
    """Where srun or mpirun started this process as one of several, set RANK and what goes with it.

    torchrun and DeepSpeed's launcher set them themselves. Called before anything asks whether this is a rank.
    """
    if "RANK" not in os.environ:
        os.environ.update(launcher_variables(os.environ))


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from srun's or mpirun's variables.

    Nothing where this is no rank: srun alone sets SLURM_STEP_NUM_TASKS, a batch script's own shell hasn't got it.
    Raises ``UserError`` where mpirun spans hosts and nobody says where the first one is.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        here = environment.get("SLURM_STEP_TASKS_PER_NODE", environment["SLURM_STEP_NUM_TASKS"])
        found = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": here.split("(")[0].split(",")[0],
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            # The same on every rank, another for another job: above the ports of services, below those the kernel gives.
            "MASTER_PORT": str(
                12_000 + (int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])) % 20_000
            ),
        }
    elif int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        found = {
            "RANK": environment["OMPI_COMM_WORLD_RANK"],
            "WORLD_SIZE": environment["OMPI_COMM_WORLD_SIZE"],
            "LOCAL_RANK": environment["OMPI_COMM_WORLD_LOCAL_RANK"],
            "LOCAL_WORLD_SIZE": environment["OMPI_COMM_WORLD_LOCAL_SIZE"],
        }
        if "MASTER_ADDR" not in environment:
            if found["LOCAL_WORLD_SIZE"] != found["WORLD_SIZE"]:
                raise UserError(
                    "mpirun started ranks on several hosts, and MASTER_ADDR isn't set",
                    "Say where rank 0 is: mpirun -x MASTER_ADDR=host -x MASTER_PORT=12345 … arriero train …",
                )
            found |= {"MASTER_ADDR": "127.0.0.1"}
        found |= {"MASTER_PORT": str(12_000 + int(environment.get("OMPI_MCA_ess_base_jobid", "0")) % 20_000)}
    else:
        return {}
    return {name: value for name, value in found.items() if name not in environment}


def first_host(nodes: str) -> str:
    """The first host of Slurm's compact list: ``gpu[03-05,09],big1`` → ``gpu03``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise UserError(f"can't read the list of hosts {nodes!r}")
    return match[1] + (match[2] or "")
