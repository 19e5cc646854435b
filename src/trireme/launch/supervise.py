"""Runs the processes of a plan: all start at once, all end together, and who dies first is named with its last words.

Nothing that a process started outlives the run: not after an error, not after Ctrl-C, not after `kill -9` of this
launcher (see `descendants`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trireme.base.errors import TriremeError
from trireme.config.run import RunConfig
from trireme.launch.descendants import GRACE_S, MARKER, Descendants, Guard, end_all, read_processes
from trireme.monitor.live import View, newest_step, open_view, short_time, summary
from trireme.monitor.logs import last_words
from trireme.monitor.progress import ProcessState
from trireme.monitor.wandb_mirror import open_wandb_mirror

if TYPE_CHECKING:
    from trireme.launch.plan import Plan, ProcessSpec

POLL_S = 0.1
REAP_S = 5.0
SCAN_S = 1.0  # between two looks at which processes ours have started
LEAVE_BY_THEMSELVES = ("orchestrator", "trainer")


def supervise(plan: Plan, config: RunConfig, *, grace_s: float = GRACE_S) -> int:
    """Runs a plan to its end and says how it went. `grace_s` is between SIGTERM and SIGKILL.

    Returns: the exit code: 0 done, 1 a process died, 2 a process refused the configuration, 128 + N after signal N.
    Raises: ConfigError where wandb cannot start; nothing runs then.
    """
    started = time.monotonic()
    with open_wandb_mirror(config):
        with catch_signals() as interrupts, open_view(config) as view:
            with open_crew(plan.processes, interrupts, grace_s) as crew:
                ending = _watch(crew, StopAtFirstDeath(), view, interrupts)
                if isinstance(ending, Interrupted):
                    view.say("stopping (again to kill)")
            view.tick(crew.states(), final=True)
        if isinstance(ending, Done):
            view.say(summary(view.progress, config, time.monotonic() - started))
        else:
            view.say("\n".join([*ending.lines(), *_how_to_resume(config)]))
    return ending.exit_code


def _watch(crew: Crew, policy: StopAtFirstDeath, view: View, interrupts: Interrupts) -> Ending:
    """Waits for: an exit that ends the run, or a signal."""
    while True:
        crew.look()
        ending = policy.judge(crew.children)
        if interrupts.first is not None:
            return Interrupted(interrupts.first)
        if ending is not None:
            return ending
        view.tick(crew.states())
        time.sleep(POLL_S)


def _how_to_resume(config: RunConfig) -> list[str]:
    step = newest_step(config.paths.checkpoints)
    return [] if step is None else [f"To go on from step {step}: the same command with --resume"]


# how a run ends


class Exit(NamedTuple):
    """How one process ended."""

    code: int  # minus the signal's number where a signal ended it
    at: float  # unix time at which we saw it

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        name = signal.Signals(-self.code).name if -self.code in set(signal.Signals) else f"signal {-self.code}"
        return f"killed by {name}" + (" (out of memory? `dmesg` knows)" if self.code == -signal.SIGKILL else "")


@dataclass(frozen=True)
class Done:
    """Everything that leaves by itself has left with exit code 0."""

    exit_code: int = 0


@dataclass(frozen=True)
class Interrupted:
    """Somebody asked us to stop."""

    signal_number: int

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number

    def lines(self) -> list[str]:
        return [f"stopped by {signal.Signals(self.signal_number).name}"]


@dataclass(frozen=True)
class Died:
    """A process ended that should not have; the first of `dead` is the one to look at."""

    dead: tuple[Child, ...]

    @property
    def exit_code(self) -> int:
        first = self.dead[0].exit
        return 2 if first is not None and first.code == 2 else 1

    def lines(self) -> list[str]:
        first, *others = self.dead
        lines = [f"{_obituary(first)} All other processes were stopped. Its last words:"]
        lines += [f"    {line}" for line in last_words(first.spec.log, first.log_start) or ["(it said nothing)"]]
        lines.append(f"All of them: {first.spec.log}")
        return lines + [f"{_obituary(child)} Its log: {child.spec.log}" for child in others]


Ending = Done | Interrupted | Died


def _obituary(child: Child) -> str:
    assert child.exit is not None
    when = time.strftime("%H:%M:%S", time.localtime(child.exit.at))
    after = short_time(child.exit.at - child.started_at)
    verb = "ended too early" if child.exit.code == 0 else "died"
    return f"{child.spec.name} {verb} at {when}, {after} after its start: {child.exit}."


class StopAtFirstDeath:
    """Decides what the exits so far mean for the run.

    A policy that restarts the dead one alone would answer here: None, after `child.stop()` and `child.start()`.
    """

    def judge(self, children: Sequence[Child]) -> Ending | None:
        dead = [child for child in children if child.exit is not None and not self._may_leave(child)]
        if dead:
            return Died(tuple(sorted(dead, key=_by_suspicion)))
        awaited = [child for child in children if child.spec.name in LEAVE_BY_THEMSELVES]
        return Done() if awaited and all(child.exit is not None for child in awaited) else None

    def _may_leave(self, child: Child) -> bool:
        return child.exit is not None and child.exit.code == 0 and child.spec.name in LEAVE_BY_THEMSELVES


def _by_suspicion(child: Child) -> tuple[bool, bool, float]:
    """Of several that died between two looks, a killed one first, then one that refused its configuration, then the
    one that fell silent first: the others only noticed."""
    assert child.exit is not None
    spoke_at = child.spec.log.stat().st_mtime if child.spec.log.exists() else 0.0
    return child.exit.code >= 0, child.exit.code != 2, spoke_at


# processes


class Child:
    """One process of the run, in a session of its own, with what it started. `start` works again after `stop`."""

    def __init__(self, spec: ProcessSpec, guard: Guard) -> None:
        self.spec = spec
        self.family = Descendants()
        self.log_start = 0  # where this run of the process begins in its log
        self.started_at = 0.0  # unix time
        self.exit: Exit | None = None  # None while it runs, and where we ended it ourselves
        self.stopped = False
        self._guard = guard
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """From the main thread only: the kernel ends a child that asked for it with the *thread* that started it."""
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.spec.log, "ab") as log:
            self.log_start = log.tell()
            self.started_at, self.exit, self.stopped = time.time(), None, False
            try:
                self._popen = subprocess.Popen(
                    list(self.spec.argv),
                    env=_environment(self.spec),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise TriremeError(
                    f"{self.spec.name} could not be started: {error}. Its command is {list(self.spec.argv)}; the "
                    "program named first must exist and be executable."
                ) from error
        root = self.family.add_root(self._popen.pid)
        self._guard.watch([root] if root else [])

    def poll(self) -> None:
        """Notes an exit without reaping: while the zombie holds its pid, no signal of ours can hit a stranger."""
        if self._popen is None or self.exit is not None:
            return
        result = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is not None:
            code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            self.exit = Exit(code, time.time())

    def stop(self) -> None:
        """Ends it and what it started, for a restart of this one alone."""
        end_all(self.family, launcher=None)
        self.reap()

    def reap(self) -> None:
        if self._popen is not None:
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; nothing can be done about it from here
                self._popen.wait(REAP_S)
            self.family.forget_root(self._popen.pid)
        self.stopped = self.exit is None

    def state(self) -> ProcessState:
        return ProcessState(self.spec.name, self._state(), self.spec.log, self.log_start)

    def _state(self) -> str:
        if self.exit is None:
            return "stopped" if self.stopped else "running"
        return "ended" if self.exit.code == 0 else str(self.exit)


def _environment(spec: ProcessSpec) -> dict[str, str]:
    """Ours, with what makes last words reach the log (also those of a segmentation fault), then the plan's own."""
    words = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return words | dict(os.environ) | dict(spec.env) | {MARKER: str(os.getpid())}


class Crew:
    """All processes of a run."""

    def __init__(self, specs: Sequence[ProcessSpec], grace_s: float) -> None:
        self.guard = Guard(grace_s)
        self.children = [Child(spec, self.guard) for spec in specs]
        self._grace_s = grace_s
        self._scanned = 0.0

    def start(self) -> None:
        for child in self.children:
            child.start()

    def look(self) -> None:
        """Who has exited; now and then also who has started whom."""
        for child in self.children:
            child.poll()
        if time.monotonic() - self._scanned >= SCAN_S:
            self._scanned = time.monotonic()
            table = read_processes()
            for child in self.children:
                self.guard.watch(child.family.scan(table))

    def end(self, interrupts: Interrupts) -> None:
        everybody = Descendants()
        for child in self.children:
            everybody.absorb(child.family)
        end_all(everybody, launcher=os.getpid(), grace_s=self._grace_s, hurry=lambda: interrupts.again)
        for child in self.children:
            child.reap()
        self.guard.dismiss()

    def states(self) -> list[ProcessState]:
        return [child.state() for child in self.children]


@contextmanager
def open_crew(specs: Sequence[ProcessSpec], interrupts: Interrupts, grace_s: float) -> Iterator[Crew]:
    """Runs while open. Afterwards nothing is left of it, whatever happened meanwhile."""
    crew = Crew(specs, grace_s)
    try:
        crew.start()
        yield crew
    finally:
        crew.end(interrupts)


# signals


class Interrupts:
    """Signals that ask us to stop, counted instead of obeyed."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def first(self) -> int | None:
        return self.received[0] if self.received else None

    @property
    def again(self) -> bool:
        return len(self.received) > 1


@contextmanager
def catch_signals() -> Iterator[Interrupts]:
    """Ctrl-C, SIGTERM, and the loss of the terminal, unless it is ignored already (`nohup`)."""
    interrupts = Interrupts()
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: interrupts.received.append(n)) for number in caught}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
