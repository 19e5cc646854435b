"""Processes start together, end together, and leave nobody behind. Small Python scripts play the parts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.stage import (
    COOPERATE,
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
from trireme.launch.process_tree import Descendants, Process, read_process, read_processes
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


def test_processes_tied_to_a_killed_launcher_die_without_the_guard(stage):
    tied = f"import pathlib; pathlib.Path({str(stage.folder / 'tied')!r}).touch(); import time; {SLEEP}"
    grandchild = f"from trireme.base.processes import die_with_parent; die_with_parent(); {tied}"
    bodies = dict.fromkeys(("inference", "trainer"), COOPERATE + SLEEP)
    code = f"{COOPERATE}grandchild({grandchild!r}, start_new_session=True)\n{SLEEP}"
    launcher = launch(stage, GRACE_S, orchestrator=code, **bodies)
    until(lambda: len(stage.pids()) == 4 and (stage.folder / "tied").exists())
    children = [process.pid for process in read_processes().values() if process.parent == launcher.pid]
    (guard,) = [pid for pid in children if b"process_tree.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(guard, signal.SIGKILL)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    until(lambda: stage.alive() == [])


RANKS = """
import os, time
from pathlib import Path
from trireme.base.errors import ConfigError
from trireme.cli.command import run_command
from trireme.launch.ranks import become_ranks, end_with_parent, rank

def main(argv):
    end_with_parent()
    become_ranks(2, ["door"])
    Path(f"pid_{rank()}").write_text(str(os.getpid()))
    while not all(Path(f"pid_{n}").exists() for n in range(2)):
        time.sleep(0.02)
    if rank() == 1 and Path("refuse").exists():
        raise ConfigError("no")
    time.sleep(600)

if __name__ == "__main__":
    run_command("door", main)
"""


@pytest.mark.parametrize(
    ("wish", "end", "code", "told"),
    [
        ("refuse", None, 2, ""),
        ("", lambda group, ranks: os.kill(ranks[1], signal.SIGKILL), 1, "stopped. Exit codes: rank 1: -9"),
        ("", lambda group, ranks: group.terminate(), 128 + signal.SIGTERM, ""),
        ("", lambda group, ranks: group.kill(), -signal.SIGKILL, ""),
    ],
)
def test_no_rank_outlives_its_group_however_it_ends(tmp_path, wish, end, code, told):
    (tmp_path / "door.py").write_text(RANKS)
    (tmp_path / (wish or "sleep")).touch()
    environment = os.environ | {"TRIREME_PARENT": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "wb") as log:
        command = [sys.executable, "-m", "door"]
        group = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    files = [tmp_path / f"pid_{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    ranks = [int(file.read_text()) for file in files]
    if end:
        end(group, ranks)
    assert group.wait(DEADLINE_S) == code, (tmp_path / "log").read_text()
    patience_s = DEADLINE_S if code == -signal.SIGKILL else 0  # without it they take a moment
    until(lambda: all(process is None or process.zombie for process in map(read_process, ranks)), patience_s)
    assert told in (tmp_path / "log").read_text()


def test_descendants_are_recorded_as_long_as_they_live_orphans_too():
    """Sandboxes start many short-lived processes; each end and restart looks at all that are recorded."""
    worker, tool, orphan = (Process(10**8 + n, n, parent, 10**8, "S", "") for n, parent in enumerate((1, 10**8, 10**8)))
    before = {process.pid: process for process in (worker, tool, orphan)}
    after = {process.pid: process for process in (worker, orphan._replace(parent=1, session=7))}
    record = Descendants()
    record.add(worker.pid, worker.start)
    assert [len(record.scan(table)) for table in (before, after)] == [2, 0]
    assert [process.pid for process in record.members(before)] == [worker.pid, orphan.pid]
