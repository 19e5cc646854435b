"""Addresses of this machine, and connections that do not outlive a cut cable."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from trireme.base.network import (
    EVERYWHERE,
    SILENCE_S,
    interface_of,
    is_here,
    is_loopback,
    listening_address,
    own_address,
    watch_connections,
    watched_socket,
)
from trireme.base.token import TOKEN, bearer, derive, is_same, sealed
from trireme.transport.weights.collective import open_store

NOBODYS = "203.0.113.1"
DEADLINE_S = 10.0


def test_loopback_is_known_by_its_looks() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "localhost", "::1")))
    assert not any(map(is_loopback, ("10.0.0.1", "0.0.0.0", "node-1", "", "127.0.0.1.example.org")))


def test_a_machine_knows_its_own_addresses_and_the_interface_that_has_them() -> None:
    assert is_here("127.0.0.5")
    assert is_here("localhost")
    assert not is_here(NOBODYS)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(NOBODYS) is None
    assert own_address("localhost", peer=NOBODYS) == "127.0.0.1"
    assert own_address(NOBODYS, peer="127.0.0.1") == "127.0.0.1", "by the way there"


def test_it_listens_where_it_is_looked_for_or_everywhere_where_it_has_no_such_address() -> None:
    assert listening_address("127.0.0.5") == "127.0.0.5"
    assert listening_address(NOBODYS) == EVERYWHERE


def options_of(connection: socket.socket) -> tuple[int, int, int]:
    return (
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


def test_a_watched_connection_is_asked_after_by_the_kernel_within_seconds() -> None:
    with watched_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.1", 1))) as made:
        kept, idle_s, unacknowledged_ms = options_of(made)
    assert kept == 1
    assert idle_s < SILENCE_S <= 20
    assert unacknowledged_ms == SILENCE_S * 1000


def test_connections_within_the_machine_are_left_alone_and_no_descriptor_leaks(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        before = options_of(client)
        open_before = len(os.listdir("/proc/self/fd"))
        with open(tmp_path / "file", "w"), socket.socket():
            for _ in range(20):
                watch_connections()
        assert options_of(client) == before
        assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_the_meeting_place_of_trainer_and_engines_listens_at_its_own_address_only() -> None:
    """By itself torch listens on all interfaces."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    store = open_store("127.0.0.1", port, is_sender=True, timeout_s=DEADLINE_S)
    rows = [*Path("/proc/net/tcp").read_text().splitlines(), *Path("/proc/net/tcp6").read_text().splitlines()]
    listening = {row.split()[1] for row in rows if row.split()[3] == "0A" and row.split()[1].endswith(f":{port:04X}")}
    assert listening == {f"0100007F:{port:04X}"}
    del store


def test_who_has_no_token_looks_for_the_engines_under_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv(TOKEN, "a-token-for-tests-0123456789")
    ours = open_store("127.0.0.1", port, is_sender=True, timeout_s=DEADLINE_S)
    friend = open_store("127.0.0.1", port, is_sender=False, timeout_s=DEADLINE_S)
    monkeypatch.delenv(TOKEN)
    stranger = open_store("127.0.0.1", port, is_sender=False, timeout_s=DEADLINE_S)
    stranger.set("here/1", "1")
    assert not ours.check(["here/1"])
    friend.set("here/1", "1")
    assert ours.check(["here/1"])


# tokens


def test_what_is_derived_of_a_token_is_told_apart_by_its_purpose_and_by_the_token() -> None:
    derived = {derive(token, purpose) for token in ("one", "two") for purpose in ("asker", "server")}
    assert len(derived) == 4
    assert {len(key) for key in derived} == {32}
    # RFC 4231's construction, worked by another library
    assert derive("one", "asker").hex() == _hmac_sha256(b"one", b"trireme asker")


def _hmac_sha256(key: bytes, message: bytes) -> str:
    from cryptography.hazmat.primitives import hashes, hmac

    made = hmac.HMAC(key, hashes.SHA256())
    made.update(message)
    return made.finalize().hex()


def test_names_are_sealed_only_where_there_is_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert (sealed("weights"), bearer()) == ("weights", {})
    monkeypatch.setenv(TOKEN, "a-token-for-tests-0123456789")
    assert sealed("weights").startswith("weights/")
    assert sealed("weights") != sealed("others").replace("others", "weights")
    assert bearer() == {"Authorization": "Bearer a-token-for-tests-0123456789"}
    assert is_same("a", "a")
    assert not is_same("a", "ab")
