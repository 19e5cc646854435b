"""Checks of the configuration's own rules and ports, as the commands on this machine would apply them."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.base.network import is_here
from trireme.config import rules
from trireme.config.files import PROCESSES, ProcessName
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.tools.doctor.report import Case, Finding, from_error, ok, skipped

Command = tuple[RunConfig, ProcessName | None]
"""A configuration as it is resolved for a command, and the process that the command starts; None for `rl`."""


def commands_of(case: Case) -> Iterator[Command]:
    """Yield `rl`; or for a run on several machines, each process whose address is this machine's."""
    hosts = case.config.hosts
    if len(hosts.all) == 1:
        yield case.config, None
        return
    for process in PROCESSES:
        for node, address in enumerate(hosts.by_process[process]):
            if is_here(address.partition(":")[0]):
                yield resolve(case.typed, case.devices, section=process, node=node), process


def listeners_of(case: Case) -> list[tuple[str, str, int, RunConfig]]:
    """Return key, host and port of each socket that a command binds here, with the command's configuration."""
    return [
        (key, host, port, config)
        for config, process in commands_of(case)
        for key, host, port in rules.ports(config)
        if port and (is_here(host) or not host)
        if process in (None, rules.PORTS[key][0])
    ]


def port_problems(case: Case) -> list[str]:
    found = [words for key, _, _, config in listeners_of(case) for words in rules.port_problems(config, key)]
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
    others = {*port_problems(case), *rules.file_problems(case.config)}
    found = [
        words
        for config, process in commands_of(case)
        for rule in (rules.problems, rules.launch_problems)
        for words in rule(config, case.devices, section=process)
        if words not in others
    ]
    yield from map(from_error, dict.fromkeys(found))
    if not found:
        config = case.config
        what = "as it was typed" if case.is_given else "the quickstart's, for none was named"
        yield ok(
            f"{what}: {config.max_steps} steps of {config.orchestrator.batch_size} rollouts on {config.device}, "
            f"weights over {config.weight_broadcast.type}"
        )
