"""Rules about machines: their addresses, and the secret, files and ports that a run needs on this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from trireme.base.network import is_here, is_loopback
from trireme.base.processes import loopback_problem, port_is_free
from trireme.base.token import HOW, token, token_problem
from trireme.config.files import ProcessName
from trireme.config.model.folder import check_model, looks_local, low_bit_problem, read_config
from trireme.config.model.weights import weights_problems
from trireme.config.run import RunConfig, place_of


def host_problems(config: RunConfig) -> Iterator[str]:
    hosts = config.hosts
    tables = {f"hosts.{process}": addresses for process, addresses in hosts.by_process.items()}

    # Each address by itself, then the servers by their whole URLs, of which no two may be equal.
    for key, addresses in tables.items():
        if not addresses and key != "hosts.inference":  # engines may join later
            yield f"`{key}` is empty - expected at least one address. Remove the line, or name a machine."
        for address in addresses:
            if problem := _address_problem(address, with_port=key == "hosts.inference"):
                yield f'`{key}` names "{address}": {problem}'

    readable = [address for address in hosts.inference if not _address_problem(address, with_port=True)]
    for url, count in Counter(map(config.engine_url, readable)).items():
        if count > 1:
            yield (
                f"`hosts.inference` names {url.removeprefix('http://')} {count} times - expected an address each. Give "
                'servers on one machine ports of their own: ["10.0.0.2:8000", "10.0.0.2:8010"].'
            )

    # A loopback address means another machine on each machine.
    inside = [host for host in hosts.all if is_loopback(host)]
    others = [host for host in hosts.all if not is_loopback(host)]
    if inside and others:
        keys = [key for key, addresses in tables.items() if any(is_loopback(a.partition(":")[0]) for a in addresses)]
        yield (
            f"`[hosts]` names {', '.join(others)}, and {', '.join(inside)} in {', '.join(keys)} - expected addresses "
            f"by which all machines reach each other. Give {' and '.join(keys)} the address of its machine."
        )

    if config.weight_broadcast.type == "ipc" and len(hosts.all) > 1:
        yield (
            f'weight_broadcast.type = "ipc", and `[hosts]` names {", ".join(hosts.all)} - expected one machine: ipc '
            'works between processes of one machine. Set `weight_broadcast.type = "nccl"`.'
        )

    # Every machine of the trainer starts as many ranks as the others.
    ranks, nodes = config.trainer.num_ranks or 1, len(hosts.trainer)
    if nodes and ranks % nodes:
        yield (
            f"trainer.num_ranks = {ranks}, and `hosts.trainer` names {nodes} machines - expected equally many ranks on "
            f"each. Set `trainer.num_ranks` to {max(1, ranks // nodes) * nodes} or {(ranks // nodes + 1) * nodes}."
        )


def _address_problem(address: str, *, with_port: bool) -> str | None:
    example = 'Write "10.0.0.2"' + (' or "10.0.0.2:8000".' if with_port else " (ports are in `[ports]`).")
    if address in ("::", "") or address.startswith("0.0.0.0"):
        return f"other machines cannot reach that - expected the machine's own address or name. {example}"
    if address.count(":") > 1 and "/" not in address:
        return f"expected an IPv4 address or a name. {example}"
    try:
        _, port = place_of(address)
    except ValueError:
        return f"expected an address or a name{', and maybe a port' if with_port else ''}. {example}"
    return f"expected no port. {example}" if port is not None and not with_port else None


def token_problems(config: RunConfig) -> Iterator[str]:
    bound = {
        "inference.server.host": config.inference.server.host,
        "orchestrator.server.host": config.orchestrator.server.host,
    }
    outside = [host for host in config.hosts.all if not is_loopback(host)]
    exposed = [f"{key} = {host}" for key, host in bound.items() if not is_loopback(host)]
    exposed = [f"[hosts] {', '.join(outside)}"] if outside else exposed
    if problem := token_problem(config.hosts.token_file):
        yield problem
    elif exposed and not (token() or config.hosts.token_file):
        yield (
            f"{' and '.join(exposed)} can be reached from other machines, and there is no token - expected a secret of "
            f"this run's machines. {HOW} Or name a file that holds it: `hosts.token_file`."
        )


def processes_elsewhere(config: RunConfig) -> Iterator[str]:
    """Yield a problem if `rl`, which starts every process on this machine, would have to start one elsewhere."""
    hosts = config.hosts
    is_one_of_each = len(hosts.inference) <= 1 == len(hosts.trainer)
    if is_one_of_each and all(is_loopback(host) or is_here(host) for host in hosts.all):
        return
    commands = [f"uv run {name} @ FILE   # on {', '.join(places)}" for name, places in hosts.by_process.items()]
    yield (
        f"`[hosts]` names {len(hosts.inference)} inference servers and {len(hosts.trainer)} machines of the trainer, "
        f"at {', '.join(hosts.all)} - expected one of each, all here: `rl` starts the processes of one machine. Start "
        "each process by its command, with `--node N` where one host has several:\n    " + "\n    ".join(commands)
    )


def loopback_problems() -> Iterator[str]:
    if problem := loopback_problem():
        yield problem


def file_problems(config: RunConfig, *, section: ProcessName | None = None) -> Iterator[str]:
    """Yield which models and files of environments are missing on this machine."""
    trained, served, tokenizer = config.trainer.model.name, config.inference.model.name, config.trainer.tokenizer.name
    if section in (None, "trainer"):
        yield from check_model("trainer.model.name", trained)
        if tokenizer != trained:
            yield from check_model("trainer.tokenizer.name", tokenizer, holds="tokenizer_config.json")
    if section == "inference" or (section is None and served != trained):
        yield from check_model("inference.model.name", served)
        if served is not None and looks_local(served):
            yield from weights_problems(Path(served))
        described = read_config(served)
        if described and "architectures" not in described:
            # vLLM then guesses, and may serve the model as an embedding model whose weights cannot be updated.
            yield (
                f'inference.model.name = "{served}": its config.json names no "architectures" - expected '
                '["Qwen3ForCausalLM"] or the like, as `save_pretrained` of a model writes it. Add the line.'
            )
        if section is None and (problem := low_bit_problem(described)):
            yield f'inference.model.name = "{served}": its weights {problem} Take such a copy of the model.'

    # Environments that are files; the orchestrator itself finds packages when it starts.
    ids = {each.id for each in config.orchestrator.all_environments} if section in (None, "orchestrator") else set()
    for file in sorted(id for id in ids if id.endswith(".py")):
        if not Path(file).is_file():
            yield (
                f'environment id = "{file}": there is no such file (looked in {Path.cwd()}) - expected a Python file '
                "with `load_environment`. Check the path."
            )


PORTS: dict[str, tuple[ProcessName, str]] = {
    "inference.server.port": ("inference", "the inference server"),
    "orchestrator.server.port": ("orchestrator", "the orchestrator's status server"),
    "orchestrator.env.agent.port": ("orchestrator", "agent programs and clients of a harness"),
    "ports.batches": ("orchestrator", "batches from the orchestrator to the trainer"),
    "ports.weights": ("trainer", "the meeting of trainer and engines"),
    "ports.ranks": ("trainer", "the meeting of the trainer's ranks"),
}
"""The process that listens at each port, and what for."""


def ports(config: RunConfig) -> list[tuple[str, str, int]]:
    """Return key, address and number of each port that is known."""
    trainers = config.hosts.trainer or ("",)
    known = (
        ("inference.server.port", config.inference.server.host, config.inference.server.port),
        ("orchestrator.server.port", config.orchestrator.server.host, config.orchestrator.server.port),
        *(
            ("orchestrator.env.agent.port", each.agent.host, each.agent.port or None)
            for each in config.orchestrator.all_environments
            if each.agent is not None
        ),
        ("ports.batches", config.hosts.orchestrator, config.ports.batches),
        ("ports.weights", trainers[0], config.ports.weights),
        ("ports.ranks", trainers[0], config.ports.ranks if len(trainers) > 1 else None),
    )
    return [(key, host, port) for key, host, port in known if port is not None]


def port_problems(config: RunConfig, key: str) -> Iterator[str]:
    """Yield a problem if a port of this machine is in use. Ports of other machines cannot be checked."""
    for name, host, port in ports(config):
        if name == key and port and is_here(host) and not port_is_free(port, host):
            free = next((number for number in range(port + 1, min(port + 50, 65536)) if port_is_free(number, host)), 0)
            flag = f"`--{key.replace('_', '-')} {free}`" if ".env." not in key else f"`port = {free}` in its file"
            yield (
                f"port {port} on {host} is in use, wanted for {PORTS[key][1]} ({key}) - expected a free one. `lsof -i "
                f":{port}` shows which process has it; or take another: {flag}."
            )
