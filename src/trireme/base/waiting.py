"""The one place where a wait is given its name and its deadline.

Whoever waits says for whom, for what, since when, and where that peer's log is. What a process waits for now is shown
by `/status` and in the terminal; a wait that runs out raises `DeadlineExceeded` with the same words.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trireme.base.errors import DeadlineExceeded

DISK = "disk"  # a peer without a log


@dataclass
class Wait:
    """One wait, from its first second on.

    Example:
        Wait(who="trainer", peer="orchestrator", what="batch 41", deadline_s=600, log=Path("logs/orchestrator.stdout"))
        str(...)  # "trainer waits 12 s for batch 41 from orchestrator (3 of 8 groups missing)"
    """

    who: str
    peer: str
    what: str
    deadline_s: float
    log: Path | None = None
    note: str = ""  # the peer's own words about what is missing; may change while waiting
    since: float = field(default_factory=time.monotonic)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since

    @property
    def left_s(self) -> float:
        return self.deadline_s - self.waited_s

    def check(self) -> None:
        """Raises: DeadlineExceeded once the deadline has passed."""
        if self.left_s <= 0:
            raise DeadlineExceeded(f"{self}, longer than the {self.deadline_s:.0f} s allowed.{self._where_to_look()}")

    def _where_to_look(self) -> str:
        return f" Look at {self.log}" if self.log else ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.who} waits {self.waited_s:.0f} s for {self.what} from {self.peer}{note}"


class Waits:
    """What one process waits for at this moment, longest first."""

    def __init__(self, who: str, logs: Path | None = None) -> None:
        self.who = who
        self._logs = logs
        self._open: list[Wait] = []

    @contextmanager
    def waiting(self, what: str, *, peer: str, deadline_s: float) -> Iterator[Wait]:
        log = self._logs / f"{peer}.stdout" if self._logs and peer != DISK else None
        wait = Wait(who=self.who, peer=peer, what=what, deadline_s=deadline_s, log=log)
        self._open.append(wait)
        try:
            yield wait
        finally:
            self._open.remove(wait)

    def now(self) -> list[Wait]:
        return list(self._open)

    def __str__(self) -> str:
        return "; ".join(map(str, self._open))
