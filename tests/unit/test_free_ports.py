"""Ports for what takes a while to listen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trireme.base.processes import free_port, port_is_free

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_port_is_chosen_that_no_connection_will_be_given_meanwhile() -> None:
    first, last = map(int, RANGE.read_text().split())
    for _ in range(50):
        assert not first <= free_port() <= last


def test_a_port_that_somebody_listens_on_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not port_is_free(port)
        others = iter([port, port, port + 1])
        monkeypatch.setattr("trireme.base.processes._random.randrange", lambda *_: next(others))
        assert free_port() == port + 1


@pytest.mark.parametrize("first", [1024, 12_000, 0])
def test_where_the_system_gives_almost_all_ports_runs_do_not_all_choose_the_same(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr("trireme.base.processes._first_of_the_systems", lambda: first)
    assert len({free_port() for _ in range(20)}) > 1


def test_a_crowded_system_chooses_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = map(int, RANGE.read_text().split())
    monkeypatch.setattr("trireme.base.processes.port_is_free", lambda *_: False)
    assert first <= free_port() <= last
