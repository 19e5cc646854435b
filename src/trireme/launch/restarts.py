"""The restart policy: which process is restarted after an exit, when, and how a run ends."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import FINAL_EXIT_CODES
from trireme.base.faults import reach
from trireme.config.run import Supervisor
from trireme.launch.children import Child
from trireme.monitor.lines import last_bytes
from trireme.monitor.logs import failure_lines, failure_reason, repeating_failure
from trireme.monitor.metrics import MetricsFile, read_in_pieces, read_metrics
from trireme.monitor.run_text import short_time

LEAVE_BY_THEMSELVES = ("orchestrator", "trainer")
LEAVE_S = 60.0  # for the trainer to leave after the orchestrator has
CLEAR_S = 2.0  # between SIGTERM and SIGKILL for what a dead process left behind
LAST_BYTES = 1 << 20  # bytes at the end of the metrics, which hold the newest line
REASON_LENGTH = 160  # characters of the reason that is quoted


@dataclass(frozen=True)
class Ending:
    """The end of a run: by default, the orchestrator has left with exit code 0 and nothing is left to do."""

    signal_number: int = 0  # number of the signal that asked the launcher to stop
    dead: tuple[Child, ...] = ()  # processes that died and are not restarted; the first is the likely cause
    why_final: str = ""  # why it is not restarted, in a sentence

    @property
    def exit_code(self) -> int:
        if not self.dead:
            return 128 + self.signal_number if self.signal_number else 0
        first = self.dead[0].exit
        return first.code if first is not None and first.code in FINAL_EXIT_CODES else 1

    def lines(self) -> list[str]:
        if not self.dead:
            return [f"stopped by {signal.Signals(self.signal_number).name}"]
        first, *others = self.dead
        final = f" {self.why_final}" if self.why_final else ""
        lines = [f"{_describe_exit(first)}{final} All other processes were stopped. The end of its log:"]
        lines += [f"    {line}" for line in failure_lines(first.spec.log, first.log_start) or ["(empty)"]]
        lines.append(f"The whole log: {first.spec.log}")
        return lines + [f"{_describe_exit(child)} Its log: {child.spec.log}" for child in others]


def _describe_exit(child: Child) -> str:
    assert child.exit is not None
    after = short_time(child.exit.at - child.started_at)
    verb = "ended too early" if child.exit.code == 0 else "died"
    return f"{child.name} {verb} at {clock_time(child.exit.at)}, {after} after its start: {child.exit}{_reason(child)}."


def _reason(child: Child) -> str:
    """Return "; ValueError: boom" for a process that ended itself."""
    assert child.exit is not None
    reason = shortened(failure_reason(child.spec.log, child.log_start)) if child.exit.code > 0 else ""
    return f"; {reason.removesuffix('.')}" if reason else ""


def shortened(reason: str) -> str:
    """Return as many whole sentences of a reason as are quoted, or the beginning of the first one.

    Example:
        shortened("No step helps. " + "See the log of the trainer. " * 9)  # ends behind a sentence
    """
    if len(reason) <= REASON_LENGTH:
        return reason
    sentences = reason[:REASON_LENGTH].rpartition(". ")[0]
    return sentences or f"{reason[:REASON_LENGTH].rstrip()} ..."


def clock_time(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def by_suspicion(child: Child) -> tuple[bool, bool, float]:
    """Sort processes that died between two looks by how likely each is the cause: a killed one first, then one with a
    final exit code, then the one whose log ended first. The others died because of it."""
    assert child.exit is not None
    logged_at = child.spec.log.stat().st_mtime if child.spec.log.exists() else 0.0
    return child.exit.code >= 0, child.exit.code not in FINAL_EXIT_CODES, logged_at


class Trained:
    """The newest step that was trained since this launcher started, from `metrics.jsonl`."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        rows, self._offset = read_metrics(metrics, last_bytes(metrics, LAST_BYTES))
        self.last = max((row["step"] for row in rows[-1:]), default=0)  # until a newer step is trained
        self._newest = -1

    def newest(self) -> int:
        """Return the newest trained step, or -1. A step that is repeated after a restart is no progress."""
        for rows, offset in read_in_pieces(self._metrics, self._offset):
            self._offset = offset
            steps = [row["step"] for row in rows if row["process"] == "trainer"]
            self._newest = max([self._newest, *steps])
            self.last = steps[-1] if steps else self.last
        return self._newest


@dataclass
class _Backoff:
    """The restart state of one process."""

    in_a_row: int = 0  # restarts since the last one that was followed by a newly trained step
    trained: int = -1  # newest step when it died last
    failure: str | None = None  # type and place of the exception of its last death
    due: float | None = None  # when it will be restarted; None while it runs
    clear_by: float = 0.0  # when its remaining descendants are killed


class Restarts:
    """Restart a process that dies, alone; the other processes keep running and wait for it.

    Not restarted are: exit codes 2 and 3 (a refused configuration, wrong weights), an exception that comes twice in a
    row at the same place, or more than `max_restarts` in a row, without a newly trained step in between, and every
    process if `supervisor.restart` is false.
    """

    def __init__(
        self,
        config: Supervisor,
        metrics: Path,
        say: Callable[[str], None] = print,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._trained = Trained(metrics)
        self._metrics = MetricsFile(metrics, "supervisor")
        self._say = say
        self._clock = clock
        self._backoffs: dict[str, _Backoff] = defaultdict(_Backoff)
        self._finished_at: float | None = None

    def judge(self, children: Sequence[Child]) -> Ending | None:
        """Restart what is due.

        Return how the run ends; None while it continues. Call it often, from the main thread.
        """
        if self._is_over(children):
            return Ending()

        # An exit with code 0 is an end only of processes that leave by themselves; an engine must not end.
        dead = [child for child in children if child.exit is not None and not _may_have_left(child)]
        final = [(child, why) for child in dead if (why := self._why_final(child)) is not None]

        if final:
            first, why = min(final, key=lambda found: by_suspicion(found[0]))
            others = sorted((child for child in dead if child is not first), key=by_suspicion)
            return Ending(dead=(first, *others), why_final=why)

        # Once the orchestrator has finished, no process is needed any more, so none is restarted.
        if self._finished_at is None:
            for child in dead:
                self._look_after(child, children)
        return None

    def _is_over(self, children: Sequence[Child]) -> bool:
        """Return whether the run is done: the orchestrator has exited with 0, and the trainer too or its time is up."""
        awaited = [child for child in children if child.name in LEAVE_BY_THEMSELVES]
        if not any(child.name == "orchestrator" and _may_have_left(child) for child in awaited):
            return False

        # The trainer may still write its last checkpoint.
        now = self._clock()
        self._finished_at = now if self._finished_at is None else self._finished_at
        late = [child for child in awaited if child.exit is None]
        if late and now - self._finished_at < LEAVE_S:
            return False

        for child in late:
            self._say(
                f"{child.name} was stopped: it did not leave within {LEAVE_S:.0f} s of the run's end. "
                f"Its log: {child.spec.log}"
            )

        # A trainer that fails now is an ending of its own if restarts are off; otherwise it is only reported.
        failed = [child for child in awaited if child.exit is not None and not _may_have_left(child)]
        if failed and not self._config.restart:
            return False
        for child in failed:
            self._say(f"{_death(child)} after the orchestrator had finished. Its log: {child.spec.log}")
        return True

    def _why_final(self, child: Child) -> str | None:
        """Return why the process is not restarted (empty if its exit code explains it); None if it is."""
        assert child.exit is not None
        if self._finished_at is not None and self._config.restart:
            return None
        if not self._config.restart or child.exit.code in FINAL_EXIT_CODES:
            return ""
        backoff = self._backoffs[child.name]
        if backoff.due is not None:
            return None

        # A newly trained step shows that the restart helped: count from zero again.
        newest = self._trained.newest()
        if newest > backoff.trained:
            backoff.in_a_row = 0
        backoff.trained = newest

        # An exception that comes again at the same place would come each time.
        failure = repeating_failure(child.spec.log, child.log_start) if child.exit.code > 0 else None
        before, backoff.failure = backoff.failure, failure
        if backoff.in_a_row and failure is not None and failure == before:
            return f"The same exception came twice in a row, without a newly trained step in between: {failure}."

        if backoff.in_a_row < self._config.max_restarts:
            return None
        if not self._config.max_restarts:
            return "supervisor.max_restarts is 0."
        return (
            f"It was restarted {self._config.max_restarts} times in a row without a newly trained step in between "
            "(the limit is supervisor.max_restarts)."
        )

    def _look_after(self, child: Child, children: Sequence[Child]) -> None:
        """Take the next step of a restart: SIGTERM to its remaining descendants, SIGKILL, then the start."""
        backoff = self._backoffs[child.name]
        now = self._clock()

        # A first death is restarted at once, later ones after a growing delay.
        if backoff.due is None:
            child.restarts_in_s = self._config.delay_s(backoff.in_a_row) if backoff.in_a_row else 0.0
            backoff.due, backoff.clear_by = now + child.restarts_in_s, now + CLEAR_S
            child.ask_family_to_end()
        elif now >= backoff.due and (now >= backoff.clear_by or not child.family.alive()):
            backoff.due = None
            backoff.in_a_row += 1
            line = f"{_death(child)}: restarted, number {backoff.in_a_row} of {self._config.max_restarts} in a row"

            # Remaining descendants hold ports and GPU memory that the new process needs.
            child.end()
            reach("launcher.restarting")
            child.start()
            self._say(line)

            total = sum(each.num_restarts for each in children)
            counts = {f"restarts/{child.name}": child.num_restarts, "restarts/total": total}
            self._metrics.append(max(0, self._trained.last), counts)


def _may_have_left(child: Child) -> bool:
    return child.exit is not None and child.exit.code == 0 and child.name in LEAVE_BY_THEMSELVES


def _death(child: Child) -> str:
    """Return "trainer died at 12:01:03 (exit code 1; ValueError: boom)"."""
    assert child.exit is not None
    return f"{child.name} died at {clock_time(child.exit.at)} ({child.exit.short}{_reason(child)})"
