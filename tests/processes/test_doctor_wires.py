"""The doctor on the wires: ports in use, servers that turn us away, machines that are silent. All on loopback."""

from __future__ import annotations

import re
import secrets
import socket
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from doctoring import build_case, taken_port, the_one
from trireme.base.processes import free_port
from trireme.base.token import TOKEN
from trireme.tools.doctor import hosts, network
from trireme.tools.doctor.commands import listeners_of
from trireme.tools.doctor.configuration import configuration
from trireme.tools.doctor.finding import Finding
from trireme.tools.doctor.hosts import Door, doors_of
from trireme.tools.doctor.network import free_ports, kinds_of, zeromq


@pytest.fixture
def token(monkeypatch) -> str:
    monkeypatch.setenv(TOKEN, made := secrets.token_hex(16))
    return made


def verdicts(found) -> list[str]:
    return [finding.verdict for finding in found]


def test_a_port_in_use_is_said_once_and_its_wire_is_not_tried(tmp_path):
    with taken_port() as port:
        case = build_case(tmp_path, "--inference.server.port", str(port))
        asked = [verdicts(ask(case)) for ask in (free_ports, configuration, network.http)]
        assert asked == [["problem"], ["ok"], ["skipped", "ok"]]
    finding = the_one(free_ports(build_case(tmp_path, "--ports.batches", str(port))))
    assert (finding.verdict, f"{port} on 127.0.0.1" in finding.found) == ("ok", True)


@pytest.mark.parametrize("has_token", [False, True])
def test_what_ranks_and_engines_ask_is_answered_on_the_runs_own_ports(tmp_path, has_token, request):
    if has_token:
        request.getfixturevalue("token")
    case = build_case(tmp_path)
    wire = the_one(zeromq(case))
    assert ("encrypted with the token" in wire.found) == has_token
    for finding in (*network.http(case), wire):
        assert finding.verdict == "ok"
        assert finding.figures["question_s"] > 0
    assert the_one(free_ports(case)).verdict == "ok"  # nothing holds them afterwards


def test_a_port_where_another_answers_or_the_orchestrator_does_not_is_a_problem(tmp_path, monkeypatch):
    """As a firewall, or a proxy, would have it."""
    monkeypatch.setattr(network, "ANSWER_S", 0.1)
    monkeypatch.setattr(network.uvicorn.Server, "run", lambda *_, **__: time.sleep(0.2))
    finding = network._http_at("127.0.0.1", free_port())
    assert (finding.verdict, "listens and cannot be asked" in finding.found) == ("problem", True)

    async def silent(_: object) -> None:
        await network.asyncio.sleep(60)

    monkeypatch.setattr(network, "_answer", silent)
    finding = the_one(zeromq(build_case(tmp_path)))
    assert (finding.verdict, "cannot be asked" in finding.found) == ("problem", True)


def test_each_command_of_several_machines_listens_by_itself(tmp_path):
    assert verdicts(hosts.hosts(build_case(tmp_path))) == ["skipped"]
    words = "--device cpu --hosts.inference 10.0.0.2 10.0.0.2:8003 --hosts.orchestrator 10.0.0.3 "
    words += "--hosts.trainer 10.0.0.4 10.0.0.5 --ports.weights 7000"
    case = build_case(tmp_path, *words.split())
    doors = {host: [(door.whose, door.port) for door in doors_of(case, host)] for host in case.config.hosts.all}
    assert doors == {
        "10.0.0.2": [("inference", 8000), ("inference", 8003)],
        "10.0.0.3": [("orchestrator", 8001), ("orchestrator", 5555)],
        "10.0.0.4": [("trainer", 7000), ("trainer", 5557)],
        "10.0.0.5": [],
    }
    assert [door.speaks_http for door in doors_of(case, "10.0.0.3")] == [True, False]


def reached(port: int, whose: str = "trainer", *, speaks_http: bool = False) -> list[Finding]:
    return list(hosts._of_host("127.0.0.1", [Door(whose, "127.0.0.1", port, speaks_http)]))


def test_a_machine_that_is_not_started_is_no_problem_and_one_that_is_silent_or_unknown_is(monkeypatch):
    """A listener whose queue is full drops what comes, as a firewall does."""
    finding = the_one(reached(free_port()))
    assert (finding.verdict, "refuses (not started yet)" in finding.found) == ("ok", True)
    monkeypatch.setattr(hosts, "CONNECT_S", 0.1)
    with ExitStack() as stack:
        full, *waiting = (stack.enter_context(socket.socket()) for _ in range(4))
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        finding = the_one(reached(port))
    assert finding.verdict == "problem"
    assert f"no answer within 0.1 s at port {port} (trainer)" in finding.found

    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    finding = the_one(hosts._of_host("trainer-7", []))
    assert (finding.verdict, "the name leads nowhere" in finding.found) == ("problem", True)


def test_another_token_is_a_problem_and_a_clock_that_is_an_hour_off_a_warning(token, monkeypatch):
    port = free_port()
    with network._echoing("127.0.0.1", port):
        assert verdicts(reached(port, "orchestrator", speaks_http=True)) == ["ok"]
        with monkeypatch.context() as an_hour_later:
            an_hour_later.setattr(hosts, "time", SimpleNamespace(time=lambda: time.time() + 3600))
            _, clock = reached(port, "orchestrator", speaks_http=True)
        assert clock.verdict == "warning"
        assert re.search(r"is -3(600|599) s from this one", clock.found)
        for other, words in ((secrets.token_hex(16), "another token"), ("", "no token")):
            monkeypatch.setenv(TOKEN, other)
            _, finding = reached(port, "orchestrator", speaks_http=True)
            assert (finding.verdict, f"we have {words}" in finding.found) == ("problem", True)


def test_a_token_that_others_can_read_is_a_warning(tmp_path):
    file = tmp_path / "token"
    file.write_text(secrets.token_hex(16))
    case = build_case(tmp_path, "--hosts.token-file", str(file))
    for mode, found in ((0o644, ["warning", "skipped"]), (0o600, ["skipped"])):
        file.chmod(mode)
        assert verdicts(hosts.hosts(case)) == found


def test_on_several_machines_the_known_ports_are_wanted_of_who_listens_here(tmp_path, token):
    """Loopback has sixteen million addresses, all of them this machine's."""
    words = "--device cpu --hosts.inference 127.0.9.1 10.9.8.7:8003 --hosts.orchestrator 127.0.9.2"
    case = build_case(tmp_path, *words.split(), "--hosts.trainer", "10.9.8.7")
    assert {(each.key, each.host, each.port) for each in listeners_of(case)} == {
        ("inference.server.port", "127.0.9.1", 8000),
        ("orchestrator.server.port", "127.0.9.2", 8001),
        ("ports.batches", "127.0.9.2", 5555),
    }
    port, other = free_port("127.0.9.2"), free_port("127.0.9.2")
    words = "--device cpu --hosts.inference 10.9.8.7 --hosts.orchestrator 127.0.9.2 --hosts.trainer 10.9.8.7"
    ports = ("--ports.batches", str(port), "--orchestrator.server.port", str(other))
    case = build_case(tmp_path, *words.split(), *ports)
    assert [verdicts(zeromq(case)), verdicts(network.http(case))] == [["ok"], ["ok"]]
    with taken_port("127.0.9.2", port):
        finding = the_one(free_ports(case))
        assert verdicts(zeromq(case)) == ["skipped"]
    assert (finding.verdict, f"port {port} on 127.0.9.2 is in use" in finding.found) == ("problem", True)


@pytest.mark.parametrize(
    ("trainer", "inference", "kinds"),
    [
        (None, None, [("gloo", ())]),
        ((2, 3), (0, 1), [("gloo", ()), ("nccl", (2, 1))]),
        ((0,), (0,), [("gloo", ())]),
        ((0, 1), (1,), [("gloo", ()), ("nccl", (0, 1))]),
    ],
)
def test_the_collectives_are_those_that_the_run_uses(trainer, inference, kinds, tmp_path):
    placed = {} if trainer is None else {"trainer_gpu_ids": trainer, "inference_gpu_ids": inference}
    assert kinds_of(build_case(tmp_path).config.model_copy(update=placed)) == kinds
