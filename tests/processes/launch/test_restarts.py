"""Who dies, freezes or falls silent is started again alone, for as long as that helps."""

import asyncio
import os
import re
import signal
import tempfile
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from support.processes.stage import GRACE_S, KIN, ORPHAN, SLEEP, STUBBORN, Stage, child_of, looked, until
from trireme.base.errors import DeadlineExceeded, PeerDied
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.run import Supervisor
from trireme.launch.children import open_children
from trireme.launch.health import FrozenWatch, HealthWatch
from trireme.launch.process_tree import read_processes
from trireme.launch.restarts import LEAVE_S, REASON_LENGTH, Ending, Restarts, shortened
from trireme.launch.standalone_engine import open_server
from trireme.launch.supervise import supervise
from trireme.monitor.metrics import read_metrics

DONE = "until(lambda: (FOLDER / 'over').exists())"
"""A part that goes on until another one says that the run is over."""
OVER = "(FOLDER / 'over').touch()"
FREEZE = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize(
    ("reason", "quoted"),
    [
        ("KeyError: 1", "KeyError: 1"),
        ("NotFinite: it is nan. " + "See `loss` in metrics.jsonl. " * 9, "NotFinite: it is nan. See `loss` in"),
        ("ValueError: " + "long " * 99, "ValueError: long"),
    ],
    ids=["short", "sentences", "one sentence"],
)
def test_a_quoted_reason_ends_at_a_sentence_or_shows_that_it_was_cut(reason, quoted):
    found = shortened(reason)
    assert found.startswith(quoted)
    assert len(found) <= REASON_LENGTH + 4
    assert found == reason or found.endswith(("metrics.jsonl", " ..."))


def test_who_dies_is_started_again_alone(stage, capsys, monkeypatch):
    faults = stage.folder / "faults"
    faults.mkdir()
    monkeypatch.setenv("TRIREME_FAULTS", f"folder={faults}")
    points = ["launcher.restarting", "launcher.started"]
    for point in points:
        (faults / point).write_text("hold")
        (faults / f"{point}.go").touch()
    body = "print('run', RUN)\nall_are_here(3)\nif RUN == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
    plan = stage.plan(trainer=body + OVER, orchestrator=DONE, inference=SLEEP)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert [len(stage.runs_of(name)) for name in ("inference", "orchestrator", "trainer")] == [1, 1, 2]
    assert stage.alive() == []
    assert sorted(path.stem for path in faults.glob("*.reached")) == points
    out = capsys.readouterr().out
    assert re.search(r"trainer died at [\d:]+ \(killed by SIGKILL\): restarted, number 1 of 5 in a row", out)
    assert "1 restart: trainer 1" in out
    assert stage.config.paths.log("trainer").read_text() == "run 0\nrun 1\n"
    rows = [row for row in read_metrics(stage.config.paths.metrics)[0] if row["process"] == "supervisor"]
    assert [(row["restarts/trainer"], row["restarts/total"]) for row in rows] == [(1, 1)]


def test_processes_that_die_together_are_each_restarted(stage):
    dies = "all_are_here(3)\nif RUN == 0: sys.exit(NAME != 'inference')\n"
    over = "until(lambda: all(starts(name) == 2 for name in ('inference', 'orchestrator', 'trainer')))"
    plan = stage.plan(inference=dies + SLEEP, orchestrator=dies + over, trainer=dies + over)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0


def test_trained_step_resets_the_restart_count(stage, capsys):
    stage.set(max_restarts=2)
    elsewhere = "exec(chr(10) * RUN + \"raise ValueError('boom')\")"  # at another line each time
    plan = stage.plan(trainer=f"train(min(RUN, 2))\n{elsewhere}")
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 1
    assert len(stage.runs_of("trainer")) == 5
    out = capsys.readouterr().out
    assert re.findall(r"number (\d) of 2 in a row", out) == ["1", "1", "1", "2"]
    assert "(exit code 1; ValueError: boom): restarted" in out
    assert "2 times in a row without a newly trained step" in out
    assert "    ValueError: boom" in out
    assert "4 restarts: trainer 4" in out
    assert stage.alive() == []


def test_an_exception_that_repeats_at_its_place_is_not_retried(stage, capsys):
    traceback = r"""[rank3]: Traceback (most recent call last):\n[rank3]:   File 'f.py', line 7\n[rank3]: """
    fails = f'print("""{traceback}""".replace(chr(39), chr(34)) + what); sys.exit(1)'
    steps = f"train(min(RUN, 1))\nwhat = 'ValueError: boom' if RUN else 'KeyError: 1'\n{fails}"
    assert supervise(stage.plan(trainer=steps), stage.config, grace_s=GRACE_S) == 1
    assert len(stage.runs_of("trainer")) == 3  # the first two deaths differ, and a step was trained between them
    out = capsys.readouterr().out
    assert "exit code 1; [rank3]: ValueError: boom" in out
    assert (
        'The same exception came twice in a row, without a newly trained step in between: ValueError at File "f.py"'
        in out
    )


def test_a_lost_connection_is_retried_though_it_repeats(stage):
    stage.set(max_restarts=3)
    plan = stage.plan(trainer="raise ConnectionResetError('by the peer')")
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 1
    assert len(stage.runs_of("trainer")) == 4


def test_once_the_orchestrator_is_done_a_trainer_that_dies_does_not_matter(stage, capsys):
    left = "until(lambda: runs('orchestrator') and read_process(runs('orchestrator')[0]).zombie); time.sleep(0.2)"
    plan = stage.plan(orchestrator="all_are_here(3)", trainer=f"{left}; sys.exit(1)")
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert len(stage.runs_of("trainer")) == 1
    assert "after the orchestrator had finished" in capsys.readouterr().out


def test_trainer_that_does_not_exit_after_the_run_is_stopped(stage):
    said: list[str] = []
    now = [0.0]
    policy = Restarts(stage.config.supervisor, stage.config.paths.metrics, said.append, clock=lambda: now[0])
    with open_children(stage.plan(orchestrator="pass").values(), lambda: False, GRACE_S) as crew:
        until(lambda: looked(crew) and child_of(crew, "orchestrator").exit is not None)
        for now[0], ending in ((0, None), (LEAVE_S - 1, None), (LEAVE_S, Ending())):
            assert policy.judge(crew.children) == ending
    assert "trainer was stopped: it did not leave within 60 s" in said[0]
    assert stage.alive() == []


def test_restart_backoff_doubles_up_to_its_limit(stage):
    now = [0.0]
    config = Supervisor(backoff_s=10, longest_backoff_s=30)
    policy = Restarts(config, stage.config.paths.metrics, lambda _: None, clock=lambda: now[0])
    with open_children(stage.plan(trainer="sys.exit(1)").values(), lambda: False, GRACE_S) as crew:
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


def test_the_whole_family_is_gone_before_its_successor_starts(stage):
    """Each one's own children hold a port that the next one needs; one leaves the session at the last moment."""
    last_moment = (
        f"subprocess.run([sys.executable, '-c', {'import subprocess, sys; ' + ORPHAN!r}, HERE + {STUBBORN!r}])"
    )
    listen = f"listener = socket.create_server(('127.0.0.1', {free_port()}))"
    body = f"{listen}\nos.set_inheritable(listener.fileno(), True)\n"
    kin = KIN.replace("start_new_session=True", "start_new_session=True, close_fds=False")
    first = f"if RUN == 0: {kin}; {last_moment}; all_are_here(7); os.kill(os.getpid(), signal.SIGKILL)\n"
    plan = stage.plan(trainer=f"{body}{first}{OVER}", orchestrator=DONE)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert (len(stage.runs_of("trainer")), len(stage.pids()), stage.alive()) == (2, 8, [])


def test_frozen_process_is_killed_then_restarted(stage, capsys):
    stage.set(frozen_after_s=1)
    child = f"child = grandchild({FREEZE!r})\n    assert child.wait() == -9"
    plan = stage.plan(trainer=f"if RUN == 0:\n    {child}\n    {FREEZE}\n{OVER}", orchestrator=DONE)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    out = capsys.readouterr().out
    killed = re.findall(r"trainer: process (\d+) \(.+\) killed, it was stopped for \d s", out)
    assert (len(killed), int(killed[1])) == (2, stage.runs_of("trainer")[0])
    assert "killed by SIGKILL: it was stopped" in out


def test_frozen_watch_ignores_time_in_which_the_launcher_slept(stage):
    now = [0.0]
    watch = FrozenWatch(5, clock=lambda: now[0])
    with open_children(stage.plan().values(), lambda: False, GRACE_S) as crew:
        until(lambda: stage.runs_of("trainer"))
        (pid,) = stage.runs_of("trainer")
        stopped = [(0, 0), (2, 2), (2, 4)]  # seconds that pass, seconds that count
        awake = [(2, None)]
        slept = [(0, 0), (1, 1), (3600, 3), (1, 4), (1, 5)]
        for passed, counted in [*stopped, *awake, *slept]:
            now[0] += passed
            os.kill(pid, signal.SIGCONT if counted is None else signal.SIGSTOP)
            until(lambda is_awake=counted is None: read_processes()[pid].stopped is not is_awake)
            assert bool(watch.kill_frozen(crew.children, read_processes())) is (counted == 5)


SERVER = """
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if RUN or not (FOLDER / "sick").exists() else 503)
        self.end_headers()
        (FOLDER / "asked").touch()
        if RUN: (FOLDER / "over").touch()
    def log_message(self, *_): pass
server = HTTPServer(("127.0.0.1", PORT), Handler)
threading.Thread(target=server.serve_forever).start()
until(lambda: (FOLDER / "close").exists())
server.server_close()
time.sleep(600)
"""


def server_of(stage: Stage) -> str:
    port = free_port()
    stage.health["inference"] = f"http://127.0.0.1:{port}/health"
    return SERVER.replace("PORT", str(port))


def test_a_server_that_fell_silent_is_killed_and_started_again(stage, capsys):
    stage.set(unhealthy_after_s=1)
    makes_sick = "until(lambda: (FOLDER / 'asked').exists()); (FOLDER / 'sick').touch()\n"
    plan = stage.plan(inference=server_of(stage), trainer=makes_sick + DONE, orchestrator=DONE)
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
    assert len(stage.runs_of("inference")) == 2
    assert re.search(r"inference killed: http://\S+/health did not answer for \d s", capsys.readouterr().out)


def test_server_counts_as_silent_only_after_it_was_healthy(stage):
    sick, asked = stage.folder / "sick", stage.folder / "asked"
    sick.touch()
    with open_children(stage.plan(inference=server_of(stage)).values(), lambda: False, GRACE_S) as crew:
        with closing(HealthWatch(crew.children, 3600, every_s=0.05, refused_for_s=0.2)) as watch:
            for _ in range(3):  # it has not come up yet
                asked.unlink(missing_ok=True)
                until(asked.exists)
            assert watch.checks["inference"].silent_s is None
            sick.unlink()
            until(lambda: watch.checks["inference"].silent_s == 0)
            sick.touch()
            until(lambda: (watch.checks["inference"].silent_s or 0) > 0.3)
            assert watch.kill_silent() == []
            child_of(crew, "inference").num_starts += 1  # as if it had been started again
            assert watch.kill_silent() == []
            assert watch.checks["inference"].silent_s is None
            sick.unlink()
            until(lambda: watch.checks["inference"].silent_s == 0)
            (stage.folder / "close").touch()
            lines: list[str] = []
            until(lambda: lines.extend(watch.kill_silent()) or lines)
    assert "its port is closed" in lines[0]


def test_a_server_that_has_just_started_is_polled_until_its_first_answer(stage):
    """Or an engine that its first weights break would pass for one that is still starting, and never be killed."""
    with open_children(stage.plan(inference=server_of(stage)).values(), lambda: False, GRACE_S) as crew:
        with closing(HealthWatch(crew.children, 3600, every_s=3600)) as watch:
            until(lambda: watch.checks["inference"].silent_s == 0)


def test_first_death_ends_the_run_if_restarts_are_disabled(stage, capsys):
    stage.set(restart=False, frozen_after_s=1)
    body = f"child = grandchild({FREEZE!r})\ntime.sleep(3)\nassert child.poll() is None\nsys.exit(7)"
    assert supervise(stage.plan(orchestrator=body), stage.config, grace_s=GRACE_S) == 1
    out = capsys.readouterr().out
    assert [words in out for words in ("exit code 7", "restarted", "killed")] == [True, False, False]


@pytest.mark.parametrize("name", ["t", "t" * 70])
def test_temporary_files_of_engines_are_removed_with_the_run(stage, monkeypatch, name):
    """Also of a first life, and where the paths of sockets would be too long below TMPDIR."""
    leave = "import tempfile; Path(tempfile.gettempdir(), f'{NAME}_{RUN}').touch(); all_are_here(3)\n"
    engine = leave + "if RUN == 0: os.kill(os.getpid(), signal.SIGKILL)\n" + OVER + f"; {SLEEP}"
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder, name)
        temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(temporary))
        monkeypatch.setattr(tempfile, "tempdir", None)
        plan = stage.plan(inference=engine, orchestrator=leave + DONE, trainer=leave + DONE)
        assert supervise(plan, stage.config, grace_s=GRACE_S) == 0
        assert sorted(path.name for path in temporary.iterdir()) == ["orchestrator_0", "trainer_0"]
    assert len(stage.runs_of("inference")) == 2


FAMILY = "grandchild('import time; time.sleep(600)', start_new_session=True)\nall_are_here(2)\n"


async def use_server(stage: Stage, body: str, deadline_s: float = 60, fail: BaseException | None = None) -> None:
    waits = Waits("the check", stage.config.paths.logs)
    stage.health.setdefault("inference", "http://127.0.0.1:1/health")
    spec = stage.plan(inference=body)["inference"]
    async with open_server(spec, waits, deadline_s=deadline_s, grace_s=0.2) as url:
        assert (f"{url}/health", len(stage.alive())) == (spec.health, 2)
        if fail:
            raise fail


@pytest.mark.parametrize("fail", [None, asyncio.CancelledError()])
def test_a_server_is_there_while_it_is_needed_and_no_longer(stage, fail):
    with pytest.raises(type(fail)) if fail else nullcontext():
        asyncio.run(use_server(stage, FAMILY + server_of(stage), fail=fail))
    assert (len(stage.pids()), stage.alive()) == (2, [])


@pytest.mark.parametrize(
    ("body", "error", "told"),
    [
        ("print('no such model'); sys.exit(3)", PeerDied, r"exit code 3.*no such model.*inference.stdout"),
        (SLEEP, DeadlineExceeded, r"the check waits .* for it to become healthy from inference, .*inference.stdout"),
    ],
)
def test_a_server_that_does_not_come_up_is_named_with_its_log_and_ended(stage, body, error, told):
    with pytest.raises(error, match=f"(?s){told}"):
        asyncio.run(use_server(stage, body, deadline_s=1.0 if body == SLEEP else 60))
    assert stage.alive() == []
