"""A run whose engines come and go: a machine for each (`machines.py`), real ones or scripted ones, and what happens to
them. Registration, heartbeats, weights and cables are real; what scripted engines sample, and how fast, is not.

Example:
    with open_machines(7, **{TOKEN: secret}) as machines:
        fleet = Fleet(folder, machines, num_real=2)
        with fleet.running():
            fleet.play()
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.engines.scripted_engine import KNOBS
from support.processes.machines import Machine
from support.runs.real_run import Process, Run, wait_until
from support.runs.scripted_kills import Faults

SCRIPTED = Path(__file__).parents[1] / "engines/scripted_engine.py"
DEADLINE_S = 240.0
HELD = "trainer.batch_received"
PREFILL_S = 0.01  # of a scripted engine, per token of a prompt: one request after the other
REST = 10  # versions after the story
WATCH = """
import json, sys, time
from pathlib import Path
from trireme.monitor.status import ask_status
while True:
    if found := ask_status(sys.argv[1], Path(sys.argv[2]), timeout_s=2):
        engines = [(each.url.split("/")[2].split(":")[0], each.state) for each in found.engines]
        print(json.dumps([time.monotonic(), found.batch, engines]), flush=True)
    time.sleep(0.1)
"""

STORY = (
    (5, "cut"), (4, "kill"), (4, "start"), (1, "kill"), (1, "start"), (5, "mend"), (3, "drain"), (3, "start"),
    (4, "kill server"), (2, "cut"), (4, "start"), (5, "kill"), (5, "start"), (5, "kill"), (2, "mend"), (5, "start"),
    (3, "cut"), (1, "drain"), (4, "kill"), (4, "start"), (1, "start"), (5, "kill server"), (5, "start"),
)  # fmt: skip
"""What happens to which engine. One is killed while it joins. The cable that is cut last is mended once the run has
forgotten the engine, which then joins again."""
CUT_OFF = 3


@dataclass(eq=False)
class FleetEngine:
    machine: Machine
    is_real: bool
    process: Process | None = None
    num_starts: int = 0


class Fleet:
    """Machine 0 has orchestrator and trainer, the last one is a stranger's, the others have an engine each."""

    def __init__(self, folder: Path, machines: list[Machine], *, num_real: int, every: int = 5, first: int = 4) -> None:
        """
        Args:
            every: versions from one event of the story to the next.
            first: version of the first event.
        """
        self.folder, self.run, self.faults = folder, Run(folder / "run"), Faults(folder / "faults")
        self.home, *others, self.stranger = machines
        self.engines = {each.number: FleetEngine(each, each.number <= num_real) for each in others}
        self.addresses = {each.address for each in others}
        self.join = ("--join", self.home.address)
        self.every, self.first, self.last = every, first, first + every * len(STORY)  # versions
        self.steps = self.last + REST
        self.events: list[tuple[float, int, str]] = []  # time, engine and what happened to it

    @contextmanager
    def running(self) -> Iterator[None]:
        """Yield once all engines are live, with the trainer at its first batch."""
        own = {"hosts.orchestrator": self.home.address, "hosts.trainer": self.home.address, "max-steps": self.steps}
        words = ["@", "tests/e2e/fleet.toml", "--output-dir", self.run.root]
        words += [str(word) for key, value in own.items() for word in (f"--{key}", value)]
        self.faults.arm(HELD)
        self.core = [
            self.home.start(name, *words, log=self.folder / f"{name}.log", env=self.faults.env)
            for name in ("orchestrator", "trainer")
        ]
        watched = ("-c", WATCH, f"http://{self.home.address}:8001", self.run.root)
        self.watcher = self.home.start(sys.executable, *watched, log=self.folder / "watch.log")
        try:
            for number in self.engines:
                self.strike(number, "start")
            self._go_on_with_all()
            yield
        finally:
            for process in (*self.core, self.watcher, *(each.process for each in self.engines.values())):
                if process is not None:
                    process.end()

    def play(self, meanwhile: Callable[[int], None] = lambda number: None) -> None:
        """Play the story, and see the run to its end with all of the engines."""
        for number, event in enumerate(STORY):
            self.until_version(self.first + self.every * number)
            self.strike(*event)
            meanwhile(number)
        self.until_version(self.last)
        self.faults.arm(HELD)
        silent = f"at http://{self.engines[CUT_OFF].machine.address}:[0-9]+ has been silent for .* forgotten"
        self.until(lambda: re.search(silent, self.core[0].output), "the engine that is cut off to be forgotten")
        self.strike(CUT_OFF, "mend")
        self._go_on_with_all()
        for process in (*self.core, *(each.process for each in self.engines.values())):
            assert process.wait(deadline_s=DEADLINE_S) == 0, process.tail()

    def _go_on_with_all(self) -> None:
        self.until(lambda: self.faults.is_reached(HELD), "the trainer to hold still")
        self.until(lambda: self.looks()[-1:] and self.up(self.looks()[-1]) == self.addresses, "all engines to be up")
        self.faults.release(HELD)

    def strike(self, number: int, what: str) -> None:
        """Have one engine come, return or go."""
        engine = self.engines[number]
        self.events.append((time.monotonic(), number, what))
        print(f"version {self.run.version}: {what} engine {number}", flush=True)
        if what == "start":
            self._start(engine)
        elif what in ("cut", "mend"):
            getattr(engine.machine, what)()
        elif what == "kill server":
            for server in psutil.Process(engine.process._popen.pid).children():
                server.kill()
        else:
            (engine.process.kill if what == "kill" else engine.process._popen.terminate)()

    def _start(self, engine: FleetEngine) -> None:
        if engine.process is not None:
            engine.process.wait(deadline_s=DEADLINE_S)
        engine.num_starts += 1
        log = self.folder / f"engine-{engine.machine.number}-{engine.num_starts}.log"
        words = ("inference",) if engine.is_real else (sys.executable, SCRIPTED)
        words += (*self.join, "--inference.max-num-seqs", "1")  # as scripted ones
        engine.process = engine.machine.start(*words, log=log, env={KNOBS: json.dumps({"prefill_s": PREFILL_S})})

    # what there is to see

    def looks(self) -> list:
        """Looks at the run's status: times, numbers of the next batch, and addresses and states of engines."""
        return [json.loads(line) for line in self.watcher.output.rpartition("\n")[0].splitlines()]

    @staticmethod
    def up(look: list) -> set[str]:
        return {address for address, state in look[2] if state != "starting"}

    def until_version(self, version: int) -> None:
        self.until(lambda: self.run.version >= version, f"version {version}")

    def until(self, condition: Callable[[], object], what: str) -> None:
        def look() -> bool:
            assert not any(process.poll() for process in self.core), "\n".join(each.tail() for each in self.core)
            return bool(condition())

        wait_until(look, what, self.core, deadline_s=DEADLINE_S)
