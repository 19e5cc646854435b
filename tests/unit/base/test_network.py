"""Addresses and ports of this machine, tokens, connections that outlive no cut cable, and requests over them."""

import os
import socket
import subprocess
import sys
from itertools import chain, count
from pathlib import Path

from cryptography.hazmat.primitives import hashes, hmac

from trireme.base import network
from trireme.base.network import EVERYWHERE, own_address
from trireme.base.processes import free_port, loopback_problem, port_is_free
from trireme.base.token import TOKEN, derive
from trireme.transport.weights.collective import open_store

ROOT = Path(__file__).parents[3]
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
NOBODYS = "203.0.113.1"
DEADLINE_S = 10.0


def test_a_machine_knows_its_own_addresses_and_the_interface_that_has_them() -> None:
    assert all(map(network.is_loopback, ("127.0.0.1", "127.8.8.8", "localhost", "::1")))
    assert not any(map(network.is_loopback, ("10.0.0.1", "0.0.0.0", "node-1", "", "127.0.0.1.example.org")))
    assert list(map(network.is_here, ("127.0.0.5", "localhost", NOBODYS))) == [True, True, False]
    assert list(map(network.interface_of, ("127.0.0.1", NOBODYS))) == ["lo", None]
    assert list(map(network.listening_address, ("127.0.0.5", NOBODYS))) == ["127.0.0.5", EVERYWHERE]
    urls = [network.url_of("0.0.0.0", 1, known="m0"), network.url_of("::", 1), network.url_of("m1", 1, known="m0")]
    assert urls == ["http://m0:1", "http://[::1]:1", "http://m1:1"]
    assert own_address("localhost", peer=NOBODYS) == "127.0.0.1"
    assert own_address(NOBODYS, peer="127.0.0.1") == "127.0.0.1", "by the way there"


def test_a_machine_without_loopback_is_refused_in_one_sentence(tmp_path) -> None:
    assert loopback_problem() is None
    sentence = loopback_problem(NOBODYS) or ""
    assert sentence.startswith(
        f"{NOBODYS} cannot be reached on this machine (Cannot assign requested address) - expect"
    )
    command = [sys.executable, "-m", "trireme.cli.rl", "@", "configs/reverse-text/rl.toml", "--output-dir", tmp_path]
    ended = subprocess.run(["unshare", "-Urn", *command, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.count("\nnot ready: 127.0.0.1 cannot be reached on this machine")) == (2, 1)


def options_of(connection: socket.socket) -> list[int]:
    names = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
    kept = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return [kept, *(connection.getsockopt(socket.IPPROTO_TCP, name) for name in names)]


def test_keepalive_is_set_on_remote_connections_but_not_on_loopback(tmp_path: Path) -> None:
    with network.watched_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.1", 1))) as made:
        assert options_of(made) == [1, 5, 2, 5, 15_000]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        before = options_of(client), len(os.listdir("/proc/self/fd"))
        with open(tmp_path / "file", "w"), socket.socket():
            for _ in range(20):
                network.watch_connections()
        assert (options_of(client), len(os.listdir("/proc/self/fd"))) == before, "no descriptor leaks"


def test_rendezvous_store_listens_only_at_the_trainers_address(monkeypatch) -> None:
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


def test_derived_keys_differ_by_token_and_purpose() -> None:
    assert len({derive(token, purpose) for token in ("one", "two") for purpose in ("asker", "server")}) == 4
    made = hmac.HMAC(b"one", hashes.SHA256())  # RFC 4231's construction, worked by another library
    made.update(b"trireme asker")
    assert derive("one", "asker") == made.finalize()


def test_free_port_avoids_ports_in_use_and_the_kernels_range(monkeypatch) -> None:
    first, last = map(int, RANGE.read_text().split())
    assert not [port for port in (free_port() for _ in range(50)) if first <= port <= last]
    with socket.create_server(("127.0.0.1", port := free_port())):
        assert not port_is_free(port)
        given = [port]
        with monkeypatch.context() as choosing:
            for _ in range(2):  # the second is held, also against other processes, before its server listens
                drawn = chain(given, count(port + 1))  # of which other tests may hold some
                choosing.setattr("trireme.base.processes._random.randrange", lambda *_, drawn=drawn: next(drawn))
                given.append(free_port())
        assert len(set(given)) == 3
    for beyond in (1024, 12_000, 0):  # where the system gives almost all ports, runs do not all choose the same
        monkeypatch.setattr("trireme.base.processes._first_port_of_the_kernel", lambda beyond=beyond: beyond)
        assert len({free_port() for _ in range(20)}) > 1
