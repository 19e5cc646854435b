"""Checks of the configuration's own rules, of ports here, and of the other machines of a run.

A connection that another machine refuses is "not started yet".
"""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import httpx

from trireme.base.network import is_here
from trireme.base.token import TOKEN, bearer, token
from trireme.config.files import PROCESSES, ProcessName
from trireme.config.model.folder import config_file
from trireme.config.model.weights import weights_problems
from trireme.config.resolve import KNOWN_PORTS, resolve
from trireme.config.rules import machines
from trireme.config.rules.check import launch_problems, problems
from trireme.config.rules.run import run_tokenizer_problems
from trireme.config.run import RunConfig, place_of
from trireme.tools.doctor.finding import Case, Finding, about, from_error, ok, problem, skipped, warning

Command = tuple[RunConfig, ProcessName | None]
"""A configuration as it is resolved for a command, and the process that the command starts; None for `rl`."""

CONNECT_S = 3.0
Reached = Literal["answers", "refuses", "silent", "unknown"]


def commands_of(case: Case) -> Iterator[Command]:
    """Yield `rl`; or for a run on several machines, each process whose address is this machine's."""
    hosts = case.config.hosts
    if len(hosts.all) == 1:
        yield case.config, None
        return
    # with the port that `[hosts]` may name, an address is HOST:PORT
    for process in PROCESSES:
        for node, address in enumerate(hosts.by_process[process]):
            if is_here(address.partition(":")[0]):
                yield resolve(case.typed, case.devices, section=process, node=node), process


def listeners_of(case: Case) -> list[tuple[str, str, int, RunConfig]]:
    """Return key, host and port of each socket that a command binds here, with the command's configuration."""
    return [
        (key, host, port, config)
        for config, process in commands_of(case)
        for key, host, port in machines.ports(config)
        if port and (is_here(host) or not host)
        if process in (None, machines.PORTS[key][0])
    ]


def port_problems(case: Case) -> list[str]:
    found = [words for key, _, _, config in listeners_of(case) for words in machines.port_problems(config, key)]
    return list(dict.fromkeys(found))


def check_ports(case: Case) -> Iterator[Finding]:
    found, listeners = port_problems(case), listeners_of(case)
    yield from map(from_error, found)
    if not listeners:
        yield skipped("no process of this run belongs on this machine")
    elif not found:
        yield ok(", ".join(f"{port} on {host} ({key})" for key, host, port, _ in listeners))


def check_configuration(case: Case) -> Iterator[Finding]:
    """Report every rule that a command would refuse, except those about ports, models and environments: these have
    checks of their own."""
    # other checks of the doctor report these in their own words
    others = {*port_problems(case), *machines.file_problems(case.config), *run_tokenizer_problems(case.config)}
    if (name := case.config.trainer.model.name) and (file := config_file(name)):
        others |= {*weights_problems(file.parent)}
    found = [
        words
        for config, process in commands_of(case)
        for rule in (problems, launch_problems)
        for words in rule(config, case.devices, section=process)
        if words not in others
    ]
    yield from map(from_error, dict.fromkeys(found))

    if not found:
        config = case.config
        what = "as it was typed" if case.is_given else "the quickstart's, for none was named"
        yield ok(
            f"{what}: {config.max_steps} steps of {config.orchestrator.batch_in_words} on {config.device}, "
            f"weights over {config.weight_broadcast.type}"
        )


@dataclass(frozen=True)
class Socket:
    """A port at which a process of another machine listens."""

    process: str
    port: int
    status_path: str = ""  # a path to ask for, if it speaks HTTP


def check_hosts(case: Case) -> Iterator[Finding]:
    hosts = case.config.hosts
    file = hosts.token_file
    # a token that others can read protects nothing
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
    """Return what listens on a machine. A process that is started alone takes the known port if none is set."""
    typed, hosts = case.typed, case.config.hosts
    engine_port = typed.inference.server.port or KNOWN_PORTS["inference.server.port"]
    # several engines may share a machine, each with a port of its own
    engines = [port or engine_port for at, port in map(place_of, hosts.inference) if at == host]
    found = [Socket("inference", port, "/version") for port in engines]
    if hosts.orchestrator == host:
        status = typed.orchestrator.server.port or KNOWN_PORTS["orchestrator.server.port"]
        found.append(Socket("orchestrator", status, "/status"))
        found.append(Socket("orchestrator", typed.ports.batches or KNOWN_PORTS["ports.batches"]))
    if hosts.trainer[:1] == (host,):
        found.append(Socket("trainer", typed.ports.weights or KNOWN_PORTS["ports.weights"]))
        # rank 0 alone listens: for the other ranks, and for the weights' receivers
        if len(hosts.trainer) > 1:
            found.append(Socket("trainer", typed.ports.ranks or KNOWN_PORTS["ports.ranks"]))
    return found


def check_host(host: str, sockets: list[Socket]) -> Iterator[Finding]:
    """Connect to each socket; on a machine where nothing is known to listen, to a port that will refuse."""
    # a machine that only connects to others listens nowhere; a refusal still shows that it is reached
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
        # a socket that answers may belong to another run, or have another token
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
