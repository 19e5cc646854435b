"""Metrics and spans of a run in memory, as its files grow."""

from __future__ import annotations

import math
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trireme.monitor import timeline
from trireme.monitor.metrics import PIECE_BYTES, Row, is_of_step
from trireme.monitor.progress import EVAL_REWARD
from trireme.monitor.spans import TRAINER, Span, read_spans

READ_S = 2.0
"""Seconds of reading, after which a page is shown with what is known of a very long run. The next call reads on."""
MOST_SPANS = 30_000
"""Spans kept of a run, at some 0.6 kB each. The newest quarter is exact; older ones are merged by `timeline.thin`."""

Values = NDArray[np.float64]


# metrics


class Series(NamedTuple):
    """One metric, in the order of its steps; NaN where it was not finite."""

    steps: NDArray[np.int64]
    values: Values


class Metrics:
    """All metrics of a run by name, 16 bytes a value. A name that several processes use is the trainer's.

    A step that was trained again counts as it was trained last. If a run went back (a resume, a rewind), later steps
    are forgotten until the run reaches them again.

    Example:
        metrics.add([{"step": 3, "process": "trainer", "time_s": 1.7e9, "loss": 0.2}])
        metrics.series("loss")  # Series(steps=[3], values=[0.2])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for one row or one answer: rows are added in a thread, while pages draw
        self.went_back: list[int] = []  # steps that the run resumed from, in the order in which it did
        # process -> metric -> column
        self._columns: dict[str, dict[str, _Column]] = defaultdict(lambda: defaultdict(_Column))
        self._newest: dict[str, int] = {}  # process -> its newest step

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            process, step = str(row["process"]), row["step"]
            with self._lock:
                # a step before the newest one means that the run went back: later steps were abandoned
                columns = self._columns[process]
                if is_of_step(row):
                    if step < self._newest.get(process, -1):
                        for column in columns.values():
                            column.forget_after(step)
                        if step not in self.went_back[-1:]:
                            self.went_back.append(step)
                    self._newest[process] = step
                # a process may report a step twice; `put` keeps the last value
                for name, value in row.items():
                    if name not in ("step", "process") and (value is None or isinstance(value, int | float)):
                        columns[name].put(step, math.nan if value is None else float(value))

    def names(self) -> list[str]:
        with self._lock:
            return sorted({name for columns in self._columns.values() for name in columns if name != "time_s"})

    def series(self, name: str) -> Series:
        """Return a metric, empty if there is no such metric."""
        with self._lock:
            return self._find(name)[1].series()

    def hours(self, name: str, steps: NDArray[np.int64]) -> Values:
        """Return when each of these steps of a metric was reported, in hours since the run's first report."""
        with self._lock:
            process, _ = self._find(name)
            # the clock is the process's own, and hours count from the first report of any process
            clocks = {each: columns["time_s"] for each, columns in self._columns.items() if "time_s" in columns}
            if process not in clocks:
                return np.full(len(steps), np.nan)
            began_s = min(clock.values[0] for clock in clocks.values() if clock.values)
            clock = clocks[process].series()
        return (np.interp(steps, clock.steps, clock.values) - began_s) / 3600.0

    def last(self, name: str) -> float | None:
        with self._lock:
            values = self._find(name)[1].values
            return values[-1] if values else None

    def finite(self, name: str) -> list[float]:
        values = self.series(name).values
        return values[np.isfinite(values)].tolist()

    def held_out(self) -> dict[str, str]:
        """Return the names of rewards of evaluations, by environment."""
        return {match["env"]: name for name in self.names() if (match := EVAL_REWARD.fullmatch(name))}

    @property
    def num_done(self) -> int:
        """The number of steps that are trained; if no trainer has reported, of batches that are filled."""
        return self._newest.get(TRAINER, max(self._newest.values(), default=-1)) + 1

    def _find(self, name: str) -> tuple[str, _Column]:
        for process, columns in sorted(self._columns.items(), key=lambda item: item[0] != TRAINER):
            if name in columns:
                return process, columns[name]
        return "", _Column()


class _Column:
    """One metric of one process: steps in order, each once."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def put(self, step: int, value: float) -> None:
        at = len(self.steps)
        if at and step <= self.steps[-1]:
            at = bisect_left(self.steps, step)
            if self.steps[at] == step:
                self.values[at] = value
                return
        self.steps.insert(at, step)
        self.values.insert(at, value)

    def forget_after(self, step: int) -> None:
        end = bisect_right(self.steps, step)
        del self.steps[end:], self.values[end:]

    def series(self) -> Series:
        return Series(np.array(self.steps, np.int64), np.array(self.values, np.float64))


# spans


class Spans:
    """The spans of a run by process, in order of time. Pieces of one activity are joined as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._processes: dict[str, list[Span]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Read new spans for up to `READ_S`. Return whether there were any. Blocks."""
        with self._lock:
            is_new, stop_s = False, time.monotonic() + READ_S
            # bounded reading, so that a page is shown soon; the next call reads on
            while time.monotonic() < stop_s:
                spans, offset = read_spans(self._path, self._offset, PIECE_BYTES)
                if offset < self._offset:  # another file has taken its place
                    self._processes = {}
                if offset == self._offset:
                    return is_new
                # pieces of one activity are joined, also across two reads
                self._offset, is_new = offset, True
                for span in spans:
                    known = self._processes.get(span.lane, [])
                    known[-1:] = timeline.joined([*known[-1:], span])
                    self._processes[span.lane] = known  # pages that draw meanwhile never see a process without a span
                # a very long run keeps its newest quarter exact and merges what is older
                most = MOST_SPANS // max(1, len(self._processes))
                for process, known in self._processes.items():
                    if len(known) > most:
                        recent = len(known) - most // 4
                        old = timeline.thin(known[:recent], known[0].begin_s, known[recent - 1].end_s, most // 2)
                        self._processes[process] = old + known[recent:]
            return is_new

    def __bool__(self) -> bool:
        return bool(self._processes)

    def processes(self) -> list[str]:
        """Return their names: trainer, orchestrator, engines, then others."""
        return timeline.lanes_of(spans[0] for spans in list(self._processes.values()))

    def extent(self) -> tuple[float, float]:
        """Return the unix times of the first begin and of the last end; zeros if there is no span."""
        known = list(self._processes.values())
        return min((spans[0].begin_s for spans in known), default=0.0), max((s[-1].end_s for s in known), default=0.0)

    def steady(self) -> tuple[float, float]:
        """Return the stretch without start and end, which say nothing about balance."""
        return timeline.steady(span for spans in list(self._processes.values()) for span in spans)

    def within(self, begin_s: float, end_s: float, process: str) -> list[Span]:
        """Return the spans of a process that touch a stretch of time."""
        return [span for span in self._processes.get(process, []) if span.begin_s < end_s and span.end_s > begin_s]
