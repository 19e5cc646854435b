"""What a run has reached so far, from what its processes report. No I/O, no clock: the views draw it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from trireme.monitor.collapse import Warned, Watch
from trireme.monitor.ends import Ends, ends_of
from trireme.monitor.metrics import Row, merge_processes

PACE_STEPS = 20  # steps that the estimate of the time left looks back on

_EVAL_REWARD = re.compile(r"eval/(?P<env>.+)/reward")


class ProcessState(NamedTuple):
    """One process as its supervisor sees it."""

    name: str
    state: str
    log: Path
    log_start: int = 0  # byte of the log at which this run of the process begins
    num_restarts: int = 0

    @property
    def story(self) -> str:
        """ "running, restarted 2x"."""
        return self.state + (f", restarted {self.num_restarts}x" if self.num_restarts else "")


class StatusWait(msgspec.Struct, frozen=True):
    """A wait in the orchestrator's `/status`; `base.waiting.Wait` is its origin."""

    who: str = ""
    what: str = ""
    peer: str = ""
    waited_s: float = 0.0
    deadline_s: float = 0.0
    note: str = ""
    text: str = ""


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine in the orchestrator's `/status`."""

    url: str = ""
    state: str = ""
    version: int | None = None


class Status(msgspec.Struct, frozen=True):
    """The orchestrator's `/status`. What is missing there has a default here.

    Example:
        {"run": "x", "state": "running", "version": 3, "batch": 4, "max_steps": 20, "in_flight": 64, "waits": [...]}
    """

    run: str = ""
    state: str = "starting"  # starting | running | finishing | done
    version: int = 0
    batch: int = 0
    max_steps: int = 0
    in_flight: int = 0
    waits: tuple[StatusWait, ...] = ()
    engines: tuple[EngineStatus, ...] = ()

    def root_wait(self) -> StatusWait | None:
        """What holds everything up: the longest wait for a peer that does not wait itself, or else the longest."""
        waiting = {wait.who for wait in self.waits}
        roots = [wait for wait in self.waits if wait.peer and wait.peer not in waiting]
        return max(roots or self.waits, key=lambda wait: wait.waited_s, default=None)

    def waits_of(self, process: str) -> list[StatusWait]:
        return [wait for wait in self.waits if wait.who == process]


class Evaluation(NamedTuple):
    """Mean reward of one policy version on one environment's held-out examples."""

    env: str
    version: int
    reward: float


class Progress:
    """Steps, rewards, evaluations, pace and warnings of a run.

    What was reported before `begin_session` (by the run that is being resumed) counts as history: it is in the
    rewards and evaluations, but not in the pace, not in `take_completed` and not in `warnings`.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.num_done = 0
        self.steps: dict[int, dict[str, Row]] = {}  # batch number or version -> process -> its row
        self._session: list[tuple[int, float]] | None = None  # (batch number, unix time) of each training step
        self._unreported: list[int] = []
        self._watch = Watch()
        self._num_warned_before = 0

    def begin_session(self) -> None:
        self._session = []
        self._unreported = []
        self._num_warned_before = len(self._watch.said)

    @property
    def num_session_steps(self) -> int:
        return len(self._session or ())

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            processes = self.steps.setdefault(row["step"], {})
            processes[row["process"]] = processes.get(row["process"], {}) | row
            self._watch.take(row)
            if row["process"] == "trainer":
                self._add_training_step(row)

    def _add_training_step(self, row: Row) -> None:
        self.num_done = row["step"] + 1
        self._unreported.append(row["step"])
        if self._session is not None:
            self._session.append((row["step"], row.get("time_s") or 0.0))

    def take_completed(self, *, final: bool = False) -> list[int]:
        """Batch numbers trained since the last call; the newest only once the orchestrator too has reported it."""
        count = len(self._unreported)
        if count and not final and "orchestrator" not in self.steps[self._unreported[-1]]:
            count -= 1
        taken, self._unreported = self._unreported[:count], self._unreported[count:]
        return taken

    def merged(self, step: int) -> Row:
        return merge_processes(self.steps[step].values())

    def recent(self, count: int) -> list[int]:
        """The newest trained batches, oldest first."""
        return sorted(step for step, rows in self.steps.items() if "trainer" in rows)[-count:]

    def series(self, name: str) -> list[float]:
        """Every known value of a metric, by step."""
        values = (row.get(name) for step in sorted(self.steps) for row in self.steps[step].values())
        return [value for value in values if value is not None]

    def reward_ends(self) -> Ends | None:
        """Mean reward of the first and the last few steps."""
        return ends_of(self.series("reward/mean"))

    def evaluations(self) -> list[Evaluation]:
        """By version, then environment."""
        found = []
        for version in sorted(self.steps):
            for name, value in sorted(self.steps[version].get("orchestrator", {}).items()):
                match = _EVAL_REWARD.fullmatch(name)
                if match and value is not None:
                    found.append(Evaluation(match["env"], version, value))
        return found

    @property
    def warnings(self) -> list[Warned]:
        """Of this session, in the order in which they came."""
        return self._watch.said[self._num_warned_before :]

    @property
    def lasting_warnings(self) -> list[Warned]:
        """What has been seen lately."""
        return list(self._watch.lasting.values())

    def step_seconds(self, step: int) -> float | None:
        """How long a training step took: as reported, or from the end of the one before it to its own end."""
        reported = self.steps.get(step, {}).get("trainer", {}).get("time/step")
        if reported is not None:
            return reported
        ends = dict(self._session or ())
        return ends[step] - ends[step - 1] if step in ends and step - 1 in ends else None

    def eta_s(self) -> float | None:
        """Time left at the pace of the newest steps of this session."""
        recent = (self._session or [])[-PACE_STEPS:]
        if len(recent) < 2:
            return None
        pace_s = (recent[-1][1] - recent[0][1]) / (len(recent) - 1)
        return max(0.0, pace_s * (self.max_steps - self.num_done))
