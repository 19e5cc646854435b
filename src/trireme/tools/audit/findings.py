"""Findings of an audit: contradictions in three parts, limited to what a person would read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

KEPT_PER_AREA = 200
"""Contradictions of each area that are kept; the rest are counted. Areas report in the order of steps."""

AREAS = ("journal", "fates", "order", "tokens", "outcomes", "versions", "checkpoints", "metrics")


@dataclass(frozen=True)
class Contradiction:
    """Two things on disk that cannot both be true of one run.

    Example:
        Contradiction(area="fates", step=12, found="batch 12: group 40, place 3 has no fate", expected="one fate ...",
                      meaning="A rollout was lost. Look at journal/batch_000012.msgpack")
    """

    area: str
    step: int  # batch or version
    found: str  # with its values
    expected: str
    meaning: str  # and what to look at

    def __str__(self) -> str:
        return f"{self.found}\n  expected: {self.expected}\n  {self.meaning}"


class Findings:
    """Contradictions, and notes on what is unusual but no contradiction."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._kept: list[Contradiction] = []
        self._counts: Counter[str] = Counter()

    def add(self, area: str, step: int, found: str, *, expected: str, meaning: str) -> None:
        assert area in AREAS, area
        self._counts[area] += 1
        if self._counts[area] <= KEPT_PER_AREA:
            self._kept.append(Contradiction(area, step, found, expected, meaning))

    def note(self, text: str) -> None:
        if len(self.notes) < KEPT_PER_AREA:
            self.notes.append(text)

    @property
    def total(self) -> int:
        return self._counts.total()

    def in_order(self) -> list[Contradiction]:
        """Return the findings by step; within a step the likelier cause comes first."""
        return sorted(self._kept, key=lambda one: (one.step, AREAS.index(one.area)))


def some(values: list[Any] | range, most: int = 6) -> str:
    """Return the first values of a list as text.

    Example:
        some([1, 2, 3, 4], most=3)  # "1, 2, 3 and 1 more"
    """
    shown = ", ".join(str(value) for value in values[:most])
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")
