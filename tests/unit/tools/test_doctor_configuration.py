"""The doctor's checks of ports, hosts and tokens, each made bad for real."""

import secrets
import socket
from contextlib import ExitStack

from support.engines.answering import answering_http
from support.runs.doctoring import build_case, expect, taken_port
from trireme.base.processes import free_port
from trireme.base.token import TOKEN
from trireme.tools.doctor import configuration
from trireme.tools.doctor.configuration import (
    Socket,
    check_configuration,
    check_host,
    check_hosts,
    check_ports,
    sockets_of,
)


def verdicts(found):
    return [finding.verdict for finding in found]


def test_a_port_in_use_is_reported_once(tmp_path):
    with taken_port() as port:
        case = build_case(tmp_path, f"--inference.server.port {port}")
        expect(check_ports(case), "problem")
        expect(check_configuration(case), "ok")
    expect(check_ports(build_case(tmp_path, f"--ports.batches {port}")), "ok", f"{port} on 127.0.0.1")


def test_each_command_of_several_machines_listens_by_itself(tmp_path):
    expect(check_hosts(build_case(tmp_path)), "skipped")
    words = "--device cpu --hosts.inference 10.0.0.2 10.0.0.2:8003 --hosts.orchestrator 10.0.0.3 "
    case = build_case(tmp_path, f"{words} --hosts.trainer 10.0.0.4 10.0.0.5 --ports.weights 7000")
    found = {host: [(each.process, each.port) for each in sockets_of(case, host)] for host in case.config.hosts.all}
    assert found == {
        "10.0.0.2": [("inference", 8000), ("inference", 8003)],
        "10.0.0.3": [("orchestrator", 8001), ("orchestrator", 5555)],
        "10.0.0.4": [("trainer", 7000), ("trainer", 5557)], "10.0.0.5": [],
    }  # fmt: skip


def test_doctor_reports_a_host_that_is_silent_or_cannot_be_resolved(monkeypatch):
    """A listener whose queue is full drops what comes, as a firewall does."""
    expect(check_host("127.0.0.1", [Socket("trainer", free_port())]), "ok", "refuses (not started yet)")
    monkeypatch.setattr(configuration, "CONNECT_S", 0.1)
    with ExitStack() as stack:
        full, *waiting = (stack.enter_context(socket.socket()) for _ in range(4))
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        words = f"no answer within 0.1 s at port {port} (trainer)"
        expect(check_host("127.0.0.1", [Socket("trainer", port)]), "problem", words)

    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    expect(check_host("trainer-7", []), "problem", "cannot be resolved")


def test_another_token_is_a_problem(monkeypatch):
    secret = secrets.token_hex(16)
    with answering_http(lambda _, shown: (200 if shown == f"Bearer {secret}" else 401, b"")) as port:
        for ours, found in ((secret, ["ok"]), (secrets.token_hex(16), ["ok", "problem"]), ("", ["ok", "problem"])):
            monkeypatch.setenv(TOKEN, ours)
            answers = list(check_host("127.0.0.1", [Socket("orchestrator", port, "/status")]))
            assert verdicts(answers) == found
            assert secret not in repr(answers)


def test_a_token_that_others_can_read_is_a_warning(tmp_path):
    file = tmp_path / "token"
    file.write_text(secrets.token_hex(16))
    for mode, found in ((0o644, ["warning", "skipped"]), (0o600, ["skipped"])):
        file.chmod(mode)
        assert verdicts(check_hosts(build_case(tmp_path, f"--hosts.token-file {file}"))) == found


def test_doctor_checks_ports_only_on_the_machine_that_listens_there(tmp_path, monkeypatch):
    """Loopback has sixteen million addresses, all of them this machine's."""
    monkeypatch.setenv(TOKEN, secrets.token_hex(16))
    words = "--device cpu --hosts.inference 127.0.9.1 10.9.8.7:8003 --hosts.orchestrator 127.0.9.2 "
    for key, host in (("inference.server.port", "127.0.9.1"), ("ports.batches", "127.0.9.2"), ("ports.weights", "")):
        with taken_port(host or "127.0.9.2") as port:
            found = check_ports(build_case(tmp_path, f"{words} --hosts.trainer 10.9.8.7 --{key} {port}"))
            expect(found, *(("problem", f"port {port} on {host} is in use") if host else ("ok",)))
