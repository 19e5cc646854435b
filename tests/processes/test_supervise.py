"""Processes start together, end together, and leave nobody behind. Small Python scripts play the parts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage import (
    COOPERATE,
    DEADLINE_S,
    FAMILIES,
    GRACE_S,
    SLEEP,
    STUBBORN,
    Stage,
    launch,
    until,
    write_checkpoint,
)
from trireme.base.errors import TriremeError
from trireme.launch.descendants import read_processes
from trireme.launch.folder import hold_folder
from trireme.launch.plan import Plan, ProcessSpec
from trireme.launch.supervise import supervise


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for pid in stage.alive():
        os.kill(pid, signal.SIGKILL)


def test_a_run_is_done_when_orchestrator_and_trainer_have_left_and_then_inference_ends(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = stage.plan(
        orchestrator="all_are_here(3)", trainer="all_are_here(3); time.sleep(0.3); print(os.environ['PART'])"
    )
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert len(stage.pids()) == 3
    assert stage.alive() == []
    assert stage.config.paths.log("trainer").read_text() == "trainer\n"
    out = capsys.readouterr().out
    assert "0 of 100 steps" in out
    assert "died" not in out


def test_who_dies_first_is_named_with_its_last_words_and_nobody_is_left(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    log = stage.config.paths.log("trainer")
    log.parent.mkdir(parents=True)
    log.write_text("Traceback (most recent call last):\nValueError: of yesterday\n")
    stage = stage.set(restart=False)
    stage.config.paths.metrics.touch()
    write_checkpoint(stage.config.paths, 40)
    plan = stage.plan(
        trainer="all_are_here(3)\nprint('INFO step 7')\nraise ValueError('boom')",
        orchestrator="signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); all_are_here(3); time.sleep(600)",
    )
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 1
    assert stage.alive() == []
    out = capsys.readouterr().out
    assert "trainer died at" in out
    assert "exit code 1" in out
    assert "    Traceback (most recent call last):" in out
    assert "    ValueError: boom" in out
    assert str(log) in out
    assert "orchestrator died" not in out
    assert "yesterday" not in out
    assert "step 7" not in out
    assert "step 40: the same command with --resume" in out


def test_a_refused_configuration_ends_with_2(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert supervise(stage.plan(inference="print('error: no such model'); sys.exit(2)"), stage.config) == 2
    assert "error: no such model" in capsys.readouterr().out


def test_a_killed_process_is_named_by_its_signal(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage = stage.set(restart=False)
    assert supervise(stage.plan(inference="os.kill(os.getpid(), signal.SIGKILL)"), stage.config) == 1
    out = capsys.readouterr().out
    assert "inference died" in out
    assert "killed by SIGKILL" in out


def test_inference_that_leaves_before_the_end_is_a_death(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage = stage.set(restart=False)
    assert supervise(stage.plan(inference="pass"), stage.config) == 1
    assert "inference ended too early" in capsys.readouterr().out


def test_a_program_that_does_not_exist_is_named_and_nobody_is_left(stage: Stage) -> None:
    plan = stage.plan()
    missing = ProcessSpec(name="trainer", argv=("/no/such",), env={}, log=stage.folder / "log", gpus=(), ports={})
    with pytest.raises(TriremeError, match="trainer could not be started"):
        supervise(Plan(plan.run_file, (*plan.processes[:2], missing)), stage.config)
    assert stage.alive() == []


@pytest.mark.parametrize("family", FAMILIES)
def test_children_of_children_do_not_outlive_a_failed_run(stage: Stage, family: str) -> None:
    stage = stage.set(restart=False)
    plan = stage.plan(orchestrator=f"{FAMILIES[family]}; sys.exit(1)")
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 1
    assert len(stage.pids()) == 4
    assert stage.alive() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything(stage: Stage, number: signal.Signals, code: int) -> None:
    launcher = launch(stage, GRACE_S, orchestrator=f"grandchild({STUBBORN!r}, start_new_session=True)\n{SLEEP}")
    until(lambda: len(stage.pids()) == 4)
    launcher.send_signal(number)
    assert launcher.wait(DEADLINE_S) == code
    assert "stopping (again to kill)" in stage.launcher_said()
    assert stage.alive() == []


def test_a_second_signal_does_not_wait(stage: Stage) -> None:
    launcher = launch(stage, 10 * DEADLINE_S, trainer=STUBBORN)
    until(lambda: len(stage.pids()) == 3)
    time.sleep(0.2)  # the trainer's handler
    launcher.send_signal(signal.SIGINT)
    until(lambda: "stopping" in stage.launcher_said())
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(DEADLINE_S) == 130
    assert stage.alive() == []


def test_kill_9_of_the_launcher_leaves_nobody_even_where_nobody_cooperates(stage: Stage) -> None:
    body = f"grandchild({STUBBORN!r}, start_new_session=True)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEP}"
    launcher = launch(stage, GRACE_S, orchestrator=body)
    until(lambda: len(stage.pids()) == 4)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    until(lambda: stage.alive() == [])


def test_kill_9_of_the_launcher_leaves_nobody_after_a_restart_either(stage: Stage) -> None:
    body = f"grandchild({STUBBORN!r}, start_new_session=True)\nall_are_here(4)\nif RUN == 0: sys.exit(1)\n{SLEEP}"
    launcher = launch(stage, GRACE_S, orchestrator=body)
    until(lambda: len(stage.runs_of("orchestrator")) == 2 and len(stage.alive()) == 4)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    until(lambda: stage.alive() == [])


def test_a_session_that_is_stopped_as_a_whole_goes_on_as_a_whole(stage: Stage) -> None:
    stage = stage.set(frozen_after_s=2.5)
    launcher = launch(stage, GRACE_S)
    until(lambda: len(stage.pids()) == 3)
    everybody = [*stage.pids(), launcher.pid]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in reversed(everybody):  # the launcher is woken before its processes
            os.kill(pid, number)
            time.sleep(0.1)
        time.sleep(3)
    assert len(stage.alive()) == 3
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(DEADLINE_S) == 130
    assert "killed" not in stage.launcher_said()


def test_a_folder_is_held_until_nothing_of_a_killed_run_is_left(stage: Stage) -> None:
    body = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEP}"
    launcher = launch(stage, GRACE_S, trainer=body)
    until(lambda: len(stage.pids()) == 3)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    with hold_folder(stage.config.paths):
        assert stage.alive() == []


def test_kill_9_of_launcher_and_guard_leaves_nobody_who_asked_to_die_with_its_parent(stage: Stage) -> None:
    grandchild = "from trireme.base.processes import die_with_parent; die_with_parent(); import time; time.sleep(600)"
    bodies = dict.fromkeys(("inference", "trainer"), COOPERATE + SLEEP)
    code = f"{COOPERATE}grandchild('{grandchild}', start_new_session=True)\n{SLEEP}"
    launcher = launch(stage, GRACE_S, orchestrator=code, **bodies)
    until(lambda: len(stage.pids()) == 4)
    time.sleep(1)  # the grandchild's imports
    guard = _guard_of(launcher.pid)
    os.kill(guard, signal.SIGKILL)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    until(lambda: stage.alive() == [])


def _guard_of(launcher: int) -> int:
    children = [process for process in read_processes().values() if process.parent == launcher]
    return next(p.pid for p in children if b"descendants.py" in Path(f"/proc/{p.pid}/cmdline").read_bytes())
