"""Addresses, and keep-alive for connections between machines.

A cut cable closes no connection: both ends wait forever. So connections that leave the machine use TCP keep-alive, and
break when the other end has not answered for `SILENCE_S`.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from trireme.base.processes import port_is_free

ASK_AFTER_S = 5  # seconds of silence before the first probe
ASK_EVERY_S = 2
QUESTIONS = 5  # probes without an answer before the connection breaks
SILENCE_S = ASK_AFTER_S + ASK_EVERY_S * QUESTIONS
EVERYWHERE = "0.0.0.0"

_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_AFTER_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, QUESTIONS),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),  # ms without an acknowledgement
)


# addresses


def stay_on_loopback() -> None:
    """Make gloo and NCCL listen on the loopback interface, unless the user has named another."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def is_loopback(host: str) -> bool:
    """Return whether an address is written as loopback: `localhost`, 127.x.y.z or ::1."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def host_of(address: str) -> str:
    """Return the host of `HOST:PORT`, as a request's header names it; "" if it has none."""
    with suppress(ValueError):
        return urlsplit(f"//{address}").hostname or ""
    return ""


def is_here(host: str) -> bool:
    """Return whether an address, or the address of a name, belongs to this machine."""
    return port_is_free(0, host)


def numeric(host: str) -> str:
    """Return the IP address of a name; the name itself if it cannot be resolved."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def listening_address(host: str) -> str:
    """Return the address to listen on as `host`: that address, or all interfaces if it is not this machine's own (a
    container's service, a router's).
    """
    return host if is_loopback(host) or is_here(host) else EVERYWHERE


def url_of(host: str, port: int, *, known: str = "") -> str:
    """Return the URL of a server that listens on `host`, as it is reached from here.

    Args:
        known: the name of its machine, used if the server listens on all interfaces; by default this machine.

    Example:
        url_of("0.0.0.0", 8001), url_of("::1", 8000)  # "http://127.0.0.1:8001", "http://[::1]:8000"
    """
    if host in (EVERYWHERE, "::", ""):
        host = known or ("::1" if host == "::" else "127.0.0.1")
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def own_address(host: str, *, peer: str) -> str:
    """Return the address under which this machine, known as `host`, connects to `peer`."""
    return numeric(host) if is_here(host) else address_towards(peer) or host


def address_towards(peer: str) -> str | None:
    """Return this machine's address on the way to another one; None without a route."""
    # Connecting a UDP socket sends nothing: the kernel only chooses the route, and with it the address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this address."""
    import psutil  # only a run on several machines asks

    for name, addresses in psutil.net_if_addrs().items():
        if any(found.family == socket.AF_INET and found.address == address for found in addresses):
            return name
    return None


# connections


def watched_socket(info: Any) -> socket.socket:
    """Create a socket with keep-alive, unless its other end is here too. For aiohttp's `socket_factory`."""
    family, kind, protocol, _, address = info
    made = socket.socket(family, kind, protocol)
    if not is_loopback(address[0]):
        _watch(made)
    return made


class Connection(NamedTuple):
    """An open connection to another machine."""

    peer: str  # address
    descriptor: int
    inode: int

    def is_open(self) -> bool:
        with suppress(OSError):
            return os.fstat(self.descriptor).st_ino == self.inode
        return False


def watch_connections() -> list[Connection]:
    """Set keep-alive on all open connections to other machines, such as torch's, which has no option for it.

    Returns these connections.
    """
    watched = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # gone meanwhile, or not connected
            found_at = os.fstat(descriptor)
            if stat.S_ISSOCK(found_at.st_mode):
                # A duplicate, as leaving the block closes it, and not the connection of its owner.
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                        peer = ipaddress.ip_address(found.getpeername()[0])
                        # On a socket for IPv6, an IPv4 peer appears as ::ffff:a.b.c.d.
                        mapped = peer.ipv4_mapped if isinstance(peer, ipaddress.IPv6Address) else None
                        if not (mapped or peer).is_loopback:
                            _watch(found)
                            watched.append(Connection(str(mapped or peer), descriptor, found_at.st_ino))
    return watched


def _watch(connection: socket.socket) -> None:
    for level, option, value in _OPTIONS:
        connection.setsockopt(level, option, value)
