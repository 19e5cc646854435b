"""The dashboard: one page for each question about a run, in the browser, from the run's folder alone.

Nothing is loaded from elsewhere: scripts, styles and fonts come with NiceGUI. Nothing is written into a run's folder.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI
from nicegui import PageArguments, context, run, ui

from trireme.base.log import get_logger
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.header import Header
from trireme.tools.dashboard.runs import Library, RunSet
from trireme.transport.gate import Gate

LOOK_S = 2.0  # between two looks at the files, while somebody has the page open
SHOWN_AT_FIRST = 1

logger = get_logger("dashboard")


class Page(NamedTuple):
    """One question about runs. Its module has `build(runs)`, which may be a coroutine."""

    path: str
    title: str
    icon: str
    module: str

    def build(self, runs: RunSet) -> Any:
        return import_module(f"trireme.tools.dashboard.{self.module}").build(runs)


PAGES = (
    Page("/", "Overview", "dashboard", "overview"),
    Page("/metrics", "Metrics", "show_chart", "charts"),
    Page("/lanes", "Lanes", "view_timeline", "lanes_page"),
    Page("/rollouts", "Rollouts", "forum", "rollouts_page"),
    Page("/tokens", "Tokens", "data_object", "tokens_page"),
    Page("/fates", "Fates", "fact_check", "fates_page"),
    Page("/logs", "Logs", "article", "logs_page"),
    Page("/warnings", "Warnings", "warning_amber", "warnings_page"),
)
"""In the order of the tabs; the digit of its place is the key that opens it."""


def open_dashboard(runs: list[Path], listener: socket.socket, secret: str | None = None) -> None:
    """Serves until it is asked to end.

    Args:
        runs: folders of runs, or with runs below them.
        listener: bound already, so that its address could be told.
        secret: without which nobody is let in.
    """
    config = uvicorn.Config(Gate(build_app(Library(runs)), secret), log_level="warning", ws_max_size=2**20)
    uvicorn.Server(config).run(sockets=[listener])


def build_app(library: Library) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    ui.run_with(
        app,
        root=lambda: Shell(library).build(),
        title="Trireme",
        favicon=theme.FAVICON,
        dark=None,
        show_welcome_message=False,
        tailwind=False,  # a second's worth of scripts; `style.css` says all that is needed
    )
    return app


class Shell:
    """What is around the pages, for one who looks: header, tabs, and the look at the files every two seconds."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.runs = RunSet(library, [])

    async def build(self) -> None:
        dark = theme.apply()
        await run.io_bound(self.library.search)
        self.header = Header(self.library, PAGES, dark)
        with ui.element("main").classes("tr-main"):
            routes: dict[str, Callable[..., Any]] = {page.path: self._builder(page) for page in PAGES}
            ui.sub_pages(routes)
        ui.timer(LOOK_S, self._look, immediate=False)

    def _builder(self, page: Page) -> Callable[..., Any]:
        async def show(args: PageArguments) -> None:
            self.header.mark(page.path)
            await self._choose(args)
            self.header.show(self.runs)
            await _draw(page, self.runs)

        show.__annotations__["args"] = PageArguments  # NiceGUI looks for the class itself, not for its name
        return show

    async def _choose(self, args: PageArguments) -> None:
        """Those of the address; the newest where it has none."""
        asked = args.query_parameters.getlist("run")
        named = [found for name in asked if (found := self.library.named(name))]
        query = {key: value for key, value in args.query_parameters.items() if key != "run"}
        self.runs = RunSet(self.library, named or self.library.runs()[:SHOWN_AT_FIRST], query)
        await run.io_bound(self.runs.refresh)

    async def _look(self) -> None:
        runs = self.runs
        if await run.io_bound(self.library.search):
            self.header.show_runs(runs)
        if await run.io_bound(runs.refresh) and runs is self.runs:
            self.header.show_state(runs)
            for redraw in runs.watchers:
                await settle(redraw())


async def settle(made: Any) -> None:
    """Waits for it where it is a coroutine."""
    if inspect.isawaitable(made):
        await made


async def _draw(page: Page, runs: RunSet) -> None:
    """A page that cannot be drawn says so in its place: a damaged file must not take the others with it."""
    if runs.main is None:
        theme.nothing("There is no run here yet.", "It is shown as soon as its folder is there.")
        return
    try:
        await settle(page.build(runs))
    except Exception as error:
        logger.exception("the page %s could not be drawn", page.path)
        context.slot.parent.clear()
        theme.nothing(f"{page.title} could not be drawn.", f"{type(error).__name__}: {error}", icon="error_outline")
