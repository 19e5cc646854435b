"""Ports that are free, and a machine without loopback."""

import socket
import subprocess
import sys
from itertools import chain, count
from pathlib import Path

from trireme.base.processes import free_port, loopback_problem, port_is_free

ROOT = Path(__file__).parents[3]
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
NOBODYS = "203.0.113.1"


def test_a_machine_without_loopback_is_refused_in_one_sentence(tmp_path):
    assert loopback_problem() is None
    sentence = loopback_problem(NOBODYS) or ""
    assert sentence.startswith(
        f"{NOBODYS} cannot be reached on this machine (Cannot assign requested address) - expect"
    )
    command = [sys.executable, "-m", "trireme.cli.rl", "@", "configs/reverse-text/rl.toml", "--output-dir", tmp_path]
    ended = subprocess.run(["unshare", "-Urn", *command, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.count("\nnot ready: 127.0.0.1 cannot be reached on this machine")) == (2, 1)


def test_free_port_avoids_ports_in_use_and_the_kernels_range(monkeypatch):
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
