"""A job on the hosts of a hostfile, through DeepSpeed's runner: the command, what is looked at before, and how it stops."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from arriero.__version__ import __version__
from arriero.errors import UserError

_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)")
# ssh gives a host this long; resolving a name comes on top.
_CONNECT_S = 10
_CHECK_S = 25
_BIND = (
    "import socket; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('', {port}))"
)


@dataclass(frozen=True)
class HostJob:
    """What DeepSpeed's runner starts, and where."""

    hosts: Mapping[str, int]
    """Ranks by host, rank 0's first."""
    hostfile: Path
    arguments: Sequence[str]
    """Of ``arriero``: train, the recipe, its overrides."""
    folder: Path
    """Where every host runs it, as here."""
    python: str
    master_addr: str
    master_port: int
    ssh_port: int | None = None
    variables: Mapping[str, str] | None = None


def read_hostfile(path: Path) -> dict[str, int]:
    """Hosts with their number of ranks, in the order of the file: ``worker-1 slots=8`` a line, as DeepSpeed reads it.

    Raises ``UserError`` that names every wrong line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"can't read the hostfile {path}: {error.strerror}") from error
    hosts: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _ENTRY.match(text)
        if match is None:
            problems.append(f"line {number}: {text!r} is not of the form HOST slots=RANKS")
        elif match[1] in hosts:
            problems.append(f"line {number}: {match[1]} is there twice")
        elif int(match[2]) < 1:
            problems.append(f"line {number}: {match[1]} has no slots")
        else:
            hosts[match[1]] = int(match[2])
    if not hosts and not problems:
        problems.append("it names no host")
    if problems:
        raise UserError(
            f"{path} is no hostfile:\n" + "\n".join(f"  {problem}" for problem in problems),
            "One host a line, with its number of GPUs: worker-1 slots=8",
        )
    return hosts


def default_port(output_dir: str) -> int:
    """The same for every start of a run, another for another run: above the ports of services, below those that the
    kernel gives out."""
    return 12_000 + crc32(output_dir.encode()) % 20_000


def runner_command(job: HostJob) -> list[str]:
    """DeepSpeed's runner with pdsh over ssh; it starts DeepSpeed's launcher on every host, and that the ranks.

    ``--force_multi``: a hostfile of one other host would otherwise be started here. Variables go through ``env``,
    since the runner passes on few of its own.
    """
    ranks = ["arriero", *job.arguments]
    switches = ["--module"]
    if job.variables:
        settings = [f"{name}={value}" for name, value in sorted(job.variables.items())]
        ranks = ["env", *settings, job.python, "-m", *ranks]
        switches = ["--no_python", "--no_local_rank"]
    return [
        job.python,
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile",
        str(job.hostfile),
        "--force_multi",
        "--no_ssh_check",
        "--master_addr",
        job.master_addr,
        "--master_port",
        str(job.master_port),
        *(["--ssh_port", str(job.ssh_port)] if job.ssh_port else []),
        "--log_level",
        "error",
        *switches,
        *(for_pdsh(word) for word in ranks),
    ]


def for_pdsh(word: str) -> str:
    """An argument as it has to stand so that the ranks see it unchanged.

    The runner joins arguments with spaces into a line for the other host's shell, and puts those that hold a space into
    double quotes, with a backslash before each double quote inside; pdsh replaces %h, %u and %n.
    """
    word = word.replace("%", "%%")
    if " " in word:
        return re.sub(r"([\\$`])", r"\\\1", word)
    return shlex.quote(word)


def check_hosts(job: HostJob) -> None:
    """``UserError`` that names each host where the job can't be started, and why; within half a minute.

    Looked at on every host: its name and ssh, the folder, Python and arriero; on the first one also the port.
    """
    with ThreadPoolExecutor(max_workers=min(64, len(job.hosts))) as pool:
        found = dict(zip(job.hosts, pool.map(lambda host: _problem(job, host), job.hosts), strict=True))
    problems = [f"  {host}: {problem}" for host, problem in found.items() if problem]
    if problems:
        raise UserError(
            f"{len(problems)} of {len(found)} hosts can't run this:\n" + "\n".join(problems),
            "Each host must be reached by ssh without a password, and have the same folder, Python and arriero at the "
            "same path. Without ssh: arriero launch --slurm, or srun or mpirun arriero train …",
        )


def _problem(job: HostJob, host: str) -> str | None:
    """Why the job can't be started on a host."""
    # The runner gives ranks PYTHONPATH as it is here.
    line = (
        f"cd {shlex.quote(str(job.folder))} && export PYTHONPATH={shlex.quote(os.environ.get('PYTHONPATH', ''))} && "
        f"{shlex.quote(job.python)} -c {shlex.quote('from arriero import __version__; print(__version__)')}"
    )
    if host == next(iter(job.hosts)):
        line += f" && {{ {shlex.quote(job.python)} -c {shlex.quote(_BIND.format(port=job.master_port))} || exit 98; }}"
    try:
        done = _ssh(job, host, line, timeout_s=_CHECK_S)
    except subprocess.TimeoutExpired:
        return f"no answer over ssh in {_CHECK_S} s"
    if done.returncode == 98:
        return f"port {job.master_port} is in use: another run, or what is left of one (--master-port gives another)"
    if done.returncode:
        return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    version = done.stdout.strip().splitlines()[-1]
    return None if version == __version__ else f"it has arriero {version}, here is {__version__}"


def ask_to_stop(job: HostJob, output_dir: str) -> bool:
    """Ask rank 0, by its heartbeat's process number, to save and stop; all ranks follow at the next step.

    The runner's own way to stop is ``pkill -f`` of every DeepSpeed launcher on the hosts, those of other runs as
    well. Returns whether it was found.
    """
    heartbeat = shlex.quote(f"{output_dir}/heartbeats/rank_0.json")
    line = (
        f'cd {shlex.quote(str(job.folder))} && kill -USR1 "$(sed -n \'s/.*"pid": *\\([0-9]*\\).*/\\1/p\' {heartbeat})"'
    )
    try:
        return _ssh(job, next(iter(job.hosts)), line, timeout_s=_CHECK_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _ssh(job: HostJob, host: str, line: str, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    port = ["-p", str(job.ssh_port)] if job.ssh_port else []
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}"]
    return subprocess.run(
        ["ssh", *options, *port, host, line],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
