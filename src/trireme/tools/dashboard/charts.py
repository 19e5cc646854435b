"""Metrics: every one that the chosen runs report, by group; the same stretch of all of them at once.

A chart is sent when it comes into view, and only as many points of it as can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from nicegui import ui

from trireme.tools.dashboard import theme
from trireme.tools.dashboard.canvas import Canvas
from trireme.tools.dashboard.curves import Axis, Frame, curve
from trireme.tools.dashboard.groups import grouped, matching
from trireme.tools.dashboard.pictures import Line, line_chart
from trireme.tools.dashboard.runs import RunSet

SHORTEST = 0.5  # steps: what is dragged shorter than this was a click
WORDS = 4  # digits of the newest value


def build(runs: RunSet) -> None:
    if not any(run.columns.names() for run in runs.chosen):
        theme.nothing("No metrics yet.", "They are in the run's metrics.jsonl; the first comes with the first step.")
        return
    Charts(runs)


class Charts:
    """The page: what it is looked at through (`frame`), and the charts that are in view."""

    def __init__(self, runs: RunSet) -> None:
        self.runs = runs
        self.frame = Frame(smoothing=float(runs.query.get("smoothing", 0.0)))
        self.log = False
        self.wanted = runs.query.get("find", "")
        self._names: list[str] = []
        self._charts: list[Chart] = []
        self._build_controls()
        self._body = ui.element("div").classes("tr-charts")
        self._list()
        runs.watch(self._renew)

    def redraw(self) -> None:
        for chart in self._charts:
            chart.is_stale = True
            chart.draw_if_seen()

    def zoom(self, begin: float | None, end: float | None) -> None:
        self.frame = replace(self.frame, begin=begin, end=end)
        self._show_range()
        self.redraw()

    def _build_controls(self) -> None:
        with theme.card().classes("tr-controls"), ui.element("div").classes("tr-row"):
            find = ui.input("Find metrics", value=self.wanted, on_change=lambda event: self._find(event.value))
            find.props("dense outlined clearable debounce=150").style("min-width: 200px")
            ui.label("Smoothing").classes("tr-soft tr-small")
            smooth = ui.slider(min=0, max=0.99, step=0.01, value=self.frame.smoothing)
            smooth.on_value_change(lambda event: self._smooth(event.value))
            smooth.props('aria-label="Smoothing" label').style("width: 140px")
            axis = ui.toggle({"step": "Steps", "hours": "Hours"}, value="step")
            axis.on_value_change(lambda event: self._turn(event.value))
            axis.props('dense no-caps unelevated aria-label="Horizontal axis"')
            ui.checkbox("Logarithmic", on_change=lambda event: self._scale(event.value)).props("dense")
            ui.space()
            self._build_range()
        with ui.element("div").classes("tr-row"):
            self._legend()

    def _build_range(self) -> None:
        self._begin = self._bound("From", lambda value: self.zoom(value, self.frame.end))
        self._end = self._bound("To", lambda value: self.zoom(self.frame.begin, value))
        ui.button("All", on_click=lambda: self.zoom(None, None)).props("flat dense no-caps").tooltip(
            "Drag over a chart to look closer; double-click to see all again"
        )

    def _bound(self, label: str, act: Callable[[float | None], None]) -> ui.number:
        number = ui.number(label).props("dense outlined clearable").style("width: 96px")
        number.on("change", lambda: act(number.value))
        number.on("clear", lambda: act(None))
        return number

    def _show_range(self) -> None:
        self._begin.value = None if self.frame.begin is None else float(f"{self.frame.begin:.6g}")
        self._end.value = None if self.frame.end is None else float(f"{self.frame.end:.6g}")

    def _legend(self) -> None:
        for place, run in enumerate(self.runs.chosen):
            with ui.element("div").classes("tr-state"):
                ui.element("span").classes("tr-dot").style(f"background: {theme.run_color(place)}")
                ui.label(f"{run.name}{_range_text(run.columns.went_back)}")

    def _find(self, wanted: str | None) -> None:
        self.wanted = wanted or ""
        self._list()

    def _smooth(self, weight: float) -> None:
        self.frame = replace(self.frame, smoothing=weight)
        self.redraw()

    def _turn(self, axis: Axis) -> None:
        self.frame = replace(self.frame, axis=axis)
        self.zoom(None, None)

    def _scale(self, log: bool) -> None:
        self.log = log
        self.redraw()

    def _renew(self) -> None:
        """New names get charts; those that are there get what is new."""
        if self._found() != self._names:
            self._list()
        else:
            self.redraw()

    def _found(self) -> list[str]:
        return sorted({name for run in self.runs.chosen for name in run.columns.names()})

    def _list(self) -> None:
        self._names = self._found()
        self._charts = []
        self._body.clear()
        with self._body:
            shown = grouped(matching(self._names, self.wanted))
            for group, names in shown.items():
                with ui.element("div").classes("tr-row tr-group"):
                    theme.heading(group.title)
                    ui.label(group.note).classes("tr-soft tr-small")
                with ui.element("div").classes("tr-grid"):
                    self._charts += [Chart(self, name) for name in names]
            if not shown:
                theme.nothing(f"No metric has {self.wanted!r} in its name.", "Try a part of it: reward, time, kl.")


def _range_text(went_back: list[int]) -> str:
    """ "went on from step 50"."""
    return f" (went on from step {', '.join(map(str, went_back[-3:]))})" if went_back else ""


class Chart:
    """One metric. Its place is there from the beginning; what is in it, once it is seen."""

    def __init__(self, page: Charts, name: str) -> None:
        self._page = page
        self.name = name
        self.is_stale = True
        self._is_seen = False
        card = ui.element("section").classes("tr-card tr-chart-card")
        card.props["aria-label"] = name  # text for `props()` is parsed: a name with `:` in it would become a script
        with card:
            with ui.element("div").classes("tr-row tr-chart-head"):
                ui.label(name).classes("tr-title")
                ui.space()
                self._newest = ui.label().classes("tr-soft tr-small")
            self._canvas = Canvas(on_seen=self._see, on_stretch=self._choose, on_whole=lambda: page.zoom(None, None))
            self._canvas.classes("tr-chart")

    def _see(self, is_seen: bool) -> None:
        self._is_seen = is_seen
        self.draw_if_seen()

    def draw_if_seen(self) -> None:
        if self._is_seen and self.is_stale:
            self.is_stale = False
            self._draw()

    def _draw(self) -> None:
        self._newest.set_text("   ".join(self._newest_values()))
        self._canvas.draw(line_chart(self._lines(), self._page.frame, marks=self._marks(), log=self._page.log))

    def _lines(self) -> list[Line]:
        frame = self._page.frame
        return [
            Line(run.name, theme.run_color(place), curve(run.columns, self.name, frame))
            for place, run in enumerate(self._page.runs.chosen)
            if len(run.columns.series(self.name).steps)
        ]

    def _marks(self) -> list[int]:
        return [step for run in self._page.runs.chosen for step in run.columns.went_back]

    def _newest_values(self) -> list[str]:
        values = [run.columns.last(self.name) for run in self._page.runs.chosen]
        return [f"{value:.{WORDS}g}" for value in values if value is not None]

    def _choose(self, begin: float, end: float) -> None:
        if self._page.frame.axis == "hours":
            self._page.zoom(begin, end)
        elif end - begin >= SHORTEST:
            self._page.zoom(math.floor(begin), math.ceil(end))
