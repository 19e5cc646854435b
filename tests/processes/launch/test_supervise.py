"""Processes start together, end together, and leave nobody behind. Small Python scripts play the parts."""

import signal
from pathlib import Path

import pytest

from support.processes.stage import (
    DEADLINE_S,
    GRACE_S,
    KIN,
    SLEEP,
    STUBBORN,
    launch,
    until,
    write_checkpoint,
)
from trireme.base.errors import TriremeError
from trireme.config.resolve import updated
from trireme.launch.folder import hold_folder
from trireme.launch.plan import ProcessSpec
from trireme.launch.supervise import supervise

DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def test_run_is_done_once_orchestrator_and_trainer_have_exited(stage, capsys):
    plan = stage.plan(orchestrator="all_are_here(3)", trainer="all_are_here(3); print(os.environ['PART'])")
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert (len(stage.pids()), stage.alive()) == (3, [])
    assert stage.config.paths.log("trainer").read_text() == "trainer\n"
    out = capsys.readouterr().out
    assert "0 of 100 steps" in out
    assert "died" not in out


def test_who_dies_first_is_named_with_its_last_words_and_nobody_is_left(stage, capsys):
    log = stage.config.paths.log("trainer")
    log.parent.mkdir(parents=True)
    log.write_text("Traceback (most recent call last):\nValueError: of yesterday\n")
    stage.set(restart=False)
    stage.config = updated(stage.config, {"trainer.ckpt.resume_step": 0})
    stage.config.paths.metrics.touch()
    write_checkpoint(stage.config.paths, 40)
    plan = stage.plan(
        trainer="all_are_here(6)\ntime.sleep(1.5)\nprint('INFO step 7')\nraise ValueError('boom')",
        orchestrator=f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); {KIN}; time.sleep(600)",
    )
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 1
    assert (len(stage.pids()), stage.alive()) == (6, []), "children of children do not outlive it either"
    out = capsys.readouterr().out
    last_words = ["    Traceback (most recent call last):", "    ValueError: boom", str(log)]
    way_out = "step 40: the same command with --resume instead of --trainer.ckpt.resume-step"
    for words in ["trainer died at", "exit code 1", *last_words, way_out]:
        assert words in out
    for words in ["orchestrator died", "yesterday", "step 7"]:
        assert words not in out


@pytest.mark.parametrize(
    ("restart", "body", "code", "told"),
    [
        (True, "print('error: no such model'); sys.exit(2)", 2, ["error: no such model"]),  # a refused configuration
        (True, "sys.exit(3)", 3, ["exit code 3"]),  # weights that are wrong, a journal that is damaged
        (False, "pass", 1, ["inference ended too early"]),
    ],
)
def test_failure_that_allows_no_restart_ends_the_run(stage, capsys, restart, body, code, told):
    stage.set(restart=restart)
    assert supervise(stage.plan(inference=body), stage.config, grace_s=GRACE_S) == code
    assert len(stage.runs_of("inference")) == 1
    out = capsys.readouterr().out
    assert [words for words in told if words not in out] == []


def test_a_program_that_does_not_exist_is_named_and_nobody_is_left(stage):
    plan = stage.plan()
    missing = ProcessSpec(name="trainer", argv=("/no/such",), env={}, log=stage.folder / "log", gpus=(), ports={})
    with pytest.raises(TriremeError, match="trainer could not be started"):
        supervise(plan | {"trainer": missing}, stage.config)
    assert stage.alive() == []


def test_a_signal_stops_everything(stage):
    launcher = launch(stage, GRACE_S, orchestrator=f"grandchild({STUBBORN!r}, start_new_session=True)\n{SLEEP}")
    until(lambda: len(stage.pids()) == 4)
    launcher.terminate()
    assert launcher.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert "stopping (again to kill)" in stage.launcher_said()
    assert stage.alive() == []


def test_a_second_signal_does_not_wait(stage):
    launcher = launch(stage, 10 * DEADLINE_S, trainer=f"{DEAF}; (FOLDER / 'deaf').touch(); {SLEEP}")
    until(lambda: len(stage.pids()) == 3 and (stage.folder / "deaf").exists())
    launcher.send_signal(signal.SIGINT)
    until(lambda: "stopping" in stage.launcher_said())
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(DEADLINE_S) == 130
    assert stage.alive() == []


def test_killed_launcher_leaves_no_process_behind(stage):
    deaf = f"grandchild({STUBBORN!r}, start_new_session=True)\n{DEAF}"
    note = "(FOLDER / 'temporary').write_text(os.environ['TRIREME_TEMPORARY'])"
    body = f"{note}\n{deaf}\nall_are_here(4)\nif RUN == 0: sys.exit(1)\n{SLEEP}"
    launcher = launch(stage, GRACE_S, orchestrator=body)
    until(lambda: len(stage.runs_of("orchestrator")) == 2 and len(stage.alive()) == 4)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    with hold_folder(stage.config.paths):
        assert stage.alive() == []
        assert not Path((stage.folder / "temporary").read_text()).exists()
