"""Several hosts on this machine: network namespaces with addresses, names and an ssh server of their own.

Each namespace has its own /etc/hosts, in which its own name means the loopback as Debian writes it, its own host name,
and a port on a switch. The disk and the processes are this machine's. Needs root, iproute2 and, for ssh, Debian's
openssh-server, openssh-client and pdsh.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

# Two suites at once have hosts of their own; the addresses never meet, each set has its own switch.
PREFIX = f"arriero{os.getpid()}"


def why_not() -> str | None:
    """Why there can't be hosts here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip: apt-get install iproute2"
    made = subprocess.run(["ip", "netns", "add", f"{PREFIX}-try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", f"{PREFIX}-try"], capture_output=True)
    return f"network namespaces aren't allowed here: {made.stderr.strip()}" if made.returncode else None


def why_no_ssh() -> str | None:
    """Why hosts can't be reached by ssh."""
    missing = [name for name in ("pdsh", "ssh", "sshd", "ssh-keygen") if shutil.which(name, path=_PATH) is None]
    return f"{', '.join(missing)} missing: apt-get install pdsh openssh-server openssh-client" if missing else None


_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass
class Machines:
    """Hosts n0, n1 … at 10.77.0.1, 10.77.0.2 …; ``folder`` is for their keys."""

    folder: Path
    count: int
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __enter__(self) -> Self:
        try:
            ip("netns", "add", self._space("switch"))
            ip("-n", self._space("switch"), "link", "add", "name", "bridge0", "type", "bridge")
            ip("-n", self._space("switch"), "link", "set", "bridge0", "up")
            for number in range(self.count):
                self._add(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in (f"n{number}" for number in range(self.count)):
            inside = subprocess.run(["ip", "netns", "pids", self._space(name)], capture_output=True, text=True)
            for pid in inside.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for process in self.started:
            process.communicate()
        for number in range(self.count):
            shutil.rmtree(Path("/etc/netns") / self._space(f"n{number}"), ignore_errors=True)
        with suppress(OSError):
            Path("/etc/netns").rmdir()
        for name in ("switch", *(f"n{number}" for number in range(self.count))):
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True)

    def begin(self, host: int, *command: object, empty: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        """Start a command on a host. empty: a folder that this host has on a disk of its own, with nothing on it."""
        mount = f"mount -t tmpfs none '{empty}' && " if empty else ""
        shell = f'hostname n{host} && {mount}exec "$@"'
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self._space(f"n{host}"),
                "unshare",
                "--uts",
                "sh",
                "-c",
                shell,
                "sh",
                *map(str, command),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=_clean()
            | {"PATH": f"{self.folder}/bin:{_PATH}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            | variables,
        )
        self.started.append(process)
        return process

    def train(self, host: int, *arguments: object, **how: object) -> subprocess.Popen[str]:
        return self.begin(host, sys.executable, "-m", "arriero", "train", *arguments, **how)  # type: ignore[arg-type]

    def link(self, host: int, state: str) -> None:
        """Pull a host's cable, or plug it in again: ``down``, ``up``."""
        ip("-n", self._space("switch"), "link", "set", f"p{host}", state)

    def serve_ssh(self) -> None:
        """An ssh server on every host, and an ``ssh`` that has its key and trusts it."""
        key, config = self.folder / "key", self.folder / "ssh_config"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        shutil.copyfile(key.with_suffix(".pub"), self.folder / "authorized")
        config.write_text(
            f"IdentityFile {key}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\nUser root\n"
        )
        program = self.folder / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
        program.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)
        options = {
            "HostKey": key,
            "AuthorizedKeysFile": self.folder / "authorized",
            "StrictModes": "no",
            "UsePAM": "no",
        }
        for number in range(self.count):
            server = [shutil.which("sshd", path=_PATH), "-D", "-e", "-f", "/dev/null", "-o", "PidFile=none"]
            self.begin(
                number, *server, *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))
            )

    def _add(self, number: int) -> None:
        space, port = self._space(f"n{number}"), f"p{number}"
        own = Path("/etc/netns") / space / "hosts"
        own.parent.mkdir(parents=True)
        others = [f"10.77.0.{n + 1} n{n}" for n in range(self.count) if n != number]
        own.with_name("resolv.conf").touch()  # nobody is asked for other names
        own.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 n{number}", *others]) + "\n")
        ip("netns", "add", space)
        ip("link", "add", port, "netns", self._space("switch"), "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("-n", self._space("switch"), "link", "set", port, "master", "bridge0", "up")
        ip("-n", space, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", space, "link", "set", link, "up")

    def _space(self, name: str) -> str:
        return f"{PREFIX}-{name}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _clean() -> dict[str, str]:
    """The environment without what would make a process a rank, or choose an interface for it."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    return {key: value for key, value in os.environ.items() if key not in drop}
