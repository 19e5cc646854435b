"""Charts of ECharts, and the page of metrics: every metric that the chosen runs report, zoomed together.

A chart is sent when it comes into view, and only as many points of it as can be seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nicegui import ui
from nicegui.element import Element
from nicegui.elements import echart as _brings_echarts_to_the_page  # noqa: F401

from trireme.tools.dashboard import theme
from trireme.tools.dashboard.history import Axis, Curve, Frame, Points, curve
from trireme.tools.dashboard.runs import RunFolder, RunSet

GRID = "rgba(138, 147, 165, 0.18)"
LABEL = {"color": theme.QUIET, "fontSize": 11}
VALUE = (
    "v => v == null ? '–' : v === 0 ? '0' : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(2) "
    ": String(+v.toPrecision(5))"
)
TICK = (
    "v => v === 0 ? '0' : Math.abs(v) >= 1e6 || Math.abs(v) < 1e-3 ? v.toExponential(0) "
    ": Math.abs(v) >= 1e4 ? +(v / 1000).toPrecision(3) + 'k' : String(+v.toPrecision(3))"
)
STEP_TICK = "v => String(+v.toPrecision(6))"
SHORTEST_STEPS = 0.5  # a shorter drag was a click

Options = dict[str, Any]


class Canvas(Element, component="canvas.js"):
    """A chart that reports when it comes into view, and which stretch was dragged over. Empty until `draw`.

    NiceGUI's own element cannot report what is in view, and fails where it is removed before it was drawn.
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


class Line(NamedTuple):
    """One curve of a chart."""

    name: str
    color: str
    curve: Curve


def lines_of(runs: Sequence[RunFolder], metric: str, frame: Frame, about: str = "") -> list[Line]:
    """Return the curves of a metric, one for each run that reports it."""
    curves = [curve(run.metrics, metric, frame) for run in runs]
    return [
        Line(f"{run.name} {about}".strip(), theme.run_color(place), found)
        for place, (run, found) in enumerate(zip(runs, curves, strict=True))
        if found.raw
    ]


def line_chart(lines: Sequence[Line], frame: Frame, *, marks: Sequence[int] = ()) -> Options:
    """
    Args:
        marks: steps that a run resumed from after it had been further.
    """
    series = []
    for name, color, (raw, smooth) in lines:
        if smooth:  # with the values that it is made of behind it, faintly
            behind = _series(name, color, raw, 1.0) | {"silent": True, "tooltip": {"show": False}, "z": 1}
            behind["lineStyle"]["opacity"] = 0.25
            series += [_series(name, color, smooth, 2.0), behind]
        else:
            series.append(_series(name, color, raw, 1.8))
    if series and frame.axis == "step":
        series[0]["markLine"] = {
            "silent": True,
            "symbol": "none",
            "lineStyle": {"color": theme.QUIET, "type": "dashed", "width": 1},
            "label": {"show": False},
            "data": [{"xAxis": step} for step in dict.fromkeys(marks)],
        }
    in_steps = f"p => '{frame.axis} ' + Math.round(p.value)"
    pointer = "p => (+p.value).toFixed(3) + ' h'" if frame.axis == "hours" else in_steps
    return {
        "animation": False,
        "grid": {"left": 52, "right": 14, "top": 12, "bottom": 26},
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "axisPointer": {"type": "line", "lineStyle": {"color": theme.QUIET}},
            ":valueFormatter": VALUE,
            "textStyle": {"fontSize": 12},
            "order": "valueDesc",
        },
        "xAxis": {
            "type": "value",
            "min": "dataMin" if frame.begin is None else frame.begin,
            "max": "dataMax" if frame.end is None else frame.end,
            "axisLabel": LABEL | {"hideOverlap": True, ":formatter": STEP_TICK},
            "axisLine": {"lineStyle": {"color": GRID}},
            "axisTick": {"show": False},
            "splitLine": {"show": False},
            "axisPointer": {"label": {"show": False, ":formatter": pointer}},
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


def bar_chart(names: Sequence[Any], bars: dict[str, list[int]], colors: dict[str, str]) -> Options:
    """Stacked bars, one stack for each name."""
    axis = {"axisLine": {"lineStyle": {"color": theme.QUIET}}, "splitLine": {"lineStyle": {"opacity": 0.15}}}
    return {
        "animation": False,
        "grid": {"left": 54, "right": 16, "top": 34, "bottom": 24},
        "legend": {"textStyle": {"color": theme.QUIET}, "top": 2, "type": "scroll"},
        "tooltip": {"trigger": "axis", "axisPointer": {"type": "shadow"}, "renderMode": "richText"},
        "xAxis": {"type": "category", "data": list(names), **axis},
        "yAxis": {"type": "value", **axis},
        "series": [
            {"name": name, "type": "bar", "stack": "all", "data": values, "color": colors[name], "barCategoryGap": 0}
            for name, values in bars.items()
        ],
    }


# the page of metrics


class Group(NamedTuple):
    """Metrics that belong together."""

    title: str
    note: str
    pattern: str


GROUPS = (
    Group("Reward", "what the policy is paid; of the batch that each step trains on", r"reward(/|$)"),
    Group("Evaluation", "held-out examples, by version of the weights", r"eval/|time/eval$|validation/"),
    Group(
        "Loss",
        "the step: loss, gradient, learning rate, what was clipped or masked",
        r"(loss|loss_tokens|perplexity|epoch|grad_norm|lr|learning_rate|skipped_\w+|masked_frac|capped_frac)$|clip_frac/",
    ),
    Group(
        "Policy",
        "how far it has moved, and whether trainer and engine agree",
        r"policy/|(importance_ratio|ess|mismatch_kl|reference_kl)$",
    ),
    Group("Lag", "age of the tokens that are trained on, in versions", r"lag/"),
    Group(
        "Rollouts",
        "lengths, turns, groups with signal, what was dropped or filtered",
        r"(rollouts|groups|filters|tokens|turns)/|truncated_frac$",
    ),
    Group("Time", "where the seconds of a step go", r"time/|(engine/)?idle_frac$"),
    Group("Performance", "speed, memory, packing, weights in passing", r"(perf|weights|moe|engine|inference)/"),
    Group("Environments", "by environment: rewards' components, lengths, failures", r"env/"),
    Group("Data", "epochs, difficulty pools, curriculum", r"(data|curriculum)/"),
    Group("Other", "all other metrics that processes report", r""),
)
FIRST = ("reward/mean", "eval/[^/]+/reward", "loss", "perplexity", "time/step", "perf/tokens_per_s", "policy/entropy")
"""Metrics that come first in their groups."""
PROCESS = re.compile(r"^(orchestrator|supervisor|sft)/")


def grouped(names: Iterable[str], wanted: str) -> dict[Group, list[str]]:
    """Return the names that have all words of `wanted` in them, by group, and what matters most first."""
    words = wanted.lower().split()
    found: dict[Group, list[str]] = {group: [] for group in GROUPS}

    def place(name: str) -> tuple[int, str]:
        return next((place for place, first in enumerate(FIRST) if re.fullmatch(first, name)), len(FIRST)), name

    for name in sorted(names, key=place):
        if all(word in name.lower() for word in words):
            bare = PROCESS.sub("", name)
            found[next(group for group in GROUPS if re.match(group.pattern, bare))].append(name)
    return {group: members for group, members in found.items() if members}


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
        if re.fullmatch(r"0\.\d+", runs.query.get("smoothing", "")):
            self.frame = Frame(smoothing=min(0.99, float(runs.query["smoothing"])))
        self._wanted = runs.query.get("find", "")
        self._names: list[str] = []
        self._charts: list[MetricChart] = []
        self._build_controls()
        self._body = theme.column()
        self._list()
        runs.watchers.append(self._renew)

    def zoom(self, begin: float | None, end: float | None) -> None:
        for number, value in ((self._begin, begin), (self._end, end)):
            number.value = None if value is None else float(f"{value:.6g}")
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
            search = ui.input("Find metrics", value=self._wanted, on_change=lambda event: find(event.value))
            search.props("dense outlined clearable debounce=150").style("min-width: 200px")
            theme.soft("Smoothing")
            slider = ui.slider(min=0, max=0.99, step=0.01, value=self.frame.smoothing)
            slider.on_value_change(lambda event: self._look(smoothing=event.value))
            slider.props('aria-label="Smoothing" label').style("width: 140px")
            axis = ui.toggle({"step": "Steps", "hours": "Hours"}, value="step")
            axis.on_value_change(lambda event: turn(event.value))
            axis.props('dense no-caps unelevated aria-label="Horizontal axis"')
            ui.checkbox("Logarithmic", on_change=lambda event: self._look(is_log=event.value)).props("dense")
            ui.space()
            self._begin, self._end = ui.number("From"), ui.number("To")
            for number in (self._begin, self._end):
                number.props("dense outlined clearable").style("width: 96px")
                for event in ("change", "clear"):
                    number.on(event, lambda: self.zoom(self._begin.value, self._end.value))
            ui.button("All", on_click=lambda: self.zoom(None, None)).props("flat dense no-caps").tooltip(
                "Drag over a chart to look closer; double-click to see all again"
            )
        with theme.row():
            names = {}
            for place, run in enumerate(self.runs.chosen):
                back = ", ".join(map(str, run.metrics.went_back[-3:]))
                names[f"{run.name} (resumed from step {back})" if back else run.name] = theme.run_color(place)
            theme.legend(names)

    def _found(self) -> list[str]:
        return sorted({name for run in self.runs.chosen for name in run.metrics.names()})

    async def _renew(self) -> None:
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
                    theme.heading(group.title)
                    theme.soft(group.note)
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
        marks = [step for run in runs for step in run.metrics.went_back]
        lines = lines_of(runs, self._name, page.frame)
        self._canvas.draw(line_chart(lines, page.frame, marks=marks))

    def _zoom(self, begin: float | None, end: float | None) -> None:
        if begin is None or end is None or self._page.frame.axis == "hours":
            self._page.zoom(begin, end)
        elif end - begin >= SHORTEST_STEPS:
            self._page.zoom(math.floor(begin), math.ceil(end))
