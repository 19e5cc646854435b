"""`trireme doctor`: what it asks, what it says, and how it ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from doctoring import build_case, diagnosed, taken_port
from real_run import is_alive
from stage import until
from trireme.base.errors import ConfigError
from trireme.cli.workspace.doctor import CHECKS, doctor
from trireme.tools.doctor.rehearsal import run_program
from trireme.tools.doctor.report import Case, Check, Finding, ok, run_checks, summary_of, warning

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 60


@pytest.fixture(autouse=True)
def nothing_is_left(here):
    yield
    assert sorted(here.rglob("*doctor-*")) == []


def test_a_machine_that_can_run_the_quickstart_is_told_so_and_quick_starts_no_program(capsys, here, monkeypatch):
    monkeypatch.setattr("trireme.tools.doctor.rehearsal.run_program", lambda *_: pytest.fail("a program was started"))
    code, answers = diagnosed(capsys, "--quick")
    bad = [answer for each in answers.values() for answer in each if answer["verdict"] == "problem"]
    assert (code, bad, list(answers)) == (0, [], [check.name for check in CHECKS])
    left_out = [name for name, each in answers.items() if each[0]["found"] == "left out by `--quick`"]
    assert left_out == [check.name for check in CHECKS if check.is_slow]
    assert list(here.iterdir()) == []
    text = (REPOSITORY / "docs" / "doctor.md").read_text()
    assert [name for name in answers if f"| `{name}` |" not in text] == []


def test_a_problem_ends_it_with_1_and_with_what_to_do_and_a_warning_does_not(capsys, monkeypatch):
    with taken_port() as port:
        assert doctor(["--ports.batches", str(port), "--only", "ports", "disk"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^ok +disk +\d", shown, re.MULTILINE)
    assert re.search(rf"^problem +ports +port {port} on 127.0.0.1 is in use", shown, re.MULTILINE)
    assert f"-> `lsof -i :{port}` shows which" in shown
    assert "1 ok, 1 problem" in shown
    monkeypatch.setattr("trireme.cli.workspace.doctor.CHECKS", (Check("a", lambda _: [warning("hm", "wait")]),))
    assert doctor([]) == 0
    assert "1 warning" in capsys.readouterr().out
    for words, message in (("--quik", "unknown flag `--quik`"), ("--only disc", "expected some of a.")):
        with pytest.raises(ConfigError, match=re.escape(message)):
            doctor(words.split())
    assert capsys.readouterr().out == ""


def test_the_run_itself_is_not_tried_where_a_problem_would_end_it(tmp_path):
    def broken(_: Case) -> list[Finding]:
        raise RuntimeError("the driver is on fire")

    checks = [
        Check("ill", broken),
        Check("well", lambda _: [ok("fine")]),
        Check("run", lambda _: pytest.fail("it was tried"), needs_health=True),
    ]
    answers = list(run_checks(checks, build_case(tmp_path), quick=False))
    assert [answer.verdict for answer in answers] == ["problem", "ok", "skipped"]
    assert "RuntimeError: the driver is on fire" in answers[0].found
    assert "(ill)" in answers[2].found
    assert summary_of([answers[0], *answers, answers[1]]) == "2 ok, 2 problems, 1 skipped"


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.tools.doctor.rehearsal.LEAVE_S", 0.5)
    (tmp_path / "hangs.py").write_text(
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "away = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"  # which keeps the pipes open
        "print(child.pid, away.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = run_program(1.0, "hangs")
    child, away = ended.output.split()
    os.kill(int(away), signal.SIGKILL)
    assert (ended.code, ended.how) == (None, "was ended: it took too long")
    until(lambda: not is_alive(child))


def test_a_doctor_whose_terminal_is_closed_leaves_nothing(here):
    command = [sys.executable, "-m", "trireme.cli.trireme", "doctor", "--only", "environments"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    until(lambda: [*here.glob("outputs/doctor-*/*")])
    process.send_signal(signal.SIGHUP)
    assert process.wait(DEADLINE_S) == 128 + signal.SIGHUP
    assert list(here.iterdir()) == []
