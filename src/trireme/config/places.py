"""Addresses of `[hosts]`: how one is read, and which of them is this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from trireme.base.errors import ConfigError
from trireme.base.network import is_here, is_loopback

NODE = "TRIREME_NODE"


@dataclass(frozen=True)
class Place:
    """Where a process is reached.

    Example:
        place_of("10.0.0.2:8003")  # Place("10.0.0.2", 8003)
    """

    host: str
    port: int | None = None

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def place_of(address: str) -> Place:
    """Raises: ValueError where it is no `host` and no `host:port`."""
    host, colon, port = address.partition(":")
    if not host or "/" in address or (colon and not (port.isdigit() and 0 < int(port) < 65536)):
        raise ValueError(address)
    return Place(host, int(port) if colon else None)


def places_of(addresses: tuple[str, ...]) -> list[Place]:
    """Without those that cannot be read: they are for the rules to refuse."""
    places = []
    for address in addresses:
        with suppress(ValueError):
            places.append(place_of(address))
    return places


def find_node(table: str, addresses: tuple[str, ...], flag: int | None) -> int:
    """Which of these addresses this machine is, counted from 0: the flag, `TRIREME_NODE`, or by its own addresses.

    Raises: ConfigError where nothing tells.
    """
    given = _given(flag)
    if given is not None:
        if not 0 <= given < len(addresses):
            raise ConfigError(
                f"this is node {given}, and `{table}` has {len(addresses)} addresses ({', '.join(addresses)}) - "
                f"expected a number from 0 to {len(addresses) - 1}. Correct `--node` (or {NODE})."
            )
        return given
    if len(addresses) == 1:
        return 0
    ours = [number for number, address in enumerate(addresses) if is_here(address.partition(":")[0])]
    if len(ours) != 1:
        found = f"{len(ours)} of them are this machine" if ours else "none of them is this machine"
        raise ConfigError(
            f"`{table}` is {', '.join(addresses)}, and {found} - expected to find out which one is to start here. "
            f"Add `--node N`, counted from 0 (or set {NODE}), or correct the addresses."
        )
    return ours[0]


def _given(flag: int | None) -> int | None:
    said = os.environ.get(NODE, "")
    if flag is not None or not said:
        return flag
    if not said.isdigit():
        raise ConfigError(f"{NODE} = {said!r} - expected the number of this machine, counted from 0. Correct it.")
    return int(said)
