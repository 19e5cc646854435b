"""Lanes: what every process did over time, what it waits for, and which side should get more GPUs."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import run as threads
from nicegui import ui
from nicegui.events import KeyEventArguments

from trireme.monitor.lanes import Shares
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.canvas import Canvas
from trireme.tools.dashboard.gantt import gantt, height_px
from trireme.tools.dashboard.lane_view import (
    LaneView,
    SpanStore,
    advice_without_spans,
    look,
    trainer_shares,
)
from trireme.tools.dashboard.runs import RunFolder, RunSet

SHORTEST_S = 0.005
LATEST_S = 60.0  # what is followed of a live run
MOST_REASONS = 5
CLOSER = {"+": 0.5, "=": 0.5, "-": 2.0}
ASIDE = {"ArrowLeft": -0.5, "ArrowRight": 0.5}


async def build(runs: RunSet) -> None:
    """About the first of the chosen runs."""
    run = runs.main
    assert run is not None
    page = LanesPage(runs, run)
    await page.renew()
    runs.watch(page.renew)


class LanesPage:
    """What stretch is looked at, and the picture of it."""

    def __init__(self, runs: RunSet, run: RunFolder) -> None:
        self.runs = runs
        self.run = run
        self._end_s = 0.0  # of what was known when it was drawn
        self._stretch: tuple[float, float] | None = None  # None: all of it
        self._latest = False
        self._body = ui.element("div").classes("tr-charts")
        self._built = False

    @property
    def store(self) -> SpanStore:
        return self.run.spans

    async def renew(self) -> None:
        """What is new of the run. Others who look may have read it already."""
        await threads.io_bound(self.store.refresh)
        if not self.store:
            self._show_missing()
        elif not self._built:
            self._build()
            await self._show()
        elif self.store.extent()[1] != self._end_s and (self._latest or self._stretch is None):
            await self._show()

    def _show_missing(self) -> None:
        known = trainer_shares(self.run.rows())
        self._body.clear()
        with self._body:
            theme.nothing(
                "This run has no spans.jsonl.",
                "Processes write it as they work: the run is older than that, or has not begun. What follows is from "
                "the trainer's metrics; of the engines nothing is known.",
                icon="view_timeline",
            )
            if known:
                with theme.card("What the trainer did with its steps"):
                    _bar("trainer", known)
                    with ui.element("div").classes("tr-row"):
                        _legend(known)
                with theme.card("In words"):
                    ui.label(_sentence(advice_without_spans(known)))

    def _build(self) -> None:
        self._built = True
        self._body.clear()
        with self._body:
            self._answer = theme.card("What holds it up?")
            with theme.card():
                self._build_controls()
                self._canvas = Canvas(on_stretch=self._choose, on_whole=lambda: self._go(None)).style("width: 100%")
                self._key = ui.element("div").classes("tr-row")
            self._shares = ui.element("div").classes("tr-charts")
        ui.keyboard(self._press)

    def _build_controls(self) -> None:
        with ui.element("div").classes("tr-row"):
            theme.heading(f"Lanes of {self.run.name}")
            self._says = ui.label().classes("tr-soft tr-small")
            ui.space()
            self._button("All", lambda: self._go(None), "The whole run")
            self._button("Steps", lambda: self._go(self.store.steady()), "Without start and end")
            self._button("Last minute", self._follow, "Goes on with a run that is alive")
            self._icon("chevron_left", lambda: self._move(-0.5), "Earlier (←)")
            self._icon("zoom_in", lambda: self._scale(0.5), "Closer (+)")
            self._icon("zoom_out", lambda: self._scale(2.0), "Further away (-)")
            self._icon("chevron_right", lambda: self._move(0.5), "Later (→)")

    def _button(self, text: str, act: Callable[[], object], tip: str) -> None:
        ui.button(text, on_click=act).props("flat dense no-caps").tooltip(tip)

    def _icon(self, icon: str, act: Callable[[], object], tip: str) -> None:
        ui.button(icon=icon, on_click=act).props(f'flat dense round aria-label="{tip}"').tooltip(tip)

    # where one looks

    def _current(self) -> tuple[float, float]:
        first, last = self.store.extent()
        if self._latest:
            return max(first, last - LATEST_S), last
        return self._stretch or (first, last)

    async def _go(self, stretch: tuple[float, float] | None) -> None:
        self._stretch, self._latest = stretch, False
        await self._show()

    async def _follow(self) -> None:
        self._stretch, self._latest = None, True
        await self._show()

    async def _scale(self, factor: float, around: float = 0.5) -> None:
        begin, end = self._current()
        middle = begin + around * (end - begin)
        long = max(SHORTEST_S, (end - begin) * factor)
        await self._go(self._clipped(middle - around * long, middle + (1 - around) * long))

    async def _move(self, by: float) -> None:
        begin, end = self._current()
        by_s = by * (end - begin)
        first, last = self.store.extent()
        by_s = min(max(by_s, first - begin), last - end)
        await self._go((begin + by_s, end + by_s))

    def _clipped(self, begin: float, end: float) -> tuple[float, float] | None:
        first, last = self.store.extent()
        begin, end = max(begin, first), min(end, last)
        return None if (begin, end) == (first, last) else (begin, max(end, begin + SHORTEST_S))

    async def _choose(self, begin: float, end: float) -> None:
        """In seconds since the first that is known."""
        first, _ = self.store.extent()
        if end - begin >= SHORTEST_S:
            await self._go(self._clipped(first + begin, first + end))

    async def _press(self, event: KeyEventArguments) -> None:
        if not event.action.keydown:
            return
        key = event.key.name
        if key in CLOSER:
            await self._scale(CLOSER[key])
        elif key in ASIDE:
            await self._move(ASIDE[key])
        elif key in ("0", "Home"):
            await self._go(None)

    # what is seen there

    async def _show(self) -> None:
        self._end_s = self.store.extent()[1]
        view = await threads.io_bound(look, self.store, *self._current())
        if view is None or self._body.is_deleted:
            return
        self._draw(view)
        self._tell(view)

    def _draw(self, view: LaneView) -> None:
        zero_s, _ = self.store.extent()
        self._says.set_text(f"{_long(view.end_s - view.begin_s)} of it; drag to look closer, double-click for all")
        self._canvas.style(f"height: {height_px(len(view.lanes))}px")
        self._canvas.draw(gantt(view, theme.ACTIVITIES, zero_s=zero_s))
        self._key.clear()
        with self._key:
            _legend({what: 1.0 for of_lane in view.shares.values() for what, share in of_lane.items() if share > 0})

    def _tell(self, view: LaneView) -> None:
        self._answer.clear()
        with self._answer:
            theme.heading("What holds it up, and which side should get more GPUs?")
            ui.label(_sentence(view.advice)).style("font-size: 16px; line-height: 1.5")
            for lane, held in view.held_by.items():
                if held:
                    ui.label(_held(lane, held)).classes("tr-soft")
        self._shares.clear()
        start = "" if view.told == (view.begin_s, view.end_s) else ", from the first step to the last"
        with self._shares, theme.card("Shares of the time", f"of the stretch above{start}; each lane's add up to all"):
            for lane, of_lane in view.shares.items():
                _bar(lane, of_lane)
            if view.engines:
                _bar("all engines", view.engines)


def _held(lane: str, held: list[tuple[str, float]]) -> str:
    """ "trainer waits for: no batch yet 31 %, the engines 4 %"."""
    parts = [f"{why} {share:.0%}" for why, share in held[:MOST_REASONS] if share >= 0.005]
    return f"{lane} waits: {', '.join(parts)}" if parts else f"{lane} hardly waits"


def _bar(lane: str, of_lane: Shares) -> None:
    said = ", ".join(f"{what} {share:.1%}" for what, share in of_lane.items() if share >= 0.0005)
    with ui.element("div").classes("tr-share"):
        ui.label(lane).classes("tr-small").style("font-weight: 600")
        bar = ui.element("div").classes("tr-bar").props("role=img")
        bar.props["aria-label"] = f"{lane}: {said}"  # text for `props()` is parsed, and may become a script
        with bar:
            for what, share in of_lane.items():
                if share > 0.0005:
                    color = theme.ACTIVITIES.get(what, theme.ACTIVITIES["other"])
                    ui.element("div").style(f"width: {share:.4%}; background: {color}").tooltip(f"{what} {share:.1%}")
        ui.label(said).classes("tr-soft tr-small")


def _legend(whats: Shares) -> None:
    for what, color in theme.ACTIVITIES.items():
        if what in whats:
            with ui.element("div").classes("tr-state"):
                ui.element("span").classes("tr-dot").style(f"background: {color}; border-radius: 3px")
                ui.label(what)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _long(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
