"""What other launchers tell a rank, in the words that torch understands, and what they leave out."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from arriero.errors import UserError


def adopt_launcher() -> None:
    """Where torchrun, DeepSpeed, accelerate, srun or mpirun started this process as a rank, set what it needs and lacks.

    Called before anything asks whether this is a rank, and before torch, which reads OMP_NUM_THREADS when it is loaded.
    """
    if "RANK" not in os.environ:
        os.environ.update(launcher_variables(os.environ))
    if "RANK" in os.environ:
        os.environ.update(host_variables(os.environ, cores=len(os.sched_getaffinity(0))))
        if "GLOO_SOCKET_IFNAME" not in os.environ and _several_hosts(os.environ):
            found = interface_to(os.environ.get("MASTER_ADDR", ""))
            os.environ.update({"GLOO_SOCKET_IFNAME": found} if found else {})


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from srun's or mpirun's variables.

    Nothing where this is no rank: srun alone sets SLURM_STEP_NUM_TASKS, a batch script's own shell hasn't got it.
    Open MPI says OMPI_COMM_WORLD_*; MPICH, Intel MPI and MVAPICH say PMI_* and MPI_LOCAL*. Raises ``UserError`` where
    mpirun spans hosts and nobody says where the first one is.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        here = environment.get("SLURM_STEP_TASKS_PER_NODE", environment["SLURM_STEP_NUM_TASKS"])
        found = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(tasks_on(here, int(environment.get("SLURM_NODEID", "0")))),
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
            **_mpi_master(
                environment, one_host=_same(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE")
            ),
        }
    elif int(environment.get("PMI_SIZE", "1")) > 1 and "MPI_LOCALRANKID" in environment:
        found = {
            "RANK": environment["PMI_RANK"],
            "WORLD_SIZE": environment["PMI_SIZE"],
            "LOCAL_RANK": environment["MPI_LOCALRANKID"],
            "LOCAL_WORLD_SIZE": environment["MPI_LOCALNRANKS"],
            **_mpi_master(environment, one_host=_same(environment, "MPI_LOCALNRANKS", "PMI_SIZE")),
        }
    else:
        return {}
    return {name: value for name, value in found.items() if name not in environment}


def host_variables(environment: Mapping[str, str], *, cores: int) -> dict[str, str]:
    """How many ranks this host has, by torch's name and DeepSpeed's, and how many threads each may use.

    cores: those that this process may run on. DeepSpeed's launcher and mpirun leave OMP_NUM_THREADS alone, and ranks
    that take all cores each are many times slower. srun gives each of its tasks cores of its own.
    """
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "1")
    own = "SLURM_CPUS_PER_TASK" in environment
    found = {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": local,
        "LOCAL_SIZE": local,
        "OMP_NUM_THREADS": str(max(1, cores if own else cores // int(local))),
    }
    return {name: value for name, value in found.items() if name not in environment}


def tasks_on(tasks_per_node: str, node: int) -> int:
    """Tasks of one host by Slurm's compact list: host 2 of ``4(x2),3`` has 3."""
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
        for _ in range(int(times or 1))
    ]
    return counts[node]


def first_host(nodes: str) -> str:
    """The first host of Slurm's compact list: ``gpu[03-05,09],big1`` → ``gpu03``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise UserError(f"can't read the list of hosts {nodes!r}")
    return match[1] + (match[2] or "")


def address_to(host: str) -> str | None:
    """This machine's own address on the way to another one; None where there is no way, or only the loopback.

    Nothing is sent: a datagram socket that is connected has chosen its route.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if own.startswith("127.") or own == "::1" else own


def interface_to(host: str) -> str | None:
    """The name of the network interface that leads to another machine; None where nothing decides it.

    gloo takes the interface that this machine's own name resolves to, and Debian lets that be the loopback: then
    every other host fails to connect. Rank 0's host can't ask for the way to itself where its own name means
    the loopback there; it takes its only other interface.
    """
    import psutil

    addresses = {
        name: [entry.address.split("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in psutil.net_if_addrs().items()
    }
    own = address_to(host)
    if own is not None:
        return next((name for name, found in addresses.items() if own in found), None)
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup and addresses.get(name)]
    outward = [name for name in up if not any(a.startswith("127.") or a == "::1" for a in addresses[name])]
    return outward[0] if len(outward) == 1 else None


def own_address() -> str | None:
    """The address by which ranks on other hosts reach this one; None where there are no others, or nothing tells."""
    import psutil

    if not _several_hosts(os.environ):
        return None
    found = address_to(os.environ.get("MASTER_ADDR", ""))
    if found is None:
        entries = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), [])
        found = next((entry.address for entry in entries if entry.family == socket.AF_INET), None)
    return found


def _mpi_master(environment: Mapping[str, str], *, one_host: bool) -> dict[str, str]:
    if "MASTER_ADDR" not in environment and not one_host:
        raise UserError(
            "mpirun started ranks on several hosts, and MASTER_ADDR isn't set",
            "Say where rank 0 is: mpirun -x MASTER_ADDR=host -x MASTER_PORT=12345 … arriero train … "
            "(MPICH and Intel MPI: -genv MASTER_ADDR host).",
        )
    job = int(environment.get("OMPI_MCA_ess_base_jobid", "0"))
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(12_000 + job % 20_000)}


def _same(environment: Mapping[str, str], one: str, other: str) -> bool:
    return environment[one] == environment[other]


def _several_hosts(environment: Mapping[str, str]) -> bool:
    """One host where nothing tells: every launcher that knows several says how many ranks this one has."""
    world = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_WORLD_SIZE", world) != world
