"""A check of the other machines of a run: their names, ports and token. A refused connection is "not started yet"."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import httpx

from trireme.base.network import is_here
from trireme.base.token import TOKEN, bearer, token
from trireme.config.resolve import KNOWN_PORTS
from trireme.config.run import place_of
from trireme.tools.doctor.report import Case, Finding, about, ok, problem, skipped, warning

CONNECT_S = 3.0
Reached = Literal["answers", "refuses", "silent", "unknown"]


@dataclass(frozen=True)
class Socket:
    """A port at which a process of another machine listens."""

    process: str
    port: int
    status_path: str = ""  # a path to ask for, if it speaks HTTP


def check_hosts(case: Case) -> Iterator[Finding]:
    hosts = case.config.hosts
    file = hosts.token_file
    if file and file.is_file() and (mode := stat.S_IMODE(file.stat().st_mode)) & 0o044:
        said = f"{file} can be read by others (mode {mode:o}) - expected its owner alone: it is a secret"
        yield warning(said, f"`chmod 600 {file}`.")
    if hosts.are_loopback:
        yield skipped("all processes are on this machine")
        return
    if not any(map(is_here, hosts.all)):
        said = f"none of {', '.join(hosts.all)} is this machine - expected to look from one of them"
        yield warning(said, "Run the doctor on each machine of `[hosts]`, with the same file.")
    for host in hosts.all:
        if not is_here(host):
            yield from (about(host, finding) for finding in check_host(host, sockets_of(case, host)))


def sockets_of(case: Case, host: str) -> list[Socket]:
    """Return what listens on a machine. A process that is started alone takes the known port where none is set."""
    typed, hosts = case.typed, case.config.hosts
    engine_port = typed.inference.server.port or KNOWN_PORTS["inference.server.port"]
    places = [place_of(address) for address in hosts.inference]
    found = [Socket("inference", place.port or engine_port, "/version") for place in places if place.host == host]
    if hosts.orchestrator == host:
        status = typed.orchestrator.server.port or KNOWN_PORTS["orchestrator.server.port"]
        found.append(Socket("orchestrator", status, "/status"))
        found.append(Socket("orchestrator", typed.ports.batches or KNOWN_PORTS["ports.batches"]))
    if hosts.trainer[:1] == (host,):
        found.append(Socket("trainer", typed.ports.weights or KNOWN_PORTS["ports.weights"]))
        if len(hosts.trainer) > 1:
            found.append(Socket("trainer", typed.ports.ranks or KNOWN_PORTS["ports.ranks"]))
    return found


def check_host(host: str, sockets: list[Socket]) -> Iterator[Finding]:
    """Connect to each socket; on a machine where nothing is known to listen, to a port that will refuse."""
    sockets = sockets or [Socket("any process", KNOWN_PORTS["ports.ranks"])]
    found = {each: reach(host, each.port) for each in sockets}
    if "unknown" in found.values():
        said = "the name cannot be resolved - expected a name that this machine knows, or an address"
        yield problem(said, "Correct `[hosts]`, or add the name to /etc/hosts on every machine.")
    elif silent := [f"{each.port} ({each.process})" for each in sockets if found[each] == "silent"]:
        said = f"no answer within {CONNECT_S:g} s at port {', '.join(silent)} - expected a connection, or a refusal"
        yield problem(said, "Is the machine up, and does its firewall let these ports in from here?")
    else:
        said = ", ".join(f"{each.port} {found[each]}" for each in sockets)
        yield ok(said + (" (not started yet)" if "refuses" in found.values() else ""))
        for each in sockets:
            if each.status_path and found[each] == "answers":
                yield from _check_token(f"http://{host}:{each.port}{each.status_path}", each.process)


def reach(host: str, port: int) -> Reached:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return "answers"
    except socket.gaierror:
        return "unknown"
    except ConnectionRefusedError:
        return "refuses"
    except OSError:  # no route, or nothing came back
        return "silent"


def _check_token(url: str, process: str) -> Iterator[Finding]:
    try:
        status = httpx.get(url, headers=bearer(token()), timeout=CONNECT_S, trust_env=False).status_code
    except httpx.HTTPError as error:
        yield warning(f"{url}: {error!r} - expected the server of {process}", "Look at its log there.")
        return
    if status == 401:
        ours = "another token" if token() else "no token"
        fix = f"Give every machine the same: `export {TOKEN}=…`, or the same `hosts.token_file`."
        yield problem(f"{url} returned 401: we have {ours} - expected the one of {process}", fix)
