"""Metrics as they are drawn: against steps or hours, smoothed, and thinned to what a picture can show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trireme.tools.dashboard.columns import Columns, Series

POINTS = 500
"""Of a curve, at most: more than a chart has pixels for. Buckets keep their lowest and their highest."""

Values = NDArray[np.float64]
Axis = Literal["step", "hours"]


@dataclass(frozen=True)
class Frame:
    """What of the curves is looked at, and how."""

    axis: Axis = "step"
    smoothing: float = 0.0  # 0: as they are; towards 1: each value counts less
    begin: float | None = None  # of the axis; None: from its beginning
    end: float | None = None
    points: int = POINTS


@dataclass(frozen=True)
class Curve:
    """Ready to be drawn. `values` is None where nothing was smoothed: then it is `raw` itself."""

    x: Values
    raw: Values
    smooth: Values | None
    x_smooth: Values | None = None

    def points(self) -> list[list[float | None]]:
        return _points(self.x, self.raw)

    def smooth_points(self) -> list[list[float | None]]:
        return [] if self.smooth is None or self.x_smooth is None else _points(self.x_smooth, self.smooth)


def _points(x: Values, y: Values) -> list[list[float | None]]:
    """Four digits more than a picture shows."""
    return [[float(f"{a:.10g}"), float(f"{b:.6g}") if math.isfinite(b) else None] for a, b in zip(x, y, strict=True)]


def curve(columns: Columns, name: str, frame: Frame) -> Curve:
    series = columns.series(name)
    x = _axis(columns, name, series, frame.axis)
    smooth = smoothed(series.values, frame.smoothing) if frame.smoothing > 0 else None
    inside = _inside(x, frame)
    x_raw, raw = thinned(x[inside], series.values[inside], frame.points)
    if smooth is None:
        return Curve(x_raw, raw, None)
    x_smooth, thin = thinned(x[inside], smooth[inside], frame.points)
    return Curve(x_raw, raw, thin, x_smooth)


def _axis(columns: Columns, name: str, series: Series, axis: Axis) -> Values:
    if axis == "step":
        return series.steps.astype(np.float64)
    clock = columns.clock(name)
    if not len(clock.steps):
        return np.full(len(series.steps), np.nan)
    at = np.searchsorted(clock.steps, series.steps).clip(max=len(clock.steps) - 1)
    times = np.where(clock.steps[at] == series.steps, clock.values[at], np.nan)
    return (times - columns.began_s()) / 3600.0


def _inside(x: Values, frame: Frame) -> slice | NDArray[np.bool_]:
    """With one point more on either side, so that lines go on to the edge."""
    if frame.begin is None and frame.end is None:
        return np.isfinite(x)
    low = -np.inf if frame.begin is None else frame.begin
    high = np.inf if frame.end is None else frame.end
    inside = np.flatnonzero((x >= low) & (x <= high))
    if not len(inside):
        return slice(0, 0)
    return slice(max(0, int(inside[0]) - 1), int(inside[-1]) + 2)


def smoothed(values: Values, weight: float) -> Values:
    """Exponential moving average, without the bias of its beginning; what is not finite is passed over.

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


def thinned(x: Values, y: Values, most: int) -> tuple[Values, Values]:
    """At most so many points: of each bucket the lowest and the highest, in their order; and the first and the last.

    A spike of one step stays to be seen, however long the run.
    """
    if len(x) <= most:
        return x, y
    num_buckets = max(1, (most - 2) // 2)
    edges = np.linspace(0, len(x), num_buckets + 1).astype(np.int64)
    low = np.where(np.isfinite(y), y, np.inf)
    high = np.where(np.isfinite(y), y, -np.inf)
    keep = {0, len(x) - 1}
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        keep |= {begin + int(np.argmin(low[begin:end])), begin + int(np.argmax(high[begin:end]))}
    at = np.array(sorted(keep))
    return x[at], y[at]


def extent(columns: Columns) -> tuple[int, int]:
    """First and last step that anything was reported on; (0, 0) where nothing was."""
    steps = columns.steps()
    return (steps[0], steps[-1]) if steps else (0, 0)
