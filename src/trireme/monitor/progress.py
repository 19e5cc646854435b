"""The progress of a run, from what its processes report. No I/O and no clock: the views show it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from trireme.monitor.collapse import Warned, Watch
from trireme.monitor.metrics import Row, is_of_step, merge_processes

PACE_STEPS = 20  # steps that the estimate of the time left looks back on
MOST_END_STEPS = 5  # steps at each end of a curve
MOST_STEPS = 1000  # steps whose whole rows are kept

EVAL_REWARD = re.compile(r"eval/(?P<env>.+)/reward")


class ProcessState(NamedTuple):
    """One process, as its supervisor reports it."""

    name: str
    state: str
    log: Path
    log_start: int = 0  # byte of the log at which this run of the process begins
    num_restarts: int = 0

    @property
    def story(self) -> str:
        """The state with the number of restarts: "running, restarted 2x"."""
        return self.state + (f", restarted {self.num_restarts}x" if self.num_restarts else "")


class Evaluation(NamedTuple):
    """Mean reward of one policy version on one environment's held-out examples."""

    env: str
    version: int
    reward: float


@dataclass(frozen=True)
class Ends:
    """Means of the first and the last steps of a curve.

    Example:
        str(Ends(first=0.55, last=0.94, steps=5))  # "the first and the last 5 steps"
    """

    first: float
    last: float
    steps: int

    def __str__(self) -> str:
        return f"the first and the last {self.steps} steps" if self.steps > 1 else "the first and the last step"


def ends_of(values: Sequence[float]) -> Ends | None:
    """Return None if there are no values. The ends of a short curve do not overlap, or it would seem not to change."""
    if not len(values):
        return None
    steps = max(1, min(MOST_END_STEPS, len(values) // 2))
    return Ends(fmean(values[:steps]), fmean(values[-steps:]), steps)


class Progress:
    """Steps, rewards, evaluations, pace and warnings of a run.

    If a process went back (a resume from an older step, a rewind), its later steps are forgotten.

    Rewards and evaluations of the whole run are kept. Whole rows are kept of the `MOST_STEPS` that were reported last,
    and of those that `take_completed` has not returned yet.

    Rows that were added before `begin_session` are the history of a resumed run. They count for rewards and
    evaluations, but not for the pace, `take_completed` and `warnings`.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.num_done = 0
        self.num_session_steps = 0
        self.steps: dict[int, dict[str, Row]] = {}  # batch number or version -> process -> its row; reported last, last
        self._rewards: dict[int, float | None] = {}
        self._evaluations: dict[tuple[int, str], float | None] = {}  # (version, name of the metric) -> reward
        self._newest: dict[str, int] = {}  # process -> its newest step
        self._session: list[tuple[int, float]] | None = None  # (batch number, unix time) of the newest training steps
        self._unreported: list[int] = []
        self._watch = Watch()
        self._num_warned_before = 0

    def begin_session(self) -> None:
        self._session = []
        self._num_warned_before = len(self._watch.warnings)

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            step, process = row["step"], row["process"]

            # An earlier step than the newest means that the process went back, and will report later steps again.
            if is_of_step(row):
                if step < self._newest.get(process, -1):
                    self._forget_after(step, process)
                self._newest[process] = step

            # Put back at the end, so that the dictionary is in order of the latest report.
            processes = self.steps[step] = self.steps.pop(step, {})
            processes[process] = processes.get(process, {}) | row

            if "reward/mean" in row:
                self._rewards[step] = row["reward/mean"]
            if process == "orchestrator":
                self._evaluations |= {(step, name): row[name] for name in row if EVAL_REWARD.fullmatch(name)}

            self._watch.take(row)

            # A batch counts as done when the trainer reports it, since it is the last to work on it.
            if process == "trainer":
                self.num_done = step + 1
                if self._session is not None:
                    self.num_session_steps += 1
                    self._session.append((step, row.get("time_s") or 0.0))
                    self._unreported.append(step)

        # Bound the memory of a long run. Rows that the view has not printed yet stay.
        for step in set(list(self.steps)[:-MOST_STEPS]).difference(self._unreported):
            del self.steps[step]
        del (self._session or [])[:-MOST_STEPS]

    def _forget_after(self, step: int, process: str) -> None:
        for later in [each for each in self.steps if each > step]:
            self.steps[later].pop(process, None)
            if not self.steps[later]:
                del self.steps[later]

        if process == "orchestrator":
            self._rewards = {each: value for each, value in self._rewards.items() if each <= step}
            self._evaluations = {key: value for key, value in self._evaluations.items() if key[0] <= step}

        if process == "trainer":
            self._unreported = [each for each in self._unreported if each <= step]
            self._session = self._session and [each for each in self._session if each[0] <= step]

    def take_completed(self, *, final: bool = False) -> list[int]:
        """Return the batches trained since the last call; the newest only if the orchestrator has reported it too."""
        # The orchestrator's row of the newest batch may come a moment later, and the line would lack its reward.
        count = len(self._unreported)
        if count and not final and "orchestrator" not in self.steps[self._unreported[-1]]:
            count -= 1
        taken, self._unreported = self._unreported[:count], self._unreported[count:]
        return taken

    def merged(self, step: int) -> Row:
        return merge_processes(self.steps[step].values())

    def recent(self, count: int) -> list[int]:
        """Return the newest trained batches, oldest first."""
        return sorted(step for step, rows in self.steps.items() if "trainer" in rows)[-count:]

    def rewards(self) -> list[float]:
        """Return the mean reward of every step, by step."""
        return [value for _, value in sorted(self._rewards.items()) if value is not None]

    def reward_ends(self) -> Ends | None:
        """Return the mean reward of the first and the last few steps."""
        return ends_of(self.rewards())

    def evaluations(self) -> list[Evaluation]:
        """Return all evaluations, by version, then environment."""
        return [
            Evaluation(name.removeprefix("eval/").removesuffix("/reward"), version, value)
            for (version, name), value in sorted(self._evaluations.items())
            if value is not None
        ]

    @property
    def warnings(self) -> list[Warned]:
        """Warnings of this session, in the order in which they came."""
        return self._watch.warnings[self._num_warned_before :]

    @property
    def lasting_warnings(self) -> list[Warned]:
        """Warnings whose cause was seen lately."""
        return list(self._watch.lasting.values())

    def eta_s(self) -> float | None:
        """Return the time left at the pace of the newest steps of this session."""
        recent = (self._session or [])[-PACE_STEPS:]
        if len(recent) < 2:
            return None
        pace_s = (recent[-1][1] - recent[0][1]) / (len(recent) - 1)
        return max(0.0, pace_s * (self.max_steps - self.num_done))
