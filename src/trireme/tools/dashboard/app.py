"""The dashboard's server, and what is around its pages: tabs, the choice of runs, and the state of a run.

Scripts, styles and fonts come with NiceGUI, so a browser loads nothing from elsewhere.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI
from nicegui import PageArguments, context, run, ui

from trireme.base.log import get_logger
from trireme.tools.dashboard import charts, logs, overview, rollouts, theme, timeline, tokens
from trireme.tools.dashboard.runs import Library, RunSet
from trireme.transport.dashboard_key import RequireKey

LOOK_S = 2.0  # seconds between two reads of the files, while a browser has the page open
MOST_RUNS = 8  # compared at once: as many as there are colours
MESSAGE_BYTES = 2**20  # size of the largest message that a browser may send

logger = get_logger("dashboard")


class Page(NamedTuple):
    """One question about runs."""

    path: str
    title: str
    icon: str
    build: Callable[[RunSet], Awaitable[None]]
    reads_batches: bool = False


PAGES = (
    Page("/", "Overview", "dashboard", overview.build),
    Page("/metrics", "Metrics", "show_chart", charts.build),
    Page("/timeline", "Timeline", "view_timeline", timeline.build),
    Page("/rollouts", "Rollouts", "forum", rollouts.build, reads_batches=True),
    Page("/tokens", "Tokens", "data_object", tokens.build, reads_batches=True),
    Page("/logs", "Logs", "article", logs.build),
)
"""Pages in the order of the tabs."""


def open_dashboard(runs: list[Path], listener: socket.socket, secret: str | None = None) -> None:
    """Serve until the process is asked to end.

    Args:
        runs: folders of runs, or with runs below them.
        listener: bound already, so that its address could be printed.
        secret: the key that a browser must send; None lets every browser of this machine in.
    """
    library = Library(runs)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    rollouts.serve_pictures(app, library)
    ui.run_with(
        app,
        root=lambda: Browser(library).build(),
        title="Trireme",
        favicon=theme.FAVICON,
        dark=None,  # follows the browser's preference
        show_welcome_message=False,
        tailwind=False,  # a second's worth of scripts; `style.css` is enough
    )
    config = uvicorn.Config(RequireKey(app, secret), log_level="warning", ws_max_size=MESSAGE_BYTES)
    uvicorn.Server(config).run(sockets=[listener])


class Browser:
    """One browser: its header, the page that it shows, and the timer that reads files while it is open."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._runs = RunSet(library, [])
        self._path = "/"
        self._is_showing = False

    async def build(self) -> None:
        theme.apply()
        await run.io_bound(self._library.search)
        self._build_header()
        with ui.element("main").classes("tr-main"):
            ui.sub_pages({page.path: self._builder(page) for page in PAGES})
        ui.timer(LOOK_S, self._look, immediate=False)

    # pages

    def _builder(self, page: Page) -> Callable[..., Any]:
        async def show(args: PageArguments) -> None:
            self._path = page.path
            asked = args.query_parameters.getlist("run")
            # the address names the runs, so that a page can be shared; the newest run is the default
            named = [found for name in asked if (found := self._library.named(name))]
            query = {key: value for key, value in args.query_parameters.items() if key != "run"}
            self._runs = RunSet(self._library, (named or self._library.runs()[:1])[:MOST_RUNS], query)
            await run.io_bound(self._runs.refresh)
            self._show_header()
            await self._build_page(page)

        show.__annotations__["args"] = PageArguments  # NiceGUI looks for the class itself, not for its name
        return show

    async def _build_page(self, page: Page) -> None:
        """Build a page, or show in its place why it failed: a damaged file must not take other pages with it."""
        if not self._runs.chosen:
            theme.nothing("There is no run here yet.", "It is shown as soon as its folder is there.")
            return
        if page.reads_batches and not self._runs.main.journal.steps():
            theme.nothing("There is no batch yet.", f"{page.title} are shown as soon as the journal has a batch.")
            return
        try:
            await page.build(self._runs)
        except Exception as error:
            logger.exception("the page %s could not be drawn", page.path)
            context.slot.parent.clear()
            theme.nothing(f"{page.title} could not be drawn.", f"{type(error).__name__}: {error}", icon="error_outline")

    async def _look(self) -> None:
        runs = self._runs
        # remembered, as the user may open another page while files are read
        if await run.io_bound(self._library.search):
            self._show_runs()
        if await run.io_bound(runs.refresh) and runs is self._runs:
            self._show_state()
            for redraw in runs.watchers:
                await redraw()

    # header

    def _build_header(self) -> None:
        with ui.header(elevated=False).classes("tr-header"):
            with ui.link(target="/").classes("tr-brand").props('aria-label="Trireme, overview"'):
                ui.html(theme.FAVICON, sanitize=False).style("width: 22px; height: 22px")
                ui.label("Trireme")
            self._tabs: dict[str, ui.link] = {}
            with ui.element("nav").classes("tr-tabs").props('aria-label="Pages"'):
                for page in PAGES:
                    with ui.link(target=page.path).classes("tr-tab") as self._tabs[page.path]:
                        ui.icon(page.icon).props("aria-hidden=true")
                        ui.label(page.title)
            ui.space()
            self._state = ui.element("div").classes("tr-state").props("aria-live=polite")
            self._select = ui.select([], multiple=True, with_input=True, label="Runs", on_change=self._choose)
            self._select.props(f"dense outlined options-dense use-chips max-values={MOST_RUNS} input-debounce=0")
            self._select.classes("tr-select").style("width: 240px")

    def _show_header(self) -> None:
        for path, tab in self._tabs.items():
            tab.props["href"] = self._runs.link(path)
            if path == self._path:
                tab.props("aria-current=page")
            else:
                tab.props(remove="aria-current")
        self._show_runs()
        self._show_state()

    def _show_runs(self) -> None:
        # setting the options calls `_choose`, which must not take that for a choice of the user
        self._is_showing = True
        names = [found.name for found in self._library.runs()]
        self._select.set_options(names, value=[chosen.name for chosen in self._runs.chosen if chosen.name in names])
        self._is_showing = False

    def _show_state(self) -> None:
        """
        Example:
            ● running 41/150
        """
        self._state.clear()
        if not self._runs.chosen:
            return
        main = self._runs.main
        with self._state:
            dot = ui.element("span").classes(f"tr-dot {'live' if main.is_live else ''}")
            dot.style(f"background: {theme.STATES.get(main.state, theme.QUIET)}")
            total = f"/{main.max_steps}" if main.max_steps else ""
            ui.label(f"{main.state} {main.metrics.num_done}{total}").tooltip(
                f"{main.name}: {main.state}, steps trained"
            )

    def _choose(self, event: Any) -> None:
        names = list(event.value or [])
        if not self._is_showing and names != [chosen.name for chosen in self._runs.chosen]:
            chosen = [found for name in names if (found := self._library.named(name))]
            ui.navigate.to(RunSet(self._library, chosen).link(self._path))
