"""The doctor on the wires: ports in use, servers that turn us away, machines that are silent. All on loopback."""

from __future__ import annotations

import dataclasses
import http.server
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from doctoring import build_case, findings, the_one
from trireme.base.devices import Devices
from trireme.base.processes import free_port
from trireme.base.token import TOKEN
from trireme.launch.doctor import hosts, network
from trireme.launch.doctor.commands import listeners_of
from trireme.launch.doctor.configuration import configuration
from trireme.launch.doctor.finding import ok
from trireme.launch.doctor.hosts import Door, doors_of
from trireme.launch.doctor.network import free_ports, kinds_of, zeromq


@pytest.fixture
def token(monkeypatch) -> str:
    monkeypatch.setenv(TOKEN, made := secrets.token_hex(16))
    return made


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


# ports, and what listens there


def test_a_port_in_use_is_said_once_and_its_wire_is_not_tried(tmp_path):
    with taken_port() as port:
        case = build_case(tmp_path, "--inference.server.port", str(port))
        assert [finding.verdict for finding in findings(free_ports, case)] == ["problem"]
        assert [finding.verdict for finding in findings(configuration, case)] == ["ok"]
        assert [finding.verdict for finding in findings(network.http, case)] == ["skipped", "ok"]


def test_ports_that_are_free_are_named(tmp_path):
    port = free_port()
    finding = the_one(free_ports(build_case(tmp_path, "--ports.batches", str(port))))
    assert finding.verdict == "ok"
    assert f"{port} on 127.0.0.1" in finding.found


def test_what_ranks_and_engines_ask_is_answered_on_the_runs_own_ports(tmp_path):
    case = build_case(tmp_path)
    for finding in (*findings(network.http, case), *findings(zeromq, case)):
        assert finding.verdict == "ok"
        assert finding.figures["question_s"] > 0
    assert the_one(free_ports(case)).verdict == "ok"  # nothing holds them afterwards


def test_with_a_token_questions_travel_encrypted_and_behind_it(tmp_path, token):
    case = build_case(tmp_path)
    assert "encrypted with the token" in the_one(zeromq(case)).found
    assert [finding.verdict for finding in findings(network.http, case)] == ["ok", "ok"]


def test_a_port_where_nobody_answers_who_listens_is_a_problem(monkeypatch):
    """As a firewall, or a proxy, would have it."""
    monkeypatch.setattr(network, "ANSWER_S", 0.3)
    monkeypatch.setattr(network.uvicorn.Server, "run", lambda *_, **__: time.sleep(0.5))
    finding = network._http_at("127.0.0.1", free_port())
    assert finding.verdict == "problem"
    assert "listens and cannot be asked" in finding.found


def test_an_orchestrator_that_does_not_answer_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "ANSWER_S", 0.3)

    async def silent(_: object) -> None:
        await network.asyncio.sleep(60)

    monkeypatch.setattr(network, "_answer", silent)
    finding = the_one(zeromq(build_case(tmp_path)))
    assert finding.verdict == "problem"
    assert "cannot be asked" in finding.found


# the configuration


def test_every_rule_that_is_broken_is_an_answer_of_its_own(tmp_path):
    case = build_case(tmp_path, "--orchestrator.batch-size", "100", "--trainer.micro-batch-tokens", "64")
    first, second = findings(configuration, case)
    assert (first.verdict, second.verdict) == ("problem", "problem")
    assert "100 % 16 = 4 - expected 0" in first.found
    assert first.fix.startswith("Set `orchestrator.batch_size` to 96 or 112")
    assert "trainer.micro_batch_tokens = 64" in second.found


# other machines


def test_a_run_on_one_machine_has_no_others(tmp_path):
    assert [finding.verdict for finding in findings(hosts.hosts, build_case(tmp_path))] == ["skipped"]


def test_a_door_is_where_each_command_listens_by_itself(tmp_path):
    words = ["--device", "cpu", "--hosts.inference", "10.0.0.2", "10.0.0.2:8003", "--hosts.orchestrator", "10.0.0.3"]
    words += ["--hosts.trainer", "10.0.0.4", "10.0.0.5", "--ports.weights", "7000"]
    case = build_case(tmp_path, *words)
    assert [(door.whose, door.port) for door in doors_of(case, "10.0.0.2")] == [
        ("inference", 8000),
        ("inference", 8003),
    ]
    assert [(door.port, door.speaks_http) for door in doors_of(case, "10.0.0.3")] == [(8001, True), (5555, False)]
    assert [door.port for door in doors_of(case, "10.0.0.4")] == [7000, 5557]
    assert doors_of(case, "10.0.0.5") == []


def test_a_process_that_is_not_started_yet_is_no_problem():
    found = list(hosts._of_host("127.0.0.1", [Door("trainer", "127.0.0.1", free_port(), False)]))
    assert the_one(found).verdict == "ok"
    assert "refuses (not started yet)" in the_one(found).found


def test_a_machine_that_says_nothing_is_a_problem(monkeypatch):
    """A listener whose queue is full drops what comes, as a firewall does."""
    monkeypatch.setattr(hosts, "CONNECT_S", 0.3)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        finding = the_one(hosts._of_host("127.0.0.1", [Door("trainer", "127.0.0.1", port, False)]))
        for each in waiting:
            each.close()
    assert finding.verdict == "problem"
    assert f"no answer within 0.3 s at port {port} (trainer)" in finding.found


def test_a_name_that_leads_nowhere_is_a_problem(monkeypatch):
    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    finding = the_one(hosts._of_host("trainer-7", []))
    assert finding.verdict == "problem"
    assert "the name leads nowhere" in finding.found


def test_another_token_is_a_problem_and_the_same_is_not(token, monkeypatch):
    port = free_port()
    door = Door("orchestrator", "127.0.0.1", port, True)
    with network._echoing("127.0.0.1", port):
        assert [finding.verdict for finding in hosts._of_host("127.0.0.1", [door])] == ["ok"]
        for other, words in ((secrets.token_hex(16), "another token"), ("", "no token")):
            monkeypatch.setenv(TOKEN, other)
            _, finding = hosts._of_host("127.0.0.1", [door])
            assert finding.verdict == "problem"
            assert f"we have {words}" in finding.found


def test_a_clock_that_is_an_hour_off_is_a_warning():
    class Late(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(time.time() - 3600)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Late)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        reached, clock = hosts._of_host("127.0.0.1", [Door("inference", "127.0.0.1", server.server_port, True)])
    finally:
        server.shutdown()
        server.server_close()
    assert (reached.verdict, clock.verdict) == ("ok", "warning")
    assert "is -3600 s from this one" in clock.found or "is -3599 s from this one" in clock.found


def test_a_token_that_others_can_read_is_a_warning(tmp_path):
    file = tmp_path / "token"
    file.write_text(secrets.token_hex(16))
    case = build_case(tmp_path, "--hosts.token-file", str(file))
    file.chmod(0o644)
    assert [finding.verdict for finding in findings(hosts.hosts, case)] == ["warning", "skipped"]
    file.chmod(0o600)
    assert [finding.verdict for finding in findings(hosts.hosts, case)] == ["skipped"]


def test_on_several_machines_each_commands_own_rules_are_asked(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    words = ["--device", "cpu", "--hosts.orchestrator", "10.9.8.7", "--hosts.inference", "10.9.8.7"]
    case = build_case(tmp_path, *words, "--hosts.trainer", "127.0.0.2")
    said = " ".join(finding.found for finding in findings(configuration, case))
    assert "there is no token" in said
    assert "expected one of each, all here" not in said


def test_on_several_machines_the_known_ports_are_wanted_of_who_listens_here(tmp_path, token):
    """Loopback has sixteen million addresses, all of them this machine's."""
    words = ["--device", "cpu", "--hosts.inference", "127.0.9.1", "10.9.8.7:8003", "--hosts.orchestrator", "127.0.9.2"]
    case = build_case(tmp_path, *words, "--hosts.trainer", "10.9.8.7")
    wanted = {(each.key, each.host, each.port) for each in listeners_of(case)}
    assert wanted == {
        ("inference.server.port", "127.0.9.1", 8000),
        ("orchestrator.server.port", "127.0.9.2", 8001),
        ("ports.batches", "127.0.9.2", 5555),
    }


def test_a_port_that_is_in_use_on_another_address_of_this_machine_is_found(tmp_path, token):
    port = free_port("127.0.9.2")
    words = ["--device", "cpu", "--hosts.inference", "10.9.8.7", "--hosts.orchestrator", "127.0.9.2"]
    words += ["--hosts.trainer", "10.9.8.7", "--ports.batches", str(port)]
    case = build_case(tmp_path, *words, "--orchestrator.server.port", str(free_port("127.0.9.2")))
    assert the_one(zeromq(case)).verdict == "ok"
    assert the_one(network.http(case)).verdict == "ok"
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before have just been closed
        taken.bind(("127.0.9.2", port))
        taken.listen()
        finding = the_one(free_ports(case))
        assert the_one(zeromq(case)).verdict == "skipped"
    assert finding.verdict == "problem"
    assert f"port {port} on 127.0.9.2 is in use" in finding.found


def test_gpus_that_are_not_here_are_left_to_the_configuration(tmp_path):
    there = build_case(tmp_path, "--device", "cuda", devices=Devices(gpus=("0", "1"), cores=2))
    here = dataclasses.replace(there, devices=Devices(cores=2))
    assert kinds_of(here.config)[1:] == [("nccl", (1, 0))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(network, "_collective", lambda *_: ok("fine"))
        assert [finding.verdict for finding in findings(network.collectives, here)] == ["ok", "skipped"]


# collectives


def test_the_collectives_are_those_that_the_run_uses(tmp_path):
    config = build_case(tmp_path).config
    assert kinds_of(config) == [("gloo", ())]
    apart = config.model_copy(update={"trainer_gpu_ids": (2, 3), "inference_gpu_ids": (0, 1)})
    assert kinds_of(apart) == [("gloo", ()), ("nccl", (2, 1))]
    shared = config.model_copy(update={"trainer_gpu_ids": (0,), "inference_gpu_ids": (0,)})
    assert kinds_of(shared) == [("gloo", ())]
    both = config.model_copy(update={"trainer_gpu_ids": (0, 1), "inference_gpu_ids": (1,)})
    assert kinds_of(both) == [("gloo", ()), ("nccl", (0, 1))]
