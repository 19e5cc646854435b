"""The newest values of each metric, and those it began with. No I/O, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

LONGEST = 48  # values kept of a metric
START = 3  # values that say where it began


class History:
    """Values by name, in the order in which they came. What was not finite is NaN."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # of the newest row
        self._values: dict[str, deque[float]] = {}
        self._starts: dict[str, list[float]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        self.names = set()
        for name, value in row.items():
            if value is None or isinstance(value, int | float):
                self._add(name, math.nan if value is None else float(value))

    def _add(self, name: str, value: float) -> None:
        self.names.add(name)
        self._values.setdefault(name, deque(maxlen=LONGEST)).append(value)
        start = self._starts.setdefault(name, [])
        if len(start) < START and math.isfinite(value):
            start.append(value)

    def last(self, name: str, count: int = 1) -> list[float]:
        """The newest values, oldest first; empty where there are not yet so many."""
        values = self._values.get(name, ())
        return list(values)[-count:] if len(values) >= count else []

    def before(self, name: str, *, skip: int, count: int) -> list[float]:
        """Up to `count` finite values older than the newest `skip`."""
        older = list(self._values.get(name, ()))[:-skip]
        return [value for value in older if math.isfinite(value)][-count:]

    def start(self, name: str) -> float | None:
        """Mean of the first values; None before they are all in."""
        start = self._starts.get(name, [])
        return sum(start) / len(start) if len(start) == START else None
