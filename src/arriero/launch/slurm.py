"""A job for Slurm as a batch script: one task a rank, the first host's address, and what happens at the time limit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from arriero.errors import UserError

_DURATION = re.compile(r"(\d+-)?\d+(:\d{2}){0,2}")


@dataclass(frozen=True)
class SlurmJob:
    """What a batch script asks for, and what it runs."""

    name: str
    arguments: Sequence[str]
    """Of ``arriero``: train, the recipe, its overrides."""
    folder: str
    python: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    time: str
    """As Slurm writes it: 24:00:00, 2-12, 90 (minutes)."""
    save_s: int = 300
    """How long before the limit the ranks are told to save and stop."""
    cpus: int | None = None
    """Of a rank."""
    memory: str | None = None
    options: Sequence[str] = ()
    """Further options of sbatch, such as --partition=h100."""
    setup: Sequence[str] = ()
    """Lines of shell before the start, such as module load cuda."""
    variables: Mapping[str, str] = field(default_factory=dict)


def sbatch_script(job: SlurmJob) -> str:
    """The batch script. It needs nothing of Slurm but srun and scontrol, and no ssh.

    srun starts every rank itself, so Slurm's signals reach them without anything in between: SIGUSR1 before the time
    limit makes them save and end with exit code 75, and the script puts the job back into the queue. Raises ``UserError``
    for a time or an option that Slurm wouldn't read.
    """
    if not _DURATION.fullmatch(job.time):
        raise UserError(f"--time {job.time}: Slurm reads 90 (minutes), 24:00:00 or 2-12:00:00 (days)")
    # sbatch stops at a line that it can't read, and leaves the options behind it out.
    for option in job.options:
        if not option.startswith("-") or "\n" in option:
            raise UserError(f"--sbatch {option}: expected an option of sbatch, such as --partition=h100")
    # srun takes the number of cores from the job no more, since Slurm 22.05.
    cores = ['--cpus-per-task="$SLURM_CPUS_PER_TASK"'] if job.cpus else []
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job)), ""]
    # What modules and conda run doesn't bear `set -u`.
    lines += [*job.setup, "set -euo pipefail", f"cd {shlex.quote(job.folder)}", ""]
    lines += [
        "# The ranks meet on the first host. The port follows from the job's number, so two jobs on one host don't collide.",
        'read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "MASTER_PORT=$((12000 + SLURM_JOB_ID % 20000))",
        "export MASTER_ADDR MASTER_PORT",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(job.variables.items())),
        *(["export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"] if job.cpus else []),
        "",
        "# A rank that ends doesn't take the others along: they save and stop together. Two minutes after the first one the",
        "# rest is ended. srun's exit code is then the ranks' own.",
        "code=0",
        " ".join(["srun --kill-on-bad-exit=0 --wait=120", *cores, "\\"]),
        f"    {shlex.join([job.python, '-m', 'arriero', *job.arguments])} || code=$?",
        "",
        "# 75: told to stop, with a complete checkpoint. The same job goes on from it.",
        'if [ "$code" -eq 75 ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _options(job: SlurmJob) -> list[str]:
    given = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": job.cpus,
        "mem": job.memory,
        "time": job.time,
        # To the ranks, not to this script.
        "signal": f"USR1@{job.save_s}",
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    return [
        *(f"--{name}={shlex.quote(str(value))}" for name, value in given.items() if value is not None),
        "--requeue",
        *job.options,
    ]
