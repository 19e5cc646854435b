"""Rules of `[hosts]`: addresses that can be meant, and nothing within reach of strangers without a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from trireme.base.devices import Devices
from trireme.base.network import is_here, is_loopback
from trireme.base.token import HOW, TOKEN, token, token_problem
from trireme.config.files import ProcessName
from trireme.config.readiness import port_rule
from trireme.config.run import RunConfig, place_of

WILDCARDS = ("0.0.0.0", "::", "")
NOT_VLLMS = {
    "host": "Set `inference.server.host`.",
    "port": "Set `inference.server.port`.",
    "api-key": f"Set {TOKEN} in the environment: clients send it as they would send the key.",
    "uds": "Set `inference.server.host` and `inference.server.port`.",
    "root-path": "Remove it.",
    "middleware": "Remove it.",
}
"""Arguments of vLLM's server that are refused in `[inference.args]`, with what to do instead."""


def _addresses_can_be_read(config: RunConfig, _: Devices) -> Iterator[str]:
    for key, addresses in _tables(config):
        if not addresses:
            yield f"`{key}` is empty - expected at least one address. Remove the line, or name a machine."
        for address in addresses:
            if problem := _problem_of(address, with_port=key == "hosts.inference"):
                yield f'`{key}` names "{address}": {problem}'


def _tables(config: RunConfig) -> list[tuple[str, tuple[str, ...]]]:
    hosts = config.hosts
    return [
        ("hosts.inference", hosts.inference),
        ("hosts.orchestrator", (hosts.orchestrator,)),
        ("hosts.trainer", hosts.trainer),
    ]


def _problem_of(address: str, *, with_port: bool) -> str | None:
    example = 'Write "10.0.0.2"' + (' or "10.0.0.2:8000".' if with_port else " (ports are in `[ports]`).")
    if address in WILDCARDS or address.startswith("0.0.0.0"):
        return f"others cannot reach that - expected the machine's own address or name. {example}"
    if address.count(":") > 1 and "/" not in address:
        return f"expected an IPv4 address or a name. {example}"
    try:
        place = place_of(address)
    except ValueError:
        return f"expected an address or a name{', and maybe a port' if with_port else ''}. {example}"
    return f"expected no port. {example}" if place.port is not None and not with_port else None


def _one_name_for_the_orchestrator(config: RunConfig, _: Devices) -> Iterator[str]:
    older, ours = config.ports.host, config.hosts.orchestrator
    if older is not None and older != ours:
        yield (
            f'ports.host = "{older}" and hosts.orchestrator = "{ours}" - expected one of them, two names of one key. '
            "Remove `ports.host`."
        )


def _servers_differ(config: RunConfig, _: Devices) -> Iterator[str]:
    for url, count in Counter(_urls(config)).items():
        if count > 1:
            yield (
                f"`hosts.inference` names {url.removeprefix('http://')} {count} times - expected an address each. "
                'Give servers on one machine ports of their own: ["10.0.0.2:8000", "10.0.0.2:8010"].'
            )


def _urls(config: RunConfig) -> list[str]:
    try:
        return config.engine_urls
    except ValueError:  # said already
        return []


def _all_can_be_reached_from_all(config: RunConfig, _: Devices) -> Iterator[str]:
    inside = [host for host in config.hosts.all if is_loopback(host)]
    others = [host for host in config.hosts.all if not is_loopback(host)]
    if inside and others:
        keys = [key for key, addresses in _tables(config) if any(is_loopback(a.partition(":")[0]) for a in addresses)]
        yield (
            f"`[hosts]` names {', '.join(others)}, and {', '.join(inside)} in {', '.join(keys)} - on another machine "
            "that would be the other machine itself. Expected addresses by which all machines reach each other. Give "
            f"{' and '.join(keys)} the address of its machine."
        )


def _strangers_have_no_token(config: RunConfig, _: Devices) -> Iterator[str]:
    if problem := token_problem(config.hosts.token_file):
        yield problem
    elif not (token() or config.hosts.token_file) and (open_to := _open_to_others(config)):
        yield (
            f"{' and '.join(open_to)} can be reached from other machines, and there is no token - expected a secret "
            f"that only the machines of this run know. {HOW} Or name a file that holds it: `hosts.token_file`."
        )


def _arguments_do_not_open_the_engine(config: RunConfig, _: Devices) -> Iterator[str]:
    """vLLM's arguments come last and win, so these would pass by the token, or by the rules about addresses."""
    for name in config.inference.args:
        plain = name.replace("_", "-")
        if plain in NOT_VLLMS or plain.startswith(("ssl-", "allowed-", "allow-cred")):
            instead = NOT_VLLMS.get(plain, "Put a proxy in front of it where browsers or other machines need it.")
            yield (
                f"inference.args.{name} = {'…' if 'key' in name else config.inference.args[name]!r} - expected "
                f"arguments of the engine; who may reach its server is not left to them. {instead}"
            )


def _open_to_others(config: RunConfig) -> list[str]:
    bound = {
        "inference.server.host": config.inference.server.host,
        "orchestrator.server.host": config.orchestrator.server.host,
    }
    listening = [f"{key} = {host}" for key, host in bound.items() if not is_loopback(host)]
    outside = [host for host in config.hosts.all if not is_loopback(host)]
    return [f"[hosts] {', '.join(outside)}"] if outside else listening


def _ranks_are_spread_evenly(config: RunConfig, _: Devices) -> Iterator[str]:
    ranks, nodes = config.trainer.num_ranks or 1, len(config.hosts.trainer)
    if nodes and ranks % nodes:
        yield (
            f"trainer.num_ranks = {ranks}, and `hosts.trainer` names {nodes} machines - expected equally many ranks on "
            f"each. Set `trainer.num_ranks` to {max(1, ranks // nodes) * nodes} or {(ranks // nodes + 1) * nodes}."
        )


def _memory_is_shared_on_one_machine(config: RunConfig, _: Devices) -> Iterator[str]:
    if config.weight_broadcast.type == "ipc" and len(config.hosts.all) > 1:
        yield (
            f'weight_broadcast.type = "ipc", and `[hosts]` names {", ".join(config.hosts.all)} - ipc works between '
            'processes of one machine. Set `weight_broadcast.type = "nccl"`.'
        )


def _all_of_it_is_here(config: RunConfig, _: Devices) -> Iterator[str]:
    """For `rl`, which starts every process on the machine on which it is typed."""
    hosts = config.hosts
    is_one_of_each = len(hosts.inference) == len(hosts.trainer) == 1
    if is_one_of_each and all(is_loopback(host) or is_here(host) for host in hosts.all):
        return
    commands = [f"uv run inference @ FILE{_node(hosts.inference, n)}   # on {a}" for n, a in enumerate(hosts.inference)]
    commands.append(f"uv run orchestrator @ FILE   # on {hosts.orchestrator}")
    commands += [f"uv run trainer @ FILE{_node(hosts.trainer, n)}   # on {a}" for n, a in enumerate(hosts.trainer)]
    yield (
        f"`[hosts]` names {len(hosts.inference)} inference servers and {len(hosts.trainer)} machines of the trainer, "
        f"at {', '.join(hosts.all)} - expected one of each, all here: `rl` starts the processes of one machine. "
        "Start each where it belongs, in any order, with the same file:\n    " + "\n    ".join(commands)
    )


def _node(addresses: tuple[str, ...], number: int) -> str:
    """Where machines cannot tell by their addresses which one they are."""
    hosts = [address.partition(":")[0] for address in addresses]
    return f" --node {number}" if hosts.count(hosts[number]) > 1 else ""


_RUN = None
_ALL: tuple[ProcessName | None, ...] = (_RUN, "inference", "orchestrator", "trainer")

Rules = tuple[tuple[Callable[[RunConfig, Devices], Iterator[str]], tuple[ProcessName | None, ...]], ...]

RULES: Rules = (
    (_addresses_can_be_read, _ALL),
    (_one_name_for_the_orchestrator, _ALL),
    (_servers_differ, _ALL),
    (_all_can_be_reached_from_all, _ALL),
    (_arguments_do_not_open_the_engine, (_RUN, "inference")),
    (_ranks_are_spread_evenly, (_RUN, "trainer")),
    (_memory_is_shared_on_one_machine, _ALL),
)

LAUNCH_RULES: Rules = (
    (_strangers_have_no_token, _ALL),
    (_all_of_it_is_here, (_RUN,)),
    (port_rule("ports.ranks"), ("trainer",)),
)
