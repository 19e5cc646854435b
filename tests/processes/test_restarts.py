"""Who dies, freezes or falls silent is started again alone, for as long as that helps."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage import (
    FAMILIES,
    GRACE_S,
    SLEEP,
    STUBBORN,
    Stage,
    child_of,
    looked,
    until,
)
from trireme.base.processes import free_port
from trireme.config.supervisor import Supervisor
from trireme.launch.children import open_crew
from trireme.launch.descendants import read_processes
from trireme.launch.endings import Done
from trireme.launch.frozen import FrozenWatch
from trireme.launch.health import HealthWatch
from trireme.launch.restarts import LEAVE_S, Restarts
from trireme.launch.supervise import supervise
from trireme.monitor.metrics import read_metrics


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for pid in stage.alive():
        os.kill(pid, signal.SIGKILL)


LEAVE_SESSION = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"


# who dies is started again


DONE = "until(lambda: (FOLDER / 'over').exists())"
"""A part that goes on until another one says that the run is over."""
OVER = "(FOLDER / 'over').touch()"


def test_who_dies_is_started_again_alone(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    body = "all_are_here(3)\nif RUN == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
    plan = stage.plan(trainer=body + OVER, orchestrator=DONE, inference=SLEEP)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert [len(stage.runs_of(name)) for name in ("inference", "orchestrator", "trainer")] == [1, 1, 2]
    assert stage.alive() == []
    out = capsys.readouterr().out
    assert re.search(r"trainer died at [\d:]+ \(killed by SIGKILL\): restarted, 1st of 5 in a row", out)
    assert "1 restart: trainer 1" in out
    rows = [row for row in read_metrics(stage.config.paths.metrics)[0] if row["process"] == "supervisor"]
    assert [(row["restarts/trainer"], row["restarts/total"]) for row in rows] == [(1, 1)]


def test_inference_that_leaves_is_started_again(stage: Stage) -> None:
    inference = f"if RUN == 2: {OVER}; time.sleep(600)"
    plan = stage.plan(inference=inference, orchestrator=DONE, trainer=DONE)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert len(stage.runs_of("inference")) == 3


def test_several_that_die_together_are_each_started_again(stage: Stage) -> None:
    dies = "all_are_here(3)\nif RUN == 0: sys.exit(1)\n"
    over = "until(lambda: all(starts(name) == 2 for name in ('inference', 'orchestrator', 'trainer')))"
    plan = stage.plan(inference=dies + SLEEP, orchestrator=dies + over, trainer=dies + over)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0


def test_a_log_keeps_what_every_run_of_its_process_said(stage: Stage) -> None:
    plan = stage.plan(trainer=f"print('run', RUN)\nif RUN < 2: sys.exit(1)\n{OVER}", orchestrator=DONE)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert stage.config.paths.log("trainer").read_text() == "run 0\nrun 1\nrun 2\n"


def test_a_process_that_cannot_stay_alive_is_given_up_and_its_last_words_are_told(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = stage.set(max_restarts=3)
    assert supervise(stage.plan(trainer="raise ValueError('boom')"), stage.config, grace_s=GRACE_S) == 1
    assert len(stage.runs_of("trainer")) == 4
    out = capsys.readouterr().out
    assert re.findall(r"(\S+) of 3 in a row", out) == ["1st", "2nd", "3rd"]
    assert "(exit code 1; ValueError: boom): restarted" in out
    assert "started again 3 times in a row without a newly trained step" in out
    assert "    ValueError: boom" in out
    assert "3 restarts: trainer 3" in out
    assert stage.alive() == []


def test_a_newly_trained_step_gives_new_patience_and_an_old_one_does_not(stage: Stage) -> None:
    stage = stage.set(max_restarts=2)
    new = stage.plan(trainer=f"train(RUN)\nif RUN < 6: sys.exit(1)\n{OVER}", orchestrator=DONE)
    assert supervise(new, stage.config, grace_s=GRACE_S) == 0
    assert len(stage.runs_of("trainer")) == 7
    old = stage.plan(trainer="train(7)\nsys.exit(1)", orchestrator=DONE.replace("over", "never"))
    assert supervise(old, stage.config, grace_s=GRACE_S) == 1
    assert len(stage.runs_of("trainer")) == 7 + 1 + 2


@pytest.mark.parametrize("code", [2, 3])
def test_what_would_only_be_repeated_is_not_tried_again(stage: Stage, code: int) -> None:
    """A refused configuration, weights that are wrong, a journal that is damaged."""
    assert supervise(stage.plan(trainer=f"sys.exit({code})"), stage.config, grace_s=GRACE_S) == code
    assert len(stage.runs_of("trainer")) == 1


def test_once_the_orchestrator_is_done_a_trainer_that_dies_does_not_matter(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    left = "until(lambda: runs('orchestrator') and read_process(runs('orchestrator')[0]).zombie); time.sleep(0.5)"
    plan = stage.plan(orchestrator="all_are_here(3)", trainer=f"{left}; sys.exit(1)")
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert len(stage.runs_of("trainer")) == 1
    assert "after the orchestrator had finished" in capsys.readouterr().out


def test_a_trainer_that_does_not_leave_after_the_end_is_waited_for_and_then_stopped(stage: Stage) -> None:
    said: list[str] = []
    now = [0.0]
    policy = Restarts(stage.config.supervisor, stage.config.paths.metrics, said.append, clock=lambda: now[0])
    with open_crew(stage.plan(orchestrator="pass").processes, lambda: False, GRACE_S) as crew:
        until(lambda: looked(crew) and child_of(crew, "orchestrator").exit is not None)
        assert policy.judge(crew.children) is None
        now[0] = LEAVE_S - 1
        assert policy.judge(crew.children) is None
        now[0] = LEAVE_S
        assert policy.judge(crew.children) == Done()
    assert "trainer was stopped: it did not leave within 60 s" in said[0]
    assert stage.alive() == []


def test_each_restart_in_a_row_waits_twice_as_long_and_the_others_are_looked_after_meanwhile(stage: Stage) -> None:
    now = [0.0]
    config = Supervisor(backoff_s=10, longest_backoff_s=30)
    policy = Restarts(config, stage.config.paths.metrics, lambda _: None, clock=lambda: now[0])
    with open_crew(stage.plan(trainer="sys.exit(1)").processes, lambda: False, GRACE_S) as crew:
        trainer = child_of(crew, "trainer")
        waits = []
        for _ in range(5):
            until(lambda: looked(crew) and trainer.exit is not None)
            until(lambda: policy.judge(crew.children) or trainer.exit is None or trainer.restarts_in_s)
            waits.append(trainer.restarts_in_s or 0)
            if waits[-1]:
                now[0] += waits[-1] - 0.1
                assert policy.judge(crew.children) is None
                assert trainer.exit is not None
                assert f"restarting in {waits[-1]:g} s" in trainer.state().state
                now[0] += 0.2
                until(lambda: policy.judge(crew.children) or trainer.exit is None)
        assert waits == [0, 10, 20, 30, 30]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_family_is_gone_before_its_successor_starts(stage: Stage, family: str) -> None:
    """Each one's own children hold a port that the next one needs; one leaves the session at the last moment."""
    last_moment = f"subprocess.run([sys.executable, '-c', {LEAVE_SESSION!r}, HERE + {STUBBORN!r}])"
    stage.folder.joinpath("port").write_text(str(free_port()))
    lock = "listener = socket.create_server(('127.0.0.1', int((FOLDER / 'port').read_text())))\nos.set_inheritable"
    body = f"{lock}(listener.fileno(), True)\n"
    kin = FAMILIES[family].replace("start_new_session=True", "start_new_session=True, close_fds=False")
    first = f"if RUN == 0: {kin}; {last_moment}; all_are_here(5); os.kill(os.getpid(), signal.SIGKILL)\n"
    plan = stage.plan(trainer=f"{body}{first}{OVER}", orchestrator=DONE)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert len(stage.runs_of("trainer")) == 2
    assert len(stage.pids()) == 6
    assert stage.alive() == []


def test_the_launcher_names_its_points_and_a_restart_may_be_held_there(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = stage.folder / "faults"
    faults.mkdir()
    monkeypatch.setenv("TRIREME_FAULTS", f"folder={faults}")
    for point in ("launcher.started", "launcher.restarting"):
        (faults / point).write_text("hold")
        (faults / f"{point}.go").touch()
    assert supervise(stage.plan(trainer=f"if not RUN: sys.exit(1)\n{OVER}", orchestrator=DONE), stage.config) == 0
    assert {path.name for path in faults.glob("*.reached")} == {
        "launcher.started.reached",
        "launcher.restarting.reached",
    }


# who is frozen or silent is killed


def test_a_frozen_process_is_killed_and_started_again(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage = stage.set(frozen_after_s=2)
    plan = stage.plan(trainer=f"if RUN == 0: os.kill(os.getpid(), signal.SIGSTOP)\n{OVER}", orchestrator=DONE)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    (first, _) = stage.runs_of("trainer")
    out = capsys.readouterr().out
    assert re.search(rf"trainer: process {first} \(.+\) killed, it had been stopped for \d s", out)
    assert "killed by SIGKILL: it had been stopped" in out


def test_a_frozen_child_of_a_process_is_killed_and_its_parent_goes_on(stage: Stage) -> None:
    stage = stage.set(frozen_after_s=2)
    frozen = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    plan = stage.plan(orchestrator=f"assert grandchild({frozen!r}).wait() == -9", trainer="pass")
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert len(stage.runs_of("orchestrator")) == 1


def test_only_time_in_which_the_launcher_itself_was_awake_counts(stage: Stage) -> None:
    now = [0.0]
    watch = FrozenWatch(5, clock=lambda: now[0])
    with open_crew(stage.plan().processes, lambda: False, GRACE_S) as crew:
        until(lambda: len(stage.runs_of("trainer")) == 1)
        (pid,) = stage.runs_of("trainer")
        os.kill(pid, signal.SIGSTOP)
        until(lambda: read_processes()[pid].stopped)
        for passed, killed in ((0, False), (1, False), (3600, False), (1, False), (1, True)):
            now[0] += passed
            assert bool(watch.kill_frozen(crew.children, read_processes())) is killed
        os.kill(pid, signal.SIGCONT)


def test_a_process_that_goes_on_in_time_is_left_alone(stage: Stage) -> None:
    now = [0.0]
    watch = FrozenWatch(3, clock=lambda: now[0])
    with open_crew(stage.plan().processes, lambda: False, GRACE_S) as crew:
        until(lambda: len(stage.runs_of("trainer")) == 1)
        (pid,) = stage.runs_of("trainer")
        for _ in range(3):
            os.kill(pid, signal.SIGSTOP)
            until(lambda: read_processes()[pid].stopped)
            for _ in range(2):
                assert watch.kill_frozen(crew.children, read_processes()) == []
                now[0] += 2
            os.kill(pid, signal.SIGCONT)
            until(lambda: not read_processes()[pid].stopped)
            assert watch.kill_frozen(crew.children, read_processes()) == []


SERVER = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if RUN or not (FOLDER / "sick").exists() else 503)
        self.end_headers()
        (FOLDER / "asked").touch()
        if RUN: (FOLDER / "over").touch()
    def log_message(self, *_): pass
HTTPServer(("127.0.0.1", int((FOLDER / "port").read_text())), Handler).serve_forever()
"""


def test_a_server_that_fell_silent_is_killed_and_started_again(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = stage.set(unhealthy_after_s=1)
    port = free_port()
    (stage.folder / "port").write_text(str(port))
    stage.health["inference"] = f"http://127.0.0.1:{port}/health"
    makes_sick = "until(lambda: (FOLDER / 'asked').exists()); (FOLDER / 'sick').touch()\n"
    plan = stage.plan(inference=f"time.sleep(1)\n{SERVER}", trainer=makes_sick + DONE, orchestrator=DONE)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert len(stage.runs_of("inference")) == 2
    assert re.search(r"inference killed: http://\S+/health had not answered for \d s", capsys.readouterr().out)


def test_a_server_that_listens_no_more_is_not_given_the_time_of_a_slow_one(stage: Stage) -> None:
    closes = "until(lambda: (FOLDER / 'close').exists()); server.server_close(); time.sleep(600)"
    served = (
        "server = HTTPServer(('127.0.0.1', PORT), Handler)\nthreading.Thread(target=server.serve_forever).start()\n"
    )
    port = free_port()
    stage.health["inference"] = f"http://127.0.0.1:{port}/health"
    (stage.folder / "port").write_text(str(port))
    head, _ = SERVER.rsplit("HTTPServer(", 1)
    server = "import threading\n" + head + served.replace("PORT", str(port)) + closes
    with open_crew(stage.plan(inference=server).processes, lambda: False, GRACE_S) as crew:
        watch = HealthWatch(crew.children, 3600, every_s=0.05, refused_for_s=0.2)
        until(lambda: watch.unhealthy_for("inference") == 0)
        (stage.folder / "sick").touch()
        until(lambda: (watch.unhealthy_for("inference") or 0) > 0.5)
        assert watch.kill_silent() == []
        (stage.folder / "close").touch()
        lines: list[str] = []
        until(lambda: lines.extend(watch.kill_silent()) or lines)
        assert "nobody listens there" in lines[0]
        watch.close()


def test_a_server_that_has_not_come_up_yet_is_not_silent(stage: Stage) -> None:
    port = free_port()
    (stage.folder / "port").write_text(str(port))
    stage.health["inference"] = f"http://127.0.0.1:{port}/health"
    (stage.folder / "sick").touch()
    with open_crew(stage.plan(inference=SERVER).processes, lambda: False, GRACE_S) as crew:
        watch = HealthWatch(crew.children, 0.1, every_s=0.05)
        until(lambda: (stage.folder / "asked").exists())
        time.sleep(0.5)
        assert watch.unhealthy_for("inference") is None
        (stage.folder / "sick").unlink()
        until(lambda: watch.unhealthy_for("inference") == 0)
        (stage.folder / "sick").touch()
        until(lambda: (watch.unhealthy_for("inference") or 0) > 0.2)
        child_of(crew, "inference").num_starts += 1  # as if it had been started again
        assert watch.kill_silent() == []
        assert watch.unhealthy_for("inference") is None
        watch.close()


def test_without_restarts_the_first_death_is_the_end_and_nobody_frozen_is_killed(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = stage.set(restart=False, frozen_after_s=1)
    frozen = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    body = f"child = grandchild({frozen!r})\ntime.sleep(4)\nassert child.poll() is None\nsys.exit(7)"
    assert supervise(stage.plan(orchestrator=body), stage.config, grace_s=GRACE_S) == 1
    out = capsys.readouterr().out
    assert "exit code 7" in out
    assert "restarted" not in out
    assert "killed" not in out


def test_what_engines_leave_where_temporary_files_are_goes_with_the_run_and_what_others_leave_stays(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the first life of one has left, whom somebody killed."""
    temporary = Path(tempfile.mkdtemp())
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    leave = "import tempfile; Path(tempfile.gettempdir(), f'{NAME}_{RUN}').touch(); all_are_here(3)\n"
    engine = leave + "if RUN == 0: os.kill(os.getpid(), signal.SIGKILL)\n" + OVER + f"; {SLEEP}"
    plan = stage.plan(inference=engine, orchestrator=leave + DONE, trainer=leave + SLEEP)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert len(stage.runs_of("inference")) == 2
    assert sorted(path.name for path in temporary.iterdir()) == ["orchestrator_0", "trainer_0"]
    shutil.rmtree(temporary)


def test_where_a_folder_of_its_own_would_make_paths_of_sockets_too_long_an_engine_has_the_one_of_all(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = stage.folder / ("t" * 70)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    plan = stage.plan(
        inference=f"import tempfile; (FOLDER / 'told').write_text(tempfile.gettempdir()); {OVER}; {SLEEP}"
    )
    with open_crew(plan.processes, lambda: False, GRACE_S):
        until((stage.folder / "over").exists)
    assert (stage.folder / "told").read_text() == str(temporary)
