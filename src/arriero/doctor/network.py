"""Whether ranks find one another: on this machine, and from others."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from arriero.doctor.finding import Check


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
    problem = f"no answer within {GLOO_LIMIT_S:.0f} s" if returncode is None else lines[-1]
    remedy = "unset GLOO_SOCKET_IFNAME" if environ.get("GLOO_SOCKET_IFNAME") else "export GLOO_SOCKET_IFNAME=lo"
    return Check("gloo", False, f"two ranks on this machine can't talk: {problem}", remedy)


_CONNECT_S = 3.0
GLOO_LIMIT_S = 60.0


def rendezvous_check(environ: Mapping[str, str]) -> Check:
    """Whether MASTER_ADDR and MASTER_PORT lead somewhere: required of a rank that a launcher has started."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "29500")
    required = "RANK" in environ
    if host is None:
        return Check("rendezvous", True, "MASTER_ADDR is not set: ranks meet on this machine", required=False)
    if not port.isdigit() or not 0 < int(port) < 65536:
        return Check(
            "rendezvous", False, f"MASTER_PORT={port} is no port", "export MASTER_PORT=29500", required=required
        )
    place = f"{host}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        detail = f"MASTER_ADDR={host} doesn't resolve: {error.strerror}"
        return Check("rendezvous", False, detail, "export MASTER_ADDR=<the first machine's address>", required=required)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(address)
            detail = f"somebody listens at {place}"
        except ConnectionRefusedError:
            detail = f"{place} is reached; nobody listens there yet"
        except OSError as error:
            problem = "no answer" if isinstance(error, TimeoutError) else error.strerror
            remedy = (
                f"let TCP through to {place} and, between all ranks' machines, to any port (firewall, security group)"
            )
            return Check("rendezvous", False, f"{place}: {problem} within {_CONNECT_S:g} s", remedy, required=required)
    return Check("rendezvous", True, detail, required=required)
