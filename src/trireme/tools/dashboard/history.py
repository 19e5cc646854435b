"""Metrics and spans of a run as its files grow. Both are thinned with age, so that memory is bounded."""

from __future__ import annotations

import math
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trireme.monitor import timeline
from trireme.monitor.metrics import PIECE_BYTES, Row, is_of_step
from trireme.monitor.progress import EVAL_REWARD
from trireme.monitor.spans import ENGINE, TRAINER, Span, read_spans
from trireme.monitor.timeline import Shares

READ_S = 2.0
"""Seconds of reading, after which a page is shown with what is known of a very long run. The next call reads on."""
MOST_POINTS = 10_000
"""Points kept of a metric. The newest quarter and the first five are exact; of older ones, the extremes are kept."""
MOST_SPANS = 30_000
"""Spans kept of a run, at some 0.6 kB each. The newest quarter is exact; older ones are merged by `timeline.thin`."""
EXACT_START = 5
CURVE_POINTS = 500
"""Points drawn of a curve: more than a chart has pixels for."""
DRAWN_SPANS = 4000

Values = NDArray[np.float64]
Axis = Literal["step", "hours"]
Points = list[list[float | None]]
"""Pairs [x, y]; y is None where it is not finite."""
Curve = tuple[Points, Points]
"""A metric as it is, and smoothed; the latter is empty where nothing was smoothed."""


# metrics


class Series(NamedTuple):
    """One metric, in the order of its steps; NaN where it was not finite."""

    steps: NDArray[np.int64]
    values: Values


class Metrics:
    """All metrics of a run by name. A name that several processes use is the trainer's.

    A step that was trained again counts as it was trained last. If a run went back (a resume, a rewind), later steps
    are forgotten until the run reaches them again.

    Example:
        metrics.add([{"step": 3, "process": "trainer", "time_s": 1.7e9, "loss": 0.2}])
        metrics.series("loss")  # Series(steps=[3], values=[0.2])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for one row or one answer: rows are added in a thread, while pages draw
        self.went_back: list[int] = []  # steps that the run resumed from, in the order in which it did
        self._columns: dict[str, dict[str, _Column]] = {}  # process -> metric -> column
        self._newest: dict[str, int] = {}  # process -> its newest step

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            process, step = str(row["process"]), row["step"]
            with self._lock:
                # a step before the newest one means that the run went back: later steps were abandoned
                columns = self._columns.setdefault(process, {})
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
                        column = columns.setdefault(name, _Column())
                        column.put(step, math.nan if value is None else float(value))
                        if len(column.steps) > MOST_POINTS:
                            column.thin()

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
        return [value for value in values.tolist() if math.isfinite(value)]

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

    def thin(self) -> None:
        recent = len(self.steps) - MOST_POINTS // 4
        # the beginning and the newest quarter stay exact; the middle keeps its extremes
        steps, values = self.series()
        old = EXACT_START + extremes(
            steps[EXACT_START:recent].astype(np.float64), values[EXACT_START:recent], MOST_POINTS // 4
        )
        keep = np.concatenate([np.arange(EXACT_START), old, np.arange(recent, len(steps))])
        self.steps, self.values = array("q", steps[keep].tobytes()), array("d", values[keep].tobytes())


def extremes(x: Values, y: Values, most: int) -> NDArray[np.int64]:
    """Return the places of at most `most` points: of equal stretches of `x` the lowest and the highest, and both ends.

    A spike of one step stays visible, however long the run.

    Args:
        x: in ascending order.
    """
    if len(x) <= most:
        return np.arange(len(x))
    # each stretch gives two points; both ends are added
    stretches = max(1, (most - 2) // 2)
    span = float(x[-1] - x[0]) or 1.0
    # steps may be missing, so stretches are equal in steps and not in the number of points
    stretch = np.maximum.accumulate(((x - x[0]) / span * stretches).astype(np.int64).clip(max=stretches - 1))
    begins = np.flatnonzero(np.diff(stretch, prepend=-1))
    ends = np.append(begins[1:], len(x)) - 1
    # one sort by stretch and value gives the lowest and the highest of every stretch
    lowest = np.lexsort((np.where(np.isfinite(y), y, np.inf), stretch))[begins]
    highest = np.lexsort((np.where(np.isfinite(y), y, -np.inf), stretch))[ends]
    return np.unique(np.concatenate([[0], lowest, highest, [len(x) - 1]]))


@dataclass(frozen=True)
class Frame:
    """The part of a curve that is shown, and how."""

    axis: Axis = "step"
    smoothing: float = 0.0  # weight of the past in the moving average, 0 to 0.99; 0 draws values as they are
    begin: float | None = None  # first value of the axis that is shown; None shows from its beginning
    end: float | None = None
    is_log: bool = False  # logarithmic vertical axis


def curve(metrics: Metrics, name: str, frame: Frame) -> Curve:
    series = metrics.series(name)
    x = series.steps.astype(np.float64) if frame.axis != "hours" else metrics.hours(name, series.steps)
    known = np.isfinite(x)
    x, values = x[known], series.values[known]
    # One point more on either side, so that lines reach the edge.
    begin = 0 if frame.begin is None else max(0, int(np.searchsorted(x, frame.begin)) - 1)
    end = len(x) if frame.end is None else int(np.searchsorted(x, frame.end, "right")) + 1
    smooth = _points(x, smoothed(values, frame.smoothing), begin, end) if frame.smoothing else []
    return _points(x, values, begin, end), smooth


def _points(x: Values, y: Values, begin: int, end: int) -> Points:
    x, y = x[begin:end], y[begin:end]
    at = extremes(x, y, CURVE_POINTS)
    return [
        [round(float(a), 4), float(f"{b:.6g}") if math.isfinite(b) else None] for a, b in zip(x[at], y[at], strict=True)
    ]


def smoothed(values: Values, weight: float) -> Values:
    """Exponential moving average without the bias of its beginning; values that are not finite are skipped.

    smooth_n = (1 - w) / (1 - w^n) * sum of w^(n - k) * value_k
    """
    result = np.full(len(values), np.nan)
    total = norm = 0.0
    for index, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total = weight * total + (1.0 - weight) * value
            norm = weight * norm + (1.0 - weight)
            result[index] = total / norm
    return result


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


class Timeline(NamedTuple):
    """A stretch of time: what the processes of a run did, and which side should get more GPUs."""

    begin_s: float  # unix time
    end_s: float
    spans: list[Span]  # at most DRAWN_SPANS
    shares: dict[str, Shares]  # share of each activity, by process
    waits: dict[str, list[tuple[str, float]]]  # reasons to wait, as shares of the time, by process; longest first
    engines: Shares  # mean of all engines
    advice: str
    counted: tuple[float, float]  # the steady part of the stretch, which shares and words are about


def summarize(spans: Spans, begin_s: float, end_s: float, *, most: int = DRAWN_SPANS) -> Timeline:
    # start and end of a run say nothing about its balance, so shares are about the steady part
    processes = spans.processes()
    known = [span for process in processes for span in spans.within(begin_s, end_s, process)]
    first_s, last_s = spans.steady()
    counted = max(begin_s, first_s), min(end_s, last_s)
    counted = counted if counted[0] < counted[1] else (begin_s, end_s)

    shares = {process: timeline.shares(known, process, *counted) for process in processes}
    waits = {
        process: [(why, share) for why, share in timeline.reasons(known, process, *counted) if why]
        for process in processes
    }
    return Timeline(
        begin_s=begin_s,
        end_s=end_s,
        spans=timeline.thin(known, begin_s, end_s, most),
        shares=shares,
        waits=waits,
        engines=timeline.shares(known, ENGINE, *counted),
        advice=timeline.advice_for(known, *counted),
        counted=counted,
    )
