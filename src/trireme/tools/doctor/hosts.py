"""The other machines of a run: whether their names lead somewhere, they can be reached, know the token, and agree on
the time. What is not started yet refuses a connection, which is an answer too."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

import httpx

from trireme.base.network import is_here
from trireme.base.token import TOKEN, bearer, token
from trireme.config.resolve import KNOWN_PORTS
from trireme.config.run import place_of
from trireme.tools.doctor.finding import Case, Finding, ok, problem, skipped, warning

CONNECT_S = 3.0
APART_S = 2.0  # a server's `Date` has whole seconds

Reached = Literal["answers", "refuses", "silent", "nameless"]


@dataclass(frozen=True)
class Door:
    """Where a process of another machine listens."""

    whose: str
    host: str
    port: int
    speaks_http: bool

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def hosts(case: Case) -> Iterator[Finding]:
    yield from _token_file(case.config.hosts.token_file)
    if case.config.hosts.are_loopback:
        yield skipped("all processes are on this machine")
        return
    for host in case.config.hosts.all:
        if not is_here(host):
            yield from _of_host(host, doors_of(case, host))
    if not any(map(is_here, case.config.hosts.all)):
        yield warning(
            f"none of {', '.join(case.config.hosts.all)} is this machine - expected to look from one of them",
            "Run the doctor on each machine of `[hosts]`, with the same file.",
        )


def doors_of(case: Case, host: str) -> list[Door]:
    """Each process that is started alone takes the known port where none is set."""
    typed, meant = case.typed, case.config.hosts
    engine_port = typed.inference.server.port or KNOWN_PORTS["inference.server.port"]
    places = [place_of(address) for address in meant.inference]
    doors = [Door("inference", host, place.port or engine_port, True) for place in places if place.host == host]
    if meant.orchestrator == host:
        status = typed.orchestrator.server.port or KNOWN_PORTS["orchestrator.server.port"]
        doors.append(Door("orchestrator", host, status, True))
        doors.append(Door("orchestrator", host, typed.ports.batches or KNOWN_PORTS["ports.batches"], False))
    if meant.trainer[:1] == (host,):
        doors.append(Door("trainer", host, typed.ports.weights or KNOWN_PORTS["ports.weights"], False))
        if len(meant.trainer) > 1:
            doors.append(Door("trainer", host, typed.ports.ranks or KNOWN_PORTS["ports.ranks"], False))
    return doors


def _of_host(host: str, doors: list[Door]) -> Iterator[Finding]:
    """A machine on which nothing is known to listen is asked at a port that will refuse."""
    doors = doors or [Door("any process", host, KNOWN_PORTS["ports.ranks"], False)]
    found = {door: reach(host, door.port) for door in doors}
    if "nameless" in found.values():
        yield problem(
            f"{host}: the name leads nowhere - expected a name that this machine knows, or an address",
            "Correct `[hosts]`, or add the name to /etc/hosts on every machine.",
        )
        return
    if silent := [door for door in doors if found[door] == "silent"]:
        named = ", ".join(f"{door.port} ({door.whose})" for door in silent)
        yield problem(
            f"{host}: no answer within {CONNECT_S:g} s at port {named} - expected a connection, or a refusal where "
            "nothing is started yet",
            "Is the machine up, and does its firewall let these ports in from here?",
        )
        return
    said = ", ".join(f"{door.port} {found[door]}" for door in doors)
    yield ok(f"{host}: {said}" + (" (not started yet)" if "refuses" in found.values() else ""))
    for door in doors:
        if door.speaks_http and found[door] == "answers":
            yield from _of_server(door)


def reach(host: str, port: int) -> Reached:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return "answers"
    except socket.gaierror:
        return "nameless"
    except ConnectionRefusedError:
        return "refuses"
    except OSError:  # no route, or nothing came back
        return "silent"


def _of_server(door: Door) -> Iterator[Finding]:
    """Its token and its clock."""
    path = "/version" if door.whose == "inference" else "/status"
    try:
        began = time.time()
        answer = httpx.get(door.url + path, headers=bearer(token()), timeout=CONNECT_S, trust_env=False)
        now = (began + time.time()) / 2
    except httpx.HTTPError as error:
        yield warning(f"{door.url}: {error!r} - expected {door.whose}'s server", "Look at its log there.")
        return
    if answer.status_code == 401:
        ours = "another token" if token() else "no token"
        yield problem(
            f"{door.url} turns us away: we have {ours} - expected the one of {door.whose}",
            f"Give every machine the same: `export {TOKEN}=…`, or the same `hosts.token_file`.",
        )
    if "date" in answer.headers:
        yield from _of_clock(door, parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5 - now)


def _of_clock(door: Door, ahead: float) -> Iterator[Finding]:
    if abs(ahead) > APART_S:
        yield warning(
            f"the clock of {door.host} is {ahead:+.0f} s from this one - expected less than {APART_S:g} s: lines of "
            "logs and metrics would be out of order",
            "Let a time service set both: `timedatectl set-ntp true`.",
        )


def _token_file(file: Path | None) -> Iterator[Finding]:
    """Its content is for the configuration's rules."""
    if file is None or not file.is_file():
        return
    if (mode := file.stat().st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        yield warning(
            f"{file} can be read by others (mode {stat.S_IMODE(mode):o}) - expected its owner alone: it is a secret",
            f"`chmod 600 {file}`.",
        )
