"""Waits with a name and a deadline.

Every wait says which process waits for which peer, for what, since when, and where the peer's log is. Current waits are
shown by `/status` and in the terminal. A wait that runs out raises `DeadlineExceeded` with the same text.

Some work has deadlines of its own (an evaluation, a full disk). A patient wait for what comes after such work starts
counting when the work is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trireme.base.errors import DeadlineExceeded

DISK = "disk"  # a peer without a log


@dataclass
class Wait:
    """One wait, from when it began.

    Example:
        Wait(who="trainer", peer="orchestrator", what="batch 41", deadline_s=600, log=Path("logs/orchestrator.stdout"))
        str(...)  # "trainer waits 12 s for batch 41 from orchestrator (24 of 64 rollouts missing)"
    """

    who: str
    peer: str
    what: str
    deadline_s: float
    log: Path | None = None
    note: str = ""  # the peer's own words about what is missing; may change while waiting
    since: float = field(default_factory=time.monotonic)
    is_excused: Callable[[], bool] = lambda: False  # whether work with a deadline of its own holds it up
    _counts_from: float = 0.0  # `time.monotonic()` at which the deadline was restarted

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since

    @property
    def left_s(self) -> float:
        return self.deadline_s - (time.monotonic() - max(self.since, self._counts_from))

    def restart_deadline(self) -> None:
        """Restart the deadline: the wait continues after work that had a deadline of its own."""
        self._counts_from = time.monotonic()

    def check(self) -> None:
        """Raise DeadlineExceeded if the deadline has passed."""
        if self.is_excused():
            self.restart_deadline()
        if self.left_s <= 0:
            where = f" Look at {self.log}" if self.log else ""
            raise DeadlineExceeded(f"{self}, longer than the {self.deadline_s:.0f} s allowed.{where}")

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.who} waits {self.waited_s:.0f} s for {self.what} from {self.peer}{note}"


class Waits:
    """The waits of one process at this moment, the longest first."""

    def __init__(self, who: str, logs: Path | None = None) -> None:
        self.who = who
        self.is_peer_busy: Callable[[], bool] = lambda: False
        self._logs = logs
        self._open: list[Wait] = []
        self._num_jobs = 0

    @contextmanager
    def waiting(self, what: str, *, peer: str, deadline_s: float, patient: bool = False) -> Iterator[Wait]:
        """Register a wait for the duration of the context.

        Args:
            patient: the wait is for something that comes only after what this process, or its peer, is busy with.
        """
        log = self._logs / f"{peer}.stdout" if self._logs and peer != DISK else None
        wait = Wait(who=self.who, peer=peer, what=what, deadline_s=deadline_s, log=log)
        if patient:
            wait.is_excused = lambda: self.is_busy or self.is_peer_busy()
        self._open.append(wait)
        try:
            yield wait
        finally:
            self._open.remove(wait)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark this process as busy with work that has a deadline of its own, for the duration of the context."""
        self._num_jobs += 1
        try:
            yield
        finally:
            self._num_jobs -= 1

    @property
    def is_busy(self) -> bool:
        """Return whether this process is busy, or waits for room on a full disk."""
        return self._num_jobs > 0 or any(wait.peer == DISK for wait in self.now())

    def now(self) -> list[Wait]:
        return list(self._open)

    def __str__(self) -> str:
        return "; ".join(map(str, self._open))
