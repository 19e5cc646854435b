"""`trireme doctor`: what it asks, what it says, how it ends, and its rehearsals of environments and of the run."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.stage import until
from support.runs.doctoring import build_case, diagnosed, expect, taken_port
from support.runs.planted_faults import change_column
from support.runs.real_run import is_alive
from support.runs.toy_environments import ECHO, write
from support.runs.written_run import write_whole_run
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.tools.doctor import rehearsal
from trireme.tools.doctor.doctor import CHECKS, Check, run_checks, summary_of
from trireme.tools.doctor.doctor import command as doctor
from trireme.tools.doctor.finding import Case, Finding, ok, warning
from trireme.tools.doctor.rehearsal import Ended, check_environments, judge_environment, judge_run, run_program, shrink

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 60


@pytest.fixture
def workplace(here):
    """An empty folder, in which nothing of the doctor is left."""
    yield here
    assert sorted(here.rglob("*doctor-*")) == []


def test_doctor_finds_no_problem_on_a_quickstart_machine(capsys, workplace, monkeypatch):
    monkeypatch.setattr("trireme.tools.doctor.rehearsal.run_program", lambda *_: pytest.fail("a program was started"))
    code, answers = diagnosed(capsys, "--quick")
    bad = [answer for each in answers.values() for answer in each if answer["verdict"] == "problem"]
    assert (code, bad, list(answers)) == (0, [], [check.name for check in CHECKS])
    left_out = [name for name, each in answers.items() if each[0]["found"] == "left out by `--quick`"]
    assert left_out == [check.name for check in CHECKS if check.is_slow]
    assert list(workplace.iterdir()) == []
    text = (REPOSITORY / "docs" / "doctor.md").read_text()
    assert [name for name in answers if f"| `{name}` |" not in text] == []


def test_doctor_exits_with_1_for_a_problem_but_not_for_a_warning(capsys, workplace, monkeypatch):
    with taken_port() as port:
        assert doctor(["--ports.batches", str(port), "--only", "ports", "disk"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^ok +disk +\d", shown, re.MULTILINE)
    assert re.search(rf"^problem +ports +port {port} on 127.0.0.1 is in use", shown, re.MULTILINE)
    assert f"-> `lsof -i :{port}` shows which" in shown
    assert "1 ok, 1 problem" in shown
    for words, message in (("--quik", "unknown flag `--quik`"), ("--only disc", "Did you mean `disk`?")):
        with pytest.raises(ConfigError, match=re.escape(message)):
            doctor(words.split())
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("trireme.tools.doctor.doctor.CHECKS", (Check("a", lambda _: [warning("hm", "wait")]),))
    assert doctor([]) == 0
    assert "1 warning" in capsys.readouterr().out


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


@pytest.mark.parametrize("is_forking", [False, True])
def test_a_doctor_whose_terminal_is_closed_leaves_nothing(workplace, is_forking):
    """Also where the signal comes while a process is forked: Python ignores what the handler raises then."""
    main = "from trireme.cli.trireme import main; main()"
    forking = "import os; os.register_at_fork(before=lambda: os.kill(os.getpid(), 1)); "
    words = ["-c", is_forking * forking + main, "doctor", "--only", "environments"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    if not is_forking:
        until(lambda: [*workplace.glob("outputs/doctor-*/*")])
        process.send_signal(signal.SIGHUP)
    assert process.wait(DEADLINE_S) == 128 + signal.SIGHUP
    assert list(workplace.iterdir()) == []


def test_doctor_tries_each_environment_once_in_its_own_process(tmp_path, monkeypatch):
    no_key = ECHO.replace("return float", 'raise ValueError("the judge has no key")\n        return float')
    runs: list[Ended] = []
    run = rehearsal.run_program
    monkeypatch.setattr(rehearsal, "run_program", lambda *words: runs.append(run(*words)) or runs[-1])
    toy = {"id": str(write(tmp_path, no_key, name="cannot_score.py"))}
    twice = json.dumps([toy, toy | {"name": "again"}], separators=(",", ":"))
    case = build_case(tmp_path, f"--orchestrator.env {twice}")
    expect(check_environments(case), "problem", "20 examples to train on", "the judge has no key", "trireme env check")
    report = runs[0].read_json()
    assert (len(runs), report["num_done"]) == (1, 0)

    def judged(ended: Ended, verdict: str, words: str) -> None:
        expect([judge_environment(ended, case.config.orchestrator.env[0])], verdict, words)

    judged(Ended(0, "a {brace} of its own\n" + json.dumps(report | {"num_done": 4}), ""), "ok", "4 rollouts")
    judged(Ended(1, json.dumps(report | {"num_done": 3}), ""), "warning", "1 of 4 rollouts failed")
    judged(Ended(2, "", "trireme env: the word list is not here\n"), "problem", "the word list is not here")


def test_the_small_run_is_the_large_one_in_all_but_its_size(tmp_path):
    words = "--trainer.optim.lr 0.5 --orchestrator.batch-size 512 --max-steps 1000 --wandb.project x "
    words += "--orchestrator.sampling.max-tokens 1024 --trainer.ckpt.interval 5 --orchestrator.eval.interval 5 "
    case = build_case(tmp_path, f"{words} --orchestrator.buffer.online-difficulty-filtering")
    config = shrink(case)
    assert (config.max_steps, config.orchestrator.batch_size, config.orchestrator.sampling.max_tokens) == (3, 32, 64)
    assert (config.wandb, config.orchestrator.eval, config.trainer.ckpt.interval) == (None, None, None)
    assert not config.orchestrator.buffer.online_difficulty_filtering
    assert (config.trainer.optim, config.model) == (case.config.trainer.optim, case.config.model)
    assert config.paths.root == case.folder / "run"


def test_doctor_rehearses_a_multi_machine_run_on_this_machine(tmp_path):
    case = build_case(tmp_path, "--device cuda", Devices(gpus=("0",), cores=4))
    assert shrink(case).inference.gpu_memory_utilization == case.config.inference.gpu_memory_utilization == 0.4
    words = "--device cuda --hosts.inference 10.0.0.2 --hosts.orchestrator 10.0.0.3 --hosts.trainer 10.0.0.4 10.0.0.5"
    config = shrink(build_case(tmp_path, words, Devices(gpus=("0", "1"), cores=4)))
    assert (config.hosts.are_loopback, config.trainer.num_ranks) == (True, 1)
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ((0,), (1,))


def test_a_run_that_refuses_to_start_is_a_problem_and_its_files_are_kept(here, capsys):
    code, answers = diagnosed(capsys, "--model.name", str(here / "no-such-model"), "--only", "run")
    (answer,) = answers["run"]
    assert (code, answer["verdict"]) == (1, "problem")
    assert "ended with code 2 after 0 of 3 steps" in answer["found"]
    assert "no-such-model" in answer["found"]
    (kept,) = (here / "outputs").glob("doctor-*")
    assert (kept / "run.json").is_file()
    assert str(kept.relative_to(here)) in answer["fix"]


def test_of_three_steps_the_audit_and_each_log_are_told(tmp_path):
    config = write_whole_run(tmp_path / "run", batches=3)

    def judged(ended: Ended, verdict: str, *words: str) -> dict[str, float]:
        return expect([judge_run(ended, config, began=0.0)], verdict, *words).figures

    assert judged(Ended(0, "", ""), "ok", "the audit finds no fault")["versions_confirmed"] > 0
    change_column("advantages", 0.375, step=1)(config)
    judged(Ended(0, "", ""), "problem", "contradict each other", "trireme audit")
    judged(Ended(None, "", ""), "problem", "was ended: it took too long")
    config.paths.logs.mkdir()
    config.paths.log("inference").write_text("INFO all is well\nRuntimeError: no kernel image\n")
    log = "inference.stdout:\n  INFO all is well\n  RuntimeError: no kernel image"
    judged(Ended(1, "", "inference died"), "problem", "inference died", log, str(config.paths.logs))
