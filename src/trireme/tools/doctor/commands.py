"""The commands that would be typed on this machine for a run, and where each of them listens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trireme.base.network import is_here
from trireme.config import rules
from trireme.config.files import ProcessName
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.tools.doctor.finding import Case

BOUND: dict[ProcessName, tuple[str, ...]] = {
    "inference": ("inference.server.port",),
    "orchestrator": ("orchestrator.server.port", "ports.batches"),
    "trainer": ("ports.weights", "ports.ranks"),
}


@dataclass(frozen=True)
class Command:
    config: RunConfig  # resolved for it
    room: ProcessName | None  # `rl` where None

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the ports that it binds."""
        rooms = [self.room] if self.room else list(BOUND)
        return tuple(key for room in rooms for key in BOUND[room])


@dataclass(frozen=True)
class Listener:
    """A port that a command binds."""

    key: str
    host: str
    port: int
    command: Command


def commands_of(case: Case) -> Iterator[Command]:
    """`rl`; or on several machines each process whose address is this machine's."""
    if not case.is_of_several_machines:
        yield Command(case.config, None)
        return
    hosts = case.config.hosts
    rooms: dict[ProcessName, tuple[str, ...]] = {
        "inference": hosts.inference,
        "orchestrator": (hosts.orchestrator,),
        "trainer": hosts.trainer,
    }
    for room, addresses in rooms.items():
        for node, address in enumerate(addresses):
            if is_here(address.partition(":")[0]):
                yield Command(resolve(case.typed, case.devices, section=room, node=node), room)


def listeners_of(case: Case) -> list[Listener]:
    return [
        Listener(key, host, port, command)
        for command in commands_of(case)
        for key, host, port in rules.ports(command.config)
        if key in command.keys and port and (is_here(host) or not host)
    ]


def port_problems(case: Case) -> list[str]:
    found = (
        words for listener in listeners_of(case) for words in rules.port_problems(listener.command.config, listener.key)
    )
    return list(dict.fromkeys(found))
