"""What contradicts what, in three parts, and no more of it than anyone would read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

KEPT_PER_ROOM = 200
"""Of each room; the rest is counted. Every room reports in the order of steps, so the first one is among them."""

ROOMS = ("journal", "fates", "order", "tokens", "outcomes", "versions", "checkpoints", "metrics")


@dataclass(frozen=True)
class Contradiction:
    """Two things on disk that cannot both be true of one run.

    Example:
        Contradiction(room="fates", step=12, found="batch 12: group 40, place 3 has no fate", expected="one fate ...",
                      meaning="A rollout was lost. Look at journal/batch_000012.msgpack")
    """

    room: str
    step: int  # batch or version
    found: str  # with its values
    expected: str
    meaning: str  # and what to look at

    def __str__(self) -> str:
        return f"{self.found}\n  expected: {self.expected}\n  {self.meaning}"


class Findings:
    """Collects contradictions and notes (what is worth knowing and contradicts nothing)."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._kept: list[Contradiction] = []
        self._counts: Counter[str] = Counter()

    def add(self, room: str, step: int, found: str, *, expected: str, meaning: str) -> None:
        assert room in ROOMS, room
        self._counts[room] += 1
        if self._counts[room] <= KEPT_PER_ROOM:
            self._kept.append(Contradiction(room, step, found, expected, meaning))

    def note(self, text: str) -> None:
        if len(self.notes) < KEPT_PER_ROOM:
            self.notes.append(text)

    @property
    def total(self) -> int:
        return self._counts.total()

    def in_order(self) -> list[Contradiction]:
        """Those that were kept, by step; within a step what is likelier the cause comes first."""
        return sorted(self._kept, key=lambda one: (one.step, ROOMS.index(one.room)))


def some(values: list[Any] | range, most: int = 6) -> str:
    """A list in words, bounded.

    Example:
        some([1, 2, 3, 4], most=3)  # "1, 2, 3 and 1 more"
    """
    shown = ", ".join(str(value) for value in values[:most])
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")
