"""How a curve began and how it ended, in two numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

MOST = 5


@dataclass(frozen=True)
class Ends:
    """Means of so many steps at each end.

    Example:
        str(Ends(first=0.55, last=0.94, steps=5))  # "the first and the last 5 steps"
    """

    first: float
    last: float
    steps: int

    def __str__(self) -> str:
        return f"the first and the last {self.steps} steps" if self.steps > 1 else "the first and the last step"


def ends_of(values: Sequence[float]) -> Ends | None:
    """None of nothing. The two ends of a short curve do not overlap, or it would seem to stand still."""
    if not len(values):
        return None
    steps = max(1, min(MOST, len(values) // 2))
    return Ends(fmean(values[:steps]), fmean(values[-steps:]), steps)
