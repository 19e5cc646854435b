"""The timeline: what every process did over time, what it waited for, and which side should get more GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

from nicegui import run as threads
from nicegui import ui

from trireme.monitor import timeline
from trireme.monitor.run_text import short_time
from trireme.monitor.spans import ENGINE, Span
from trireme.monitor.timeline import WORTH_TELLING, Shares, is_engine
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.charts import GRID, LABEL, Canvas
from trireme.tools.dashboard.history import Spans
from trireme.tools.dashboard.runs import RunSet

DRAWN_SPANS = 4000
SHORTEST_S = 0.005
LOOK_S = 2.0  # between two reads of the spans
MOST_REASONS = 5
LEAST_SHARE = 0.0005
ROW_PX, AROUND_PX = 46, 46

BLOCK = """(params, api) => {
  const row = api.value(0), begin = api.coord([api.value(1), row]), end = api.coord([api.value(2), row]);
  const height = api.size([0, 1])[1] * 0.72, area = params.coordSys;
  const left = Math.max(begin[0], area.x), right = Math.min(end[0], area.x + area.width);
  if (right < left) return;
  return {type: 'rect', shape: {x: left, y: begin[1] - height / 2, width: Math.max(right - left, 0.7), height},
          style: {fill: api.visual('color')}};
}"""

TOOLTIP = """p => {
  const safe = text => String(text).replace(/[&<>"]/g, c => '&#' + c.charCodeAt(0) + ';');
  const [row, begin, end, what, step, why, process] = p.value, long = (end - begin) / 1000;
  const seconds = long >= 10 ? long.toFixed(1) : long >= 0.01 ? long.toFixed(3) : long.toFixed(6);
  return '<b>' + safe(what) + '</b> ' + seconds + ' s' + (step >= 0 ? ', step ' + step : '')
    + '<br>' + safe(process) + ', from ' + new Date(begin).toLocaleTimeString() + (why ? '<br>' + safe(why) : '');
}"""


async def build(runs: RunSet) -> None:
    page = TimelinePage(runs)
    await page.renew()
    ui.timer(LOOK_S, page.renew, immediate=False)


class TimelinePage:
    """The stretch of time of the first of the chosen runs that is shown, with its shares and advice."""

    def __init__(self, runs: RunSet) -> None:
        self._run = runs.main
        self._spans = runs.main.spans
        self._end_s = 0.0  # unix time of the newest span that was drawn
        self._stretch: tuple[float, float] | None = None  # None shows all of it
        self._body = theme.column()
        self._is_built = False

    async def renew(self) -> None:
        # `spans` is a new object after the run was moved aside
        self._spans = self._run.spans
        await threads.io_bound(self._spans.refresh)
        if self._body.is_deleted:
            return
        if not self._spans:
            self._body.clear()
            with self._body:
                why = "Its processes write spans.jsonl as they work; this run has none yet."
                theme.nothing("Nothing is known of the time yet.", why, icon="view_timeline")
        elif not self._is_built:
            self._build()
            await self._show()
        elif self._spans.extent()[1] != self._end_s and self._stretch is None:
            await self._show()

    def _build(self) -> None:
        async def zoom(begin: float | None, end: float | None) -> None:
            if begin is None or end is None:
                self._stretch = None
            elif end - begin >= 1000 * SHORTEST_S:
                self._stretch = begin / 1000, end / 1000
            await self._show()

        self._is_built = True
        self._body.clear()
        with self._body:
            self._answer = theme.card()
            with theme.card():
                with theme.row():
                    theme.heading(f"Timeline of {self._run.name}")
                    self._length = theme.soft()
                    ui.space()
                    ui.button("All", on_click=lambda: zoom(None, None)).props("flat dense no-caps")
                self._canvas = Canvas(on_zoom=zoom).style("width: 100%")
                self._legend = theme.row()
                theme.soft("Drag over it to look closer, double-click for all.")
            self._shares = theme.column()

    async def _show(self) -> None:
        # remembered before the summary, during which more spans may come
        self._end_s = self._spans.extent()[1]
        shown = await threads.io_bound(summarize, self._spans, *(self._stretch or self._spans.extent()))
        if shown is None or self._body.is_deleted:
            return

        seconds = shown.end_s - shown.begin_s
        self._length.set_text(f"{seconds:.3g} s" if seconds < 120 else short_time(seconds))
        self._canvas.style(f"height: {len(shown.shares) * ROW_PX + AROUND_PX}px")
        self._canvas.draw(timeline_chart(shown))
        # only activities that occur in the stretch are explained
        seen = {what for shares in shown.shares.values() for what, share in shares.items() if share > 0}
        for place in (self._legend, self._answer, self._shares):
            place.clear()
        with self._legend:
            theme.legend({what: color for what, color in theme.ACTIVITIES.items() if what in seen})

        with self._answer:
            theme.heading("What holds it up, and which side should get more GPUs?")
            ui.label(f"{shown.advice[:1].upper()}{shown.advice[1:]}.").style("font-size: 16px; line-height: 1.5")
            for process, waits in shown.waits.items():
                reasons = ", ".join(
                    f"{why} {share:.0%}" for why, share in waits[:MOST_REASONS] if share >= WORTH_TELLING
                )
                if waits:
                    ui.label(f"{process} waits: {reasons}" if reasons else f"{process} hardly waits").classes("tr-soft")
        # the shares leave out start and end of a run, which the chart shows
        part = "" if shown.counted == (shown.begin_s, shown.end_s) else ", from the first step to the last"
        with (
            self._shares,
            theme.card("Shares of the time", f"of the stretch above{part}; each row adds up to all of it"),
        ):
            for process, shares in shown.shares.items():
                _show_shares(process, shares)
            if sum(map(is_engine, shown.shares)) > 1:
                _show_shares("all engines", shown.engines)


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
    of = {process: spans.within(begin_s, end_s, process) for process in spans.processes()}
    known = [span for own in of.values() for span in own]
    first_s, last_s = spans.steady()
    counted = max(begin_s, first_s), min(end_s, last_s)
    counted = counted if counted[0] < counted[1] else (begin_s, end_s)

    shares = {process: timeline.shares(own, process, *counted) for process, own in of.items()}
    waits = {
        process: [(why, share) for why, share in timeline.reasons(own, process, *counted) if why]
        for process, own in of.items()
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


def timeline_chart(shown: Timeline) -> dict[str, Any]:
    """Return the chart: a row for each process, a block for each span, over unix time in milliseconds."""
    row = {process: index for index, process in enumerate(shown.shares)}
    # a block has all that the tooltip shows, as the browser draws it without asking
    data = []
    for span in shown.spans:
        begin_ms, end_ms = round(1000 * span.begin_s, 3), round(1000 * span.end_s, 3)
        value = [row[span.lane], begin_ms, end_ms, span.what, span.step, span.why, span.lane]
        color = theme.ACTIVITIES.get(span.what, theme.ACTIVITIES["other"])
        data.append({"value": value, "itemStyle": {"color": color}})

    hidden = {"show": False}
    return {
        "animation": False,
        "grid": {"left": 148, "right": 16, "top": 8, "bottom": 28},
        "tooltip": {"trigger": "item", "confine": True, ":formatter": TOOLTIP, "textStyle": {"fontSize": 12}},
        "xAxis": {
            "type": "time",
            "min": 1000 * shown.begin_s,
            "max": 1000 * shown.end_s,
            "axisLabel": LABEL | {"hideOverlap": True, "showMinLabel": False, "showMaxLabel": False},
            "axisLine": {"lineStyle": {"color": GRID}},
            "splitLine": {"lineStyle": {"color": GRID}},
        },
        "yAxis": {
            "type": "category",
            "data": list(shown.shares),
            "inverse": True,
            "axisLabel": LABEL | {"fontSize": 12, "width": 136, "overflow": "truncate"},
            "axisLine": hidden,
            "axisTick": hidden,
            "splitLine": hidden,
        },
        "series": [
            {
                "type": "custom",
                ":renderItem": BLOCK,
                "encode": {"x": [1, 2], "y": 0},
                "emphasis": {"disabled": True},
                "data": data,
            }
        ],
    }


def _show_shares(process: str, shares: Shares) -> None:
    """Show a bar for a process, in parts that add up to its time."""
    parts = {what: share for what, share in shares.items() if share >= LEAST_SHARE}
    words = ", ".join(f"{what} {share:.1%}" for what, share in parts.items())
    with ui.element("div").classes("tr-share"):
        ui.label(process).classes("tr-small").style("font-weight: 600")
        with ui.element("div").classes("tr-bar").props("role=img") as bar:
            bar.props["aria-label"] = f"{process}: {words}"  # `props()` would parse the text, and may run it
            for what, share in parts.items():
                color = theme.ACTIVITIES.get(what, theme.ACTIVITIES["other"])
                ui.element("div").style(f"width: {share:.4%}; background: {color}").tooltip(f"{what} {share:.1%}")
        theme.soft(words)
