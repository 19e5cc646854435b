"""What is above every page: the tabs, the runs that are looked at, how the first of them stands, and the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nicegui import ui
from nicegui.events import KeyEventArguments, ValueChangeEventArguments

from trireme.tools.dashboard import theme
from trireme.tools.dashboard.runs import Library, RunFolder, RunSet

MOST_RUNS = 8  # compared at once: as many as there are colours


class Tab(Protocol):
    @property
    def path(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def icon(self) -> str: ...


class Header:
    """Built once for each who looks; `show` follows where they are."""

    def __init__(self, library: Library, pages: Sequence[Tab], dark: ui.dark_mode) -> None:
        self._library = library
        self._pages = pages
        self._dark = dark
        self._runs = RunSet(library, [])
        self._path = "/"
        self._showing = False
        self._tabs: dict[str, ui.link] = {}
        self._build()
        self._help = self._build_help()
        ui.keyboard(self._press)

    def mark(self, path: str) -> None:
        """The tab of the page that is about to be shown."""
        self._path = path
        for page in self._pages:
            if page.path == path:
                self._tabs[page.path].props("aria-current=page")
            else:
                self._tabs[page.path].props(remove="aria-current")

    def show(self, runs: RunSet) -> None:
        self._runs = runs
        for page in self._pages:
            self._tabs[page.path].props["href"] = runs.link(page.path)
        self.show_runs(runs)
        self.show_state(runs)

    def show_runs(self, runs: RunSet) -> None:
        self._showing = True
        options = {run.name: run.name for run in self._library.runs()}
        self._select.set_options(options, value=[run.name for run in runs.chosen if run.name in options])
        self._showing = False

    def show_state(self, runs: RunSet) -> None:
        self._state.clear()
        if runs.main is not None:
            with self._state:
                state_of(runs.main)

    def _build(self) -> None:
        with ui.header(elevated=False).classes("tr-header"):
            with ui.link(target="/").classes("tr-brand").props('aria-label="Trireme, overview"'):
                ui.html(theme.FAVICON, sanitize=False).style("width: 22px; height: 22px")
                ui.label("Trireme")
            with ui.element("nav").classes("tr-tabs").props('aria-label="Pages"'):
                for page in self._pages:
                    self._tabs[page.path] = self._tab(page)
            ui.space()
            self._state = ui.element("div").classes("tr-state").props("aria-live=polite")
            self._select = self._build_select()
            self._button("contrast", "Light or dark (d)", self._turn)
            self._button("keyboard", "Keys (?)", lambda: self._help.open())

    def _tab(self, page: Tab) -> ui.link:
        with ui.link(target=page.path).classes("tr-tab") as link:
            ui.icon(page.icon).props("aria-hidden=true")
            ui.label(page.title)
        return link

    def _build_select(self) -> ui.select:
        select = ui.select([], multiple=True, with_input=True, label="Runs", on_change=self._chosen)
        select.props(f"dense outlined options-dense use-chips max-values={MOST_RUNS} input-debounce=0")
        return select.classes("tr-select").style("width: 240px")

    def _button(self, icon: str, label: str, act: Callable[[], Any]) -> None:
        ui.button(icon=icon, on_click=act).props(f'flat round dense aria-label="{label}"').tooltip(label)

    def _chosen(self, event: ValueChangeEventArguments) -> None:
        names = list(event.value or [])
        if self._showing or names == [run.name for run in self._runs.chosen]:
            return
        chosen = [run for name in names if (run := self._library.named(name))]
        ui.navigate.to(RunSet(self._library, chosen).link(self._path))

    async def _turn(self) -> None:
        """The browser remembers it; until then it follows the system."""
        dark = not await ui.run_javascript("document.body.classList.contains('body--dark')")
        self._dark.value = dark
        word = "dark" if dark else "light"
        ui.run_javascript(f"document.cookie = '{theme.COOKIE}={word};path=/;max-age=31536000;samesite=strict'")

    async def _press(self, event: KeyEventArguments) -> None:
        if not event.action.keydown or event.modifiers.ctrl or event.modifiers.alt or event.modifiers.meta:
            return
        key = event.key.name
        if key.isdigit() and 0 < int(key) <= len(self._pages):
            ui.navigate.to(self._runs.link(self._pages[int(key) - 1].path))
        elif key == "d":
            await self._turn()
        elif key == "?":
            self._help.open()
        elif key == "r":
            self._select.run_method("focus")
        elif key == "/":
            ui.run_javascript("document.querySelector('.tr-main input')?.focus()")

    def _build_help(self) -> ui.dialog:
        places = f"1 – {len(self._pages)}"
        keys = {places: "the pages, from left to right", "r": "choose runs", "/": "the page's first field",
                "d": "light or dark", "?": "this list", "Tab, Enter": "everything else"}  # fmt: skip
        with ui.dialog() as dialog, ui.element("section").classes("tr-card tr-dialog"):
            theme.heading("Keys")
            for key, meaning in keys.items():
                with ui.element("div").classes("tr-row"):
                    ui.label(key).classes("tr-kbd")
                    ui.label(meaning).classes("tr-soft")
            ui.button("Close", on_click=dialog.close).props("flat")
        return dialog


def state_of(run: RunFolder) -> None:
    """ "● running 41/150"."""
    state = run.state()
    live = "live" if run.is_live() else ""
    ui.element("span").classes(f"tr-dot {live}").style(f"background: {theme.state_color(state)}")
    total = f"/{run.max_steps}" if run.max_steps else ""
    ui.label(f"{state} {run.num_done}{total}").tooltip(f"{run.name}: {state}, steps trained")
