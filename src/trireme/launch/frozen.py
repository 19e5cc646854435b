"""Finds processes that somebody stopped and forgot (SIGSTOP, a debugger), and kills them: a frozen process holds up the
whole run for good, a dead one is started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trireme.launch.children import Child
from trireme.launch.descendants import Process

LONGEST_LOOK_S = 2.0  # between two looks; what is above was slept through


class FrozenWatch:
    """Counts how long each process of a run has been stopped."""

    def __init__(self, after_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s = after_s
        self._clock = clock
        self._looked: float | None = None
        self._stopped_s: dict[tuple[int, int], float] = {}  # by pid and start

    def kill_frozen(self, children: Sequence[Child], table: dict[int, Process]) -> list[str]:
        """Returns a line on each process that it killed.

        Time in which we did not look either does not count: where the launcher was stopped together with its run,
        nobody is killed when all of them are woken.
        """
        passed_s = self._passed_s()
        stopped = {(p.pid, p.start): (child, p) for child in children for p in child.family.members(table) if p.stopped}
        self._stopped_s = {key: self._stopped_s[key] + passed_s if key in self._stopped_s else 0.0 for key in stopped}
        return [self._kill(*stopped[key], for_s) for key, for_s in self._stopped_s.items() if for_s >= self._after_s]

    def _passed_s(self) -> float:
        now = self._clock()
        passed = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        return min(passed, LONGEST_LOOK_S)

    def _kill(self, child: Child, process: Process, for_s: float) -> str:
        why = f"it had been stopped for {for_s:.0f} s"
        line = f"{child.name}: process {process.pid} ({_command(process.pid)}) killed, {why}"
        child.kill_member(process, why)
        return line


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
