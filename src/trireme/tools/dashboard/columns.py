"""The metrics of a run by name: each a column of steps and values, in order. No I/O, no clock.

A step that was trained again counts as it was trained last. Where a run went back (a resume from a checkpoint, a
rewind), what it had reported of later steps is forgotten until it comes there again.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trireme.monitor.metrics import Row

HEAD = ("step", "process")
CLOCK = "time_s"
TRAINER = "trainer"
MARKS = {"trainer": "loss", "orchestrator": "reward/mean", "sft": "loss"}
"""By process: what only the row of a step has. Rows of evaluations come late, and are no step back."""


class Series(NamedTuple):
    """One metric; NaN where it was not finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @property
    def last(self) -> float | None:
        return float(self.values[-1]) if len(self.values) else None


NOTHING = Series(np.empty(0, np.int64), np.empty(0, np.float64))


class Column:
    """Steps in order, each once."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def put(self, step: int, value: float) -> None:
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        at = bisect_left(self.steps, step)
        if self.steps[at] == step:
            self.values[at] = value
        else:
            self.steps.insert(at, step)
            self.values.insert(at, value)

    def at(self, step: int) -> float | None:
        index = bisect_left(self.steps, step)
        return self.values[index] if index < len(self.steps) and self.steps[index] == step else None

    def forget_after(self, step: int) -> None:
        end = bisect_left(self.steps, step + 1)
        del self.steps[end:], self.values[end:]

    def series(self) -> Series:
        return Series(np.array(self.steps, np.int64), np.array(self.values, np.float64))


class Columns:
    """All metrics of a run. A name that the trainer uses too has its process before it: `orchestrator/time/step`."""

    def __init__(self) -> None:
        self.went_back: list[int] = []  # steps from which the run went on again, in the order in which it did
        self._columns: dict[str, dict[str, Column]] = {}  # process -> name -> column
        self._newest: dict[str, int] = {}  # process -> step of its newest row that was of a step

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._add(row)

    def _add(self, row: Row) -> None:
        process, step = str(row["process"]), row["step"]
        columns = self._columns.setdefault(process, {})
        if row.get(MARKS.get(process, ""), MARKS) is not MARKS:
            self._notice_step_back(process, step)
        for name, value in row.items():
            if name not in HEAD and (value is None or isinstance(value, int | float)):
                columns.setdefault(name, Column()).put(step, math.nan if value is None else float(value))

    def _notice_step_back(self, process: str, step: int) -> None:
        if step < self._newest.get(process, -1):
            for column in self._columns[process].values():
                column.forget_after(step)
            if step not in self.went_back[-1:]:
                self.went_back.append(step)
        self._newest[process] = step

    def names(self) -> list[str]:
        return sorted({self._shown(process, name) for process, name, _ in self._all() if name != CLOCK})

    def series(self, name: str) -> Series:
        """Nothing where there is no such metric."""
        column = self._find(name)[1]
        return column.series() if column else NOTHING

    def clock(self, name: str) -> Series:
        """When each step of this metric's process was reported, in unix seconds."""
        column = self._columns.get(self._find(name)[0], {}).get(CLOCK)
        return column.series() if column else NOTHING

    def began_s(self) -> float:
        """When anything was first reported, in unix seconds."""
        clocks = [column for _, name, column in self._all() if name == CLOCK]
        return min((clock.values[0] for clock in clocks if clock.values), default=0.0)

    def last(self, name: str) -> float | None:
        column = self._find(name)[1]
        return column.values[-1] if column and column.values else None

    def row(self, step: int) -> dict[str, float]:
        """What all processes said about a step."""
        found = ((process, name, column.at(step)) for process, name, column in self._all())
        return {self._shown(process, name): value for process, name, value in found if value is not None}

    def steps(self) -> list[int]:
        """All that were reported on, by anybody."""
        return sorted({step for _, name, column in self._all() if name == CLOCK for step in column.steps})

    def newest_step(self) -> int | None:
        """That was trained last; where no trainer has reported, that was filled last."""
        return self._newest.get(TRAINER, max(self._newest.values(), default=None))

    def _all(self) -> Iterator[tuple[str, str, Column]]:
        for process, columns in list(self._columns.items()):
            for name, column in list(columns.items()):
                yield process, name, column

    def _shown(self, process: str, name: str) -> str:
        clashes = process != TRAINER and name != CLOCK and name in self._columns.get(TRAINER, {})
        return f"{process}/{name}" if clashes else name

    def _find(self, name: str) -> tuple[str, Column | None]:
        for process, columns in sorted(self._columns.items(), key=lambda item: item[0] != TRAINER):
            if name in columns:
                return process, columns[name]
        process, _, rest = name.partition("/")
        return process, self._columns.get(process, {}).get(rest)
