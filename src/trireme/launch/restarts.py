"""What an exit means for the run: who is started again, when, and when the run is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import FINAL_EXIT_CODES
from trireme.base.faults import reach
from trireme.config.run import Supervisor
from trireme.launch.children import Child
from trireme.launch.endings import Died, Done, Ending, by_suspicion, clock_time
from trireme.monitor.logs import last_words
from trireme.monitor.metrics import MetricsFile, read_metrics

LEAVE_BY_THEMSELVES = ("orchestrator", "trainer")
LEAVE_S = 60.0  # for the trainer to leave after the orchestrator has
CLEAR_S = 2.0  # between SIGTERM and SIGKILL for what a dead process left behind
WORD_LENGTH = 160  # of a last word that is quoted


class Trained:
    """The newest step that was trained while this launcher looks on."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        rows, self._offset = read_metrics(metrics)
        self.last = max((row["step"] for row in rows[-1:]), default=0)  # for rows of our own, before there is a newer
        self._newest = -1

    def newest(self) -> int:
        """-1 where none was. A step that is trained anew, after an older checkpoint, is no progress."""
        rows, self._offset = read_metrics(self._metrics, self._offset)
        steps = [row["step"] for row in rows if row["process"] == "trainer"]
        self._newest = max([self._newest, *steps])
        self.last = steps[-1] if steps else self.last
        return self._newest


@dataclass
class _Patience:
    """What is left of it for one process."""

    in_a_row: int = 0  # restarts since the last one that was followed by a newly trained step
    trained: int = -1  # newest step when it died last
    due: float | None = None  # when it is to be started again; None while it runs
    clear_by: float = 0.0  # when patience with what it left behind ends


class Restarts:
    """Starts again what dies, alone; the others go on and wait for it.

    Final are: exit codes 2 and 3 (a refused configuration would be refused again, wrong weights be wrong again), more
    than `max_restarts` in a row without a newly trained step between them, and every death where `restart` is false.
    """

    def __init__(
        self,
        config: Supervisor,
        metrics: Path,
        say: Callable[[str], None] = print,
        *,
        leave_s: float = LEAVE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._trained = Trained(metrics)
        self._metrics = MetricsFile(metrics, "supervisor")
        self._say = say
        self._leave_s = leave_s
        self._clock = clock
        self._patience: dict[str, _Patience] = {}
        self._finished_at: float | None = None

    def judge(self, children: Sequence[Child]) -> Ending | None:
        """Called often, from the main thread; never sleeps. None: go on looking after them."""
        if self._is_over(children):
            return Done()
        dead = [child for child in children if child.exit is not None and not _may_have_left(child)]
        final = [(child, why) for child in dead if (why := self._why_final(child)) is not None]
        if final:
            first, why = min(final, key=lambda found: by_suspicion(found[0]))
            others = sorted((child for child in dead if child is not first), key=by_suspicion)
            return Died((first, *others), why)
        if self._finished_at is None:
            for child in dead:
                self._look_after(child, children)
        return None

    def _is_over(self, children: Sequence[Child]) -> bool:
        """Once the orchestrator has left with 0, nothing is lost with the others. The trainer is given some time."""
        awaited = [child for child in children if child.name in LEAVE_BY_THEMSELVES]
        if not any(child.name == "orchestrator" and _may_have_left(child) for child in awaited):
            return False
        now = self._clock()
        self._finished_at = now if self._finished_at is None else self._finished_at
        late = [child for child in awaited if child.exit is None]
        if late and now - self._finished_at < self._leave_s:
            return False
        for child in late:
            self._say(
                f"{child.name} was stopped: it did not leave within {self._leave_s:.0f} s of the run's end. "
                f"Its log: {child.spec.log}"
            )
        failed = [child for child in awaited if child.exit is not None and not _may_have_left(child)]
        if failed and not self._config.restart:
            return False
        for child in failed:
            self._say(f"{_death(child)} after the orchestrator had finished. Its log: {child.spec.log}")
        return True

    def _why_final(self, child: Child) -> str | None:
        """None where it is to be started again; the empty string where there is nothing to add to its exit."""
        assert child.exit is not None
        if self._finished_at is not None and self._config.restart:
            return None
        if not self._config.restart or child.exit.code in FINAL_EXIT_CODES:
            return ""
        patience = self._of(child)
        if patience.due is not None or self._count(child) < self._config.max_restarts:
            return None
        if not self._config.max_restarts:
            return "supervisor.max_restarts is 0."
        return (
            f"It had been started again {self._config.max_restarts} times in a row without a newly trained step "
            "between (supervisor.max_restarts), and was given up."
        )

    def _count(self, child: Child) -> int:
        """Its restarts in a row, as of its death."""
        patience = self._of(child)
        newest = self._trained.newest()
        if newest > patience.trained:
            patience.in_a_row = 0
        patience.trained = newest
        return patience.in_a_row

    def _look_after(self, child: Child, children: Sequence[Child]) -> None:
        """One step on the way to its restart: what it left behind is asked to end, then killed, then it starts."""
        patience = self._of(child)
        now = self._clock()
        if patience.due is None:
            child.restarts_in_s = self._delay_s(patience.in_a_row)
            patience.due, patience.clear_by = now + child.restarts_in_s, now + CLEAR_S
            child.ask_family_to_end()
        elif now >= patience.due and (now >= patience.clear_by or not child.family.alive()):
            patience.due = None
            patience.in_a_row += 1
            self._restart(child, children, patience.in_a_row)

    def _delay_s(self, in_a_row: int) -> float:
        if not in_a_row:
            return 0.0
        return min(self._config.longest_backoff_s, self._config.backoff_s * 2.0 ** min(in_a_row - 1, 60))

    def _restart(self, child: Child, children: Sequence[Child], in_a_row: int) -> None:
        line = f"{_death(child)}: restarted, {_ordinal(in_a_row)} of {self._config.max_restarts} in a row"
        child.end()
        reach("launcher.restarting")
        child.start()
        self._say(line)
        total = sum(child.num_restarts for child in children)
        self._metrics.append(
            max(0, self._trained.last), {f"restarts/{child.name}": child.num_restarts, "restarts/total": total}
        )

    def _of(self, child: Child) -> _Patience:
        return self._patience.setdefault(child.name, _Patience())


def _may_have_left(child: Child) -> bool:
    return child.exit is not None and child.exit.code == 0 and child.name in LEAVE_BY_THEMSELVES


def _death(child: Child) -> str:
    """ "trainer died at 12:01:03 (exit code 1; ValueError: boom)"."""
    assert child.exit is not None
    words = last_words(child.spec.log, child.log_start) if child.exit.code > 0 else []
    said = f"; {words[-1].strip()[:WORD_LENGTH]}" if words else ""
    return f"{child.name} died at {clock_time(child.exit.at)} ({child.exit.short}{said})"


def _ordinal(number: int) -> str:
    """1 -> "1st", 12 -> "12th"."""
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
