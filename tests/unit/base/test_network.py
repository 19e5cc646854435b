"""Addresses and ports of this machine, connections that outlive no cut cable, and requests over them."""

import os
import socket
from pathlib import Path

from trireme.base import network
from trireme.base.network import EVERYWHERE, own_address
from trireme.base.processes import free_port
from trireme.base.token import TOKEN
from trireme.transport.weights.collective import open_store

NOBODYS = "203.0.113.1"
DEADLINE_S = 10.0


def test_a_machine_knows_its_own_addresses_and_the_interface_that_has_them():
    assert all(map(network.is_loopback, ("127.0.0.1", "127.8.8.8", "localhost", "::1")))
    assert not any(map(network.is_loopback, ("10.0.0.1", "0.0.0.0", "node-1", "", "127.0.0.1.example.org")))
    assert list(map(network.is_here, ("127.0.0.5", "localhost", NOBODYS))) == [True, True, False]
    assert list(map(network.interface_of, ("127.0.0.1", NOBODYS))) == ["lo", None]
    assert list(map(network.listening_address, ("127.0.0.5", NOBODYS))) == ["127.0.0.5", EVERYWHERE]
    urls = [network.url_of("0.0.0.0", 1, known="m0"), network.url_of("::", 1), network.url_of("m1", 1, known="m0")]
    assert urls == ["http://m0:1", "http://[::1]:1", "http://m1:1"]
    assert own_address("localhost", peer=NOBODYS) == "127.0.0.1"
    assert own_address(NOBODYS, peer="127.0.0.1") == "127.0.0.1", "by the way there"


def options_of(connection):
    names = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
    kept = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return [kept, *(connection.getsockopt(socket.IPPROTO_TCP, name) for name in names)]


def test_keepalive_is_set_on_remote_connections_but_not_on_loopback(tmp_path):
    with network.watched_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.1", 1))) as made:
        assert options_of(made) == [1, 5, 2, 5, 15_000]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        before = options_of(client), len(os.listdir("/proc/self/fd"))
        with open(tmp_path / "file", "w"), socket.socket():
            for _ in range(20):
                network.watch_connections()
        assert (options_of(client), len(os.listdir("/proc/self/fd"))) == before, "no descriptor leaks"


def test_rendezvous_store_listens_only_at_the_trainers_address(monkeypatch):
    """By itself torch listens on all interfaces. Who has no token looks for the engines under other names."""
    port = free_port()
    monkeypatch.setenv(TOKEN, "a-token-for-tests-0123456789")
    ours = open_store("127.0.0.1", port, is_sender=True, timeout_s=DEADLINE_S)
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()]
    assert {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")} == {f"0100007F:{port:04X}"}
    friend = open_store("127.0.0.1", port, is_sender=False, timeout_s=DEADLINE_S)
    monkeypatch.delenv(TOKEN)
    stranger = open_store("127.0.0.1", port, is_sender=False, timeout_s=DEADLINE_S)
    stranger.set("here/1", "1")
    assert not ours.check(["here/1"])
    friend.set("here/1", "1")
    assert ours.check(["here/1"])
