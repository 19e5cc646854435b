"""A run whose processes are small Python scripts, for tests of their launcher."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from support.processes.interrupts import heed_interrupts
from trireme.base.paths import RunPaths, step_folder
from trireme.config.run import RunConfig
from trireme.journal.manifest import MANIFEST, Manifest
from trireme.launch.children import Child, Children
from trireme.launch.plan import Plan, ProcessSpec
from trireme.launch.process_tree import read_process

GRACE_S = 1.0
DEADLINE_S = 60.0

PRELUDE = """
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path
from trireme.base.processes import die_with_parent
from trireme.launch.process_tree import read_process
FOLDER = Path({folder!r})
NAME = {name!r}
HERE = "import os, pathlib; pathlib.Path({folder!r}, f'pid_{{os.getpid()}}').touch();"

def here():  # the test finds us by this
    (FOLDER / f"pid_{{os.getpid()}}").touch()

def grandchild(code, **options):
    return subprocess.Popen([sys.executable, "-c", HERE + code], **options)

def all_are_here(count):
    until(lambda: len(list(FOLDER.glob("pid_*"))) >= count)

def train(step):
    with open(FOLDER / "demo" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({{"step": step, "process": "trainer", "time_s": 0.0}}) + chr(10))

def runs(name):
    return [int(file.read_text()) for file in sorted(FOLDER.glob(f"run_*_of_{{name}}")) if file.read_text()]

def starts(name):
    return len(list(FOLDER.glob(f"run_*_of_{{name}}")))

def until(condition):
    while not condition():
        time.sleep(0.01)

here()
RUN = starts(NAME)  # how often this process was started before
(FOLDER / f"run_{{RUN}}_of_{{NAME}}").write_text(str(os.getpid()))
"""
SLEEP = "time.sleep(600)"
STUBBORN = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
COOPERATE = "die_with_parent(int(os.environ['TRIREME_PARENT']))\n"


class Stage:
    """A run folder, the scripts that play its processes, and who of them is alive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.health: dict[str, str] = {}
        self.set()

    def set(self, **supervisor: Any) -> None:
        self.supervisor = {"backoff_s": 0.05} | supervisor
        values = {"output_dir": str(self.folder), "name": "demo", "orchestrator": {"server": {"port": 1}}}
        self.config = RunConfig.model_validate(values | {"supervisor": self.supervisor})

    def plan(self, **bodies: str) -> Plan:
        roles = {"inference": SLEEP, "orchestrator": SLEEP, "trainer": SLEEP} | bodies
        return {name: self._spec(name, body) for name, body in roles.items()}  # type: ignore[misc]

    def _spec(self, name: str, body: str) -> ProcessSpec:
        script = self.folder / f"{name}.py"
        script.write_text(PRELUDE.format(folder=str(self.folder), name=name) + body)
        where = {"log": self.config.paths.log(name), "gpus": (), "ports": {}, "health": self.health.get(name)}
        return ProcessSpec(name=name, argv=(sys.executable, str(script)), env={"PART": name}, **where)  # type: ignore

    def pids(self) -> list[int]:
        return [int(path.name[4:]) for path in self.folder.glob("pid_*")]

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if (process := read_process(pid)) is not None and not process.zombie]

    def runs_of(self, name: str) -> list[int]:
        return [int(file.read_text()) for file in sorted(self.folder.glob(f"run_*_of_{name}")) if file.read_text()]

    def launcher_said(self) -> str:
        return (self.folder / "launcher.out").read_text()


ORPHAN = "subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
KIN = (
    f"grandchild({STUBBORN!r}); grandchild({STUBBORN!r}, start_new_session=True); "
    f"subprocess.run([sys.executable, '-c', {'import subprocess, sys; ' + ORPHAN!r}, HERE + {STUBBORN!r}]); "
    "all_are_here(6); time.sleep(1.5)"
)
"""Three children of a process that heed no SIGTERM: in its group, in another session, and an orphan in a third one."""

LAUNCHER = """
import sys
sys.path[:0] = {tests!r}
from pathlib import Path
from support.processes.stage import Stage
from trireme.launch.folder import hold_folder
from trireme.launch.supervise import supervise

stage = Stage(Path({folder!r}))
stage.set(**{supervisor!r})
with hold_folder(stage.config.paths) as lock:
    sys.exit(supervise(stage.plan(**{bodies!r}), stage.config, grace_s={grace_s!r}, keep_open=(lock,)))
"""


def launch(stage: Stage, grace_s: float, **bodies: str) -> subprocess.Popen[bytes]:
    """`supervise` in a process of its own, to be interrupted and killed; what it says is in `launcher.out`."""
    places = {"tests": [str(Path(__file__).parents[2])], "folder": str(stage.folder)}
    code = LAUNCHER.format(**places, bodies=bodies, grace_s=grace_s, supervisor=stage.supervisor)
    argv = [sys.executable, "-c", code]
    with open(stage.folder / "launcher.out", "wb") as out:
        return subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, preexec_fn=heed_interrupts)


def child_of(crew: Children, name: str) -> Child:
    return next(child for child in crew.children if child.spec.name == name)


def write_checkpoint(paths: RunPaths, step: int) -> None:
    folder = step_folder(paths.checkpoints, step)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(step, 1, 0.0, {})))


def until(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.01)


def looked(crew: Children) -> bool:
    crew.look()
    return True
