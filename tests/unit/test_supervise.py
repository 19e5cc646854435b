"""Processes start together, end together, and leave nobody behind. Small Python scripts play the parts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from interrupts import heed_interrupts
from trireme.base.errors import TriremeError
from trireme.config.run import RunConfig
from trireme.launch.descendants import read_process, read_processes
from trireme.launch.plan import Plan, ProcessSpec
from trireme.launch.supervise import Child, Crew, Died, Interrupts, StopAtFirstDeath, supervise

GRACE_S = 1.0
DEADLINE_S = 60.0

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from trireme.base.processes import die_with_parent
FOLDER = Path({folder!r})
NAME = {name!r}
HERE = "import os, pathlib; pathlib.Path({folder!r}, f'pid_{{os.getpid()}}').touch();"

def here():  # the test finds us by this
    (FOLDER / f"pid_{{os.getpid()}}").touch()

def grandchild(code, **options):
    return subprocess.Popen([sys.executable, "-c", HERE + code], **options)

def all_are_here(count):
    while len(list(FOLDER.glob("pid_*"))) < count:
        time.sleep(0.02)

here()
"""
SLEEP = "time.sleep(600)"
STUBBORN = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
COOPERATE = "die_with_parent(int(os.environ['TRIREME_PARENT']))\n"


class Stage:
    """A run folder, the scripts that play its processes, and who of them is alive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        values = {"output_dir": str(folder), "name": "demo", "orchestrator": {"server": {"port": 1}}}
        self.config = RunConfig.model_validate(values)

    def plan(self, **bodies: str) -> Plan:
        roles = {"inference": SLEEP, "orchestrator": SLEEP, "trainer": SLEEP} | bodies
        return Plan(self.folder / "run.json", tuple(self._spec(name, body) for name, body in roles.items()))

    def _spec(self, name: str, body: str) -> ProcessSpec:
        script = self.folder / f"{name}.py"
        script.write_text(PRELUDE.format(folder=str(self.folder), name=name) + body)
        log = self.config.paths.log(name)
        argv = (sys.executable, str(script))
        return ProcessSpec(name=name, argv=argv, env={"PART": name}, log=log, gpus=(), ports={})  # type: ignore[arg-type]

    def pids(self) -> list[int]:
        return [int(path.name[4:]) for path in self.folder.glob("pid_*")]

    def alive(self) -> list[int]:
        processes = (read_process(pid) for pid in self.pids())
        return [process.pid for process in processes if process is not None and not process.zombie]

    def launcher_said(self) -> str:
        return (self.folder / "launcher.out").read_text()


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
    (stage.config.paths.checkpoints / "step_40").mkdir(parents=True)
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
    assert supervise(stage.plan(inference="os.kill(os.getpid(), signal.SIGKILL)"), stage.config) == 1
    out = capsys.readouterr().out
    assert "inference died" in out
    assert "killed by SIGKILL" in out


def test_inference_that_leaves_before_the_end_is_a_death(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert supervise(stage.plan(inference="pass"), stage.config) == 1
    assert "inference ended too early" in capsys.readouterr().out


def test_a_program_that_does_not_exist_is_named_and_nobody_is_left(stage: Stage) -> None:
    plan = stage.plan()
    missing = ProcessSpec(name="trainer", argv=("/no/such",), env={}, log=stage.folder / "log", gpus=(), ports={})
    with pytest.raises(TriremeError, match="trainer could not be started"):
        supervise(Plan(plan.run_file, (*plan.processes[:2], missing)), stage.config)
    assert stage.alive() == []


ORPHAN = "subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
FAMILIES = {
    "in its group": f"grandchild({STUBBORN!r}); all_are_here(4)",
    "in another session": f"grandchild({STUBBORN!r}, start_new_session=True); all_are_here(4); time.sleep(1.5)",
    "orphaned in another session": (
        f"subprocess.run([sys.executable, '-c', {'import subprocess, sys; ' + ORPHAN!r}, HERE + {STUBBORN!r}]); "
        "all_are_here(4)"
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_children_of_children_do_not_outlive_a_failed_run(stage: Stage, family: str) -> None:
    plan = stage.plan(orchestrator=f"{FAMILIES[family]}; sys.exit(1)")
    assert supervise(plan, stage.config, grace_s=GRACE_S) == 1
    assert len(stage.pids()) == 4
    assert stage.alive() == []


def test_the_policy_alone_decides_what_an_exit_means(stage: Stage) -> None:
    """What a policy that restarts needs: one process ends and starts again while the others go on."""
    (stage.folder / "logs").mkdir()
    crew = Crew(stage.plan(trainer="grandchild('import time; time.sleep(600)')\n" + SLEEP).processes, GRACE_S)
    try:
        crew.start()
        _until(lambda: len(stage.pids()) == 4)
        trainer = _child(crew, "trainer")
        trainer.stop()
        assert len(stage.alive()) == 2
        trainer.start()
        _until(lambda: len(stage.alive()) == 4)
        crew.look()
        assert StopAtFirstDeath().judge(crew.children) is None
        os.kill(crew.children[0].family.alive()[0].pid, signal.SIGKILL)
        _until(lambda: _looked(crew).children[0].exit is not None)
        ending = StopAtFirstDeath().judge(crew.children)
        assert isinstance(ending, Died)
        assert ending.dead == (crew.children[0],)
    finally:
        crew.end(Interrupts())
    assert stage.alive() == []


LAUNCHER = """
import sys
sys.path[:0] = {tests!r}
from pathlib import Path
from test_supervise import Stage
from trireme.launch.supervise import supervise

stage = Stage(Path({folder!r}))
sys.exit(supervise(stage.plan(**{bodies!r}), stage.config, grace_s={grace_s!r}))
"""


def _launch(stage: Stage, grace_s: float, **bodies: str) -> subprocess.Popen[bytes]:
    """`supervise` in a process of its own, to be interrupted and killed; what it says is in `launcher.out`."""
    tests = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = LAUNCHER.format(tests=tests, folder=str(stage.folder), bodies=bodies, grace_s=grace_s)
    with open(stage.folder / "launcher.out", "wb") as out:
        return subprocess.Popen(
            [sys.executable, "-c", code], stdout=out, stderr=subprocess.STDOUT, preexec_fn=heed_interrupts
        )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything(stage: Stage, number: signal.Signals, code: int) -> None:
    launcher = _launch(stage, GRACE_S, orchestrator=f"grandchild({STUBBORN!r}, start_new_session=True)\n{SLEEP}")
    _until(lambda: len(stage.pids()) == 4)
    launcher.send_signal(number)
    assert launcher.wait(DEADLINE_S) == code
    assert "stopping (again to kill)" in stage.launcher_said()
    assert stage.alive() == []


def test_a_second_signal_does_not_wait(stage: Stage) -> None:
    launcher = _launch(stage, 10 * DEADLINE_S, trainer=STUBBORN)
    _until(lambda: len(stage.pids()) == 3)
    time.sleep(0.2)  # the trainer's handler
    launcher.send_signal(signal.SIGINT)
    _until(lambda: "stopping" in stage.launcher_said())
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(DEADLINE_S) == 130
    assert stage.alive() == []


def test_kill_9_of_the_launcher_leaves_nobody_even_where_nobody_cooperates(stage: Stage) -> None:
    body = f"grandchild({STUBBORN!r}, start_new_session=True)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEP}"
    launcher = _launch(stage, GRACE_S, orchestrator=body)
    _until(lambda: len(stage.pids()) == 4)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    _until(lambda: stage.alive() == [])


def test_kill_9_of_launcher_and_guard_leaves_nobody_who_asked_to_die_with_its_parent(stage: Stage) -> None:
    grandchild = "from trireme.base.processes import die_with_parent; die_with_parent(); import time; time.sleep(600)"
    bodies = dict.fromkeys(("inference", "trainer"), COOPERATE + SLEEP)
    code = f"{COOPERATE}grandchild('{grandchild}', start_new_session=True)\n{SLEEP}"
    launcher = _launch(stage, GRACE_S, orchestrator=code, **bodies)
    _until(lambda: len(stage.pids()) == 4)
    time.sleep(1)  # the grandchild's imports
    guard = _guard_of(launcher.pid)
    os.kill(guard, signal.SIGKILL)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    _until(lambda: stage.alive() == [])


def _guard_of(launcher: int) -> int:
    children = [process for process in read_processes().values() if process.parent == launcher]
    return next(p.pid for p in children if b"descendants.py" in Path(f"/proc/{p.pid}/cmdline").read_bytes())


def _child(crew: Crew, name: str) -> Child:
    return next(child for child in crew.children if child.spec.name == name)


def _looked(crew: Crew) -> Crew:
    crew.look()
    return crew


def _until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.05)
