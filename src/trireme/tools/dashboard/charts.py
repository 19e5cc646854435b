"""Charts of ECharts, and the page of metrics: every metric that the chosen runs report, zoomed together.

A chart is sent when it comes into view, and only as many points of it as can be seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from nicegui import ui
from nicegui.element import Element
from nicegui.elements import echart as _brings_echarts_to_the_page  # noqa: F401
from numpy.typing import NDArray

from trireme.tools.dashboard import theme
from trireme.tools.dashboard.history import Metrics, Values
from trireme.tools.dashboard.runs import RunFolder, RunSet

GRID = "rgba(138, 147, 165, 0.18)"
LABEL = {"color": theme.QUIET, "fontSize": 11}
TICK = (
    "v => v === 0 ? '0' : Math.abs(v) >= 1e6 || Math.abs(v) < 1e-3 ? v.toExponential(0) "
    ": Math.abs(v) >= 1e4 ? +(v / 1000).toPrecision(3) + 'k' : String(+v.toPrecision(3))"
)
SHORTEST_STEPS = 0.5  # a shorter drag was a click
CURVE_POINTS = 500  # points drawn of a curve: more than a chart has pixels for
SMOOTHED_POINTS = 10_000  # points that a moving average goes through, as every look draws the charts again

Options = dict[str, Any]
Axis = Literal["step", "hours"]
Points = list[list[float | None]]
"""Pairs [x, y]; y is None where it is not finite."""
Curve = tuple[Points, Points]
"""A metric as it is, and smoothed; the latter is empty where nothing was smoothed."""


class Canvas(Element, component="canvas.js"):
    """A chart that reports when it comes into view, and which stretch was dragged over. Empty until `draw`.

    NiceGUI's own element cannot report what is in view, and fails if it is removed before it was drawn.
    """

    def __init__(
        self,
        *,
        on_seen: Callable[[bool], Any] | None = None,
        on_zoom: Callable[[float | None, float | None], Any] | None = None,
    ) -> None:
        """
        Args:
            on_seen: called when the chart comes into view (True) or leaves it.
            on_zoom: called with begin and end of the stretch of the horizontal axis that was dragged over, and with
                None and None after a double-click.
        """
        super().__init__()
        self._props["options"] = {}
        self._props["chooses"] = on_zoom is not None
        self.classes("tr-canvas tr-chooses" if on_zoom else "tr-canvas")
        if on_seen:
            self.on("seen", lambda event: on_seen(bool(event.args)))
        if on_zoom:
            self.on("stretch", lambda event: on_zoom(float(event.args[0]), float(event.args[1])))
            self.on("whole", lambda: on_zoom(None, None))

    def draw(self, options: Options) -> None:
        self._props["options"] = options
        self.update()


# curves


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
    if not frame.smoothing:
        return _points(x, values, frame), []
    at = extremes(values, SMOOTHED_POINTS)
    return _points(x, values, frame), _points(x[at], smoothed(values[at], frame.smoothing), frame)


def _points(x: Values, y: Values, frame: Frame) -> Points:
    # one point more on either side, so that lines reach the edge
    begin = 0 if frame.begin is None else max(0, int(np.searchsorted(x, frame.begin)) - 1)
    end = len(x) if frame.end is None else int(np.searchsorted(x, frame.end, "right")) + 1
    x, y = x[begin:end], y[begin:end]
    at = extremes(y, CURVE_POINTS)
    return [
        [round(float(a), 4), float(f"{b:.6g}") if math.isfinite(b) else None] for a, b in zip(x[at], y[at], strict=True)
    ]


def extremes(values: Values, most: int) -> NDArray[np.int64]:
    """Return the places of at most `most` values: the lowest and the highest of equal stretches, and both ends.

    A spike of one step stays visible, however long the run.
    """
    if len(values) <= most:
        return np.arange(len(values))
    # each stretch gives two points; both ends are added
    width = math.ceil(len(values) / max(1, (most - 2) // 2))
    begins = np.arange(0, len(values), width)
    filled = np.full(len(begins) * width, np.nan)
    filled[: len(values)] = values
    stretches = filled.reshape(-1, width)
    # what is not finite, and what fills up the last stretch, is no extreme
    is_known = np.isfinite(stretches)
    lowest = begins + np.where(is_known, stretches, np.inf).argmin(axis=1)
    highest = begins + np.where(is_known, stretches, -np.inf).argmax(axis=1)
    return np.unique(np.concatenate([[0], lowest, highest, [len(values) - 1]]))


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


Line = tuple[str, str, Curve]
"""Name, colour and points of one curve of a chart."""


def lines_of(runs: Sequence[RunFolder], metric: str, frame: Frame, about: str = "") -> list[Line]:
    """Return the curves of a metric, one for each run that reports it."""
    curves = [curve(run.metrics, metric, frame) for run in runs]
    return [
        (f"{run.name} {about}".strip(), theme.run_color(place), (raw, smooth))
        for place, (run, (raw, smooth)) in enumerate(zip(runs, curves, strict=True))
        if raw
    ]


def line_chart(lines: Sequence[Line], frame: Frame) -> Options:
    series = []
    # a smoothed curve is drawn over the values that it is made of, which are faint
    for name, color, (raw, smooth) in lines:
        if smooth:
            behind = _series(name, color, raw, 1.0) | {"silent": True, "tooltip": {"show": False}, "z": 1}
            behind["lineStyle"]["opacity"] = 0.25
            series += [_series(name, color, smooth, 2.0), behind]
        else:
            series.append(_series(name, color, raw, 1.8))
    # without animation, as charts are drawn again with every look
    return {
        "animation": False,
        "grid": {"left": 52, "right": 14, "top": 12, "bottom": 26},
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "axisPointer": {"type": "line", "lineStyle": {"color": theme.QUIET}},
            "textStyle": {"fontSize": 12},
            "order": "valueDesc",
        },
        "xAxis": {
            "type": "value",
            "min": "dataMin" if frame.begin is None else frame.begin,
            "max": "dataMax" if frame.end is None else frame.end,
            "axisLabel": LABEL | {"hideOverlap": True},
            "axisLine": {"lineStyle": {"color": GRID}},
            "axisTick": {"show": False},
            "splitLine": {"show": False},
            "axisPointer": {"label": {"precision": 3 if frame.axis == "hours" else 0}},
        },
        "yAxis": {
            "type": "log" if frame.is_log else "value",
            "scale": True,
            "axisLabel": LABEL | {":formatter": TICK},
            "splitLine": {"lineStyle": {"color": GRID}},
        },
        "series": series,
    }


def _series(name: str, color: str, points: Points, width: float) -> Options:
    return {
        "type": "line",
        "name": name,
        "data": points,
        "showSymbol": len(points) < 25,
        "symbolSize": 5,
        "color": color,
        "lineStyle": {"width": width, "color": color},
        "emphasis": {"disabled": True},
    }


# the page of metrics


FIRST = ("reward/mean", "eval/[^/]+/reward", "loss", "perplexity", "time/step", "perf/tokens_per_s", "policy/entropy")
"""Metrics that come first in their groups, as their groups do."""


def grouped(names: Iterable[str], wanted: str) -> dict[str, list[str]]:
    """Return the names that have all words of `wanted` in them, by what is before their first slash, or by "step"."""
    words = wanted.lower().split()
    found: dict[str, list[str]] = {}

    def place(name: str) -> tuple[int, str]:
        return next((place for place, first in enumerate(FIRST) if re.fullmatch(first, name)), len(FIRST)), name

    for name in sorted(names, key=place):
        if all(word in name.lower() for word in words):
            found.setdefault(name.partition("/")[0] if "/" in name else "step", []).append(name)
    return found


async def build(runs: RunSet) -> None:
    if not any(run.metrics.names() for run in runs.chosen):
        theme.nothing("No metrics yet.", "They are in the run's metrics.jsonl; the first comes with the first step.")
        return
    MetricsPage(runs)


class MetricsPage:
    """All charts, and the frame that they are looked at through."""

    def __init__(self, runs: RunSet) -> None:
        self.runs = runs
        self.frame = Frame()
        self._wanted = runs.query.get("find", "")
        self._names: list[str] = []
        self._charts: list[MetricChart] = []
        self._build_controls()
        self._body = theme.column()
        self._list()
        runs.watchers.append(self._renew)

    def zoom(self, begin: float | None, end: float | None) -> None:
        self._stretch.set_text("All" if begin is None or end is None else f"{begin:.6g} – {end:.6g}: show all")
        self._look(begin=begin, end=end)

    def _look(self, **changes: Any) -> None:
        """Draw all charts again, after changes of the frame."""
        self.frame = replace(self.frame, **changes)
        for chart in self._charts:
            chart.redraw()

    def _build_controls(self) -> None:
        def turn(axis: Axis) -> None:
            self.frame = replace(self.frame, axis=axis)
            self.zoom(None, None)

        def find(wanted: str | None) -> None:
            self._wanted = wanted or ""
            self._list()

        with theme.card().classes("tr-controls"), theme.row():
            # a pause of the typist, so that not every letter draws all charts
            search = ui.input("Find metrics", value=self._wanted, on_change=lambda event: find(event.value))
            search.props("dense outlined clearable debounce=150").style("min-width: 200px")
            theme.soft("Smoothing")
            slider = ui.slider(min=0, max=0.99, step=0.01, value=0)
            slider.on_value_change(lambda event: self._look(smoothing=event.value))
            slider.props('aria-label="Smoothing" label').style("width: 140px")
            axis = ui.toggle({"step": "Steps", "hours": "Hours"}, value="step")
            axis.on_value_change(lambda event: turn(event.value))
            axis.props('dense no-caps unelevated aria-label="Horizontal axis"')
            ui.checkbox("Logarithmic", on_change=lambda event: self._look(is_log=event.value)).props("dense")
            ui.space()
            self._stretch = ui.button("All", on_click=lambda: self.zoom(None, None)).props("flat dense no-caps")
            self._stretch.tooltip("Drag over a chart to look closer; double-click to see all again")
        with theme.row():
            names = {}
            for place, run in enumerate(self.runs.chosen):
                back = ", ".join(map(str, run.metrics.went_back[-3:]))
                names[f"{run.name} (resumed from step {back})" if back else run.name] = theme.run_color(place)
            theme.legend(names)

    def _found(self) -> list[str]:
        return sorted({name for run in self.runs.chosen for name in run.metrics.names()})

    async def _renew(self) -> None:
        # a new metric changes the grid; otherwise the same charts get new points
        if self._found() != self._names:
            self._list()
        else:
            self._look()

    def _list(self) -> None:
        self._names = self._found()
        self._charts = []
        self._body.clear()
        with self._body:
            shown = grouped(self._names, self._wanted)
            for group, names in shown.items():
                with theme.row().classes("tr-group"):
                    theme.heading(group)
                with ui.element("div").classes("tr-grid"):
                    self._charts += [MetricChart(self, name) for name in names]
            if not shown:
                theme.nothing(f"No metric has {self._wanted!r} in its name.", "Try a part of it: reward, time, kl.")


class MetricChart:
    """One metric. Its place is there from the beginning; it is drawn when it is in view."""

    def __init__(self, page: MetricsPage, name: str) -> None:
        self._page = page
        self._name = name
        self._is_seen = False
        self._is_stale = True
        card = ui.element("section").classes("tr-card tr-chart-card")
        card.props["aria-label"] = name  # `props()` would parse the name, and take one with `:` for a script
        with card:
            with theme.row().classes("tr-chart-head"):
                ui.label(name).classes("tr-title")
                ui.space()
                self._newest = theme.soft()
            self._canvas = Canvas(on_seen=self._see, on_zoom=self._zoom).classes("tr-chart")

    def redraw(self) -> None:
        """Draw what is new, now or when the chart comes into view."""
        self._is_stale = True
        self._see(self._is_seen)

    def _see(self, is_seen: bool) -> None:
        self._is_seen = is_seen
        if not (is_seen and self._is_stale):
            return
        self._is_stale = False
        runs, page = self._page.runs.chosen, self._page
        values = [run.metrics.last(self._name) for run in runs]
        self._newest.set_text("   ".join(f"{value:.4g}" for value in values if value is not None))
        self._canvas.draw(line_chart(lines_of(runs, self._name, page.frame), page.frame))

    def _zoom(self, begin: float | None, end: float | None) -> None:
        if begin is None or end is None or self._page.frame.axis == "hours":
            self._page.zoom(begin, end)
        elif end - begin >= SHORTEST_STEPS:
            self._page.zoom(math.floor(begin), math.ceil(end))
