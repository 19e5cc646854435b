"""Logs: what each process says, its newest lines; filtered, and followed while the run is alive."""

from __future__ import annotations

from pathlib import Path

from nicegui import run as threads
from nicegui import ui

from trireme.tools.dashboard import theme
from trireme.tools.dashboard.log_text import Level, Tail, log_files, tail, to_html
from trireme.tools.dashboard.runs import RunFolder, RunSet

FOLLOW_S = 1.0
LEVELS = {"all": "All lines", "trouble": "Warnings and errors", "errors": "Errors"}


async def build(runs: RunSet) -> None:
    """About the first of the chosen runs."""
    run = runs.main
    assert run is not None
    await LogsPage(runs, run).show()


class LogsPage:
    """Which log, which lines of it, and whether it goes on."""

    def __init__(self, runs: RunSet, run: RunFolder) -> None:
        self.run = run
        self.process = runs.query.get("process", "")
        self.words = runs.query.get("find", "")
        self.level: Level = "all"
        self.follows = True
        self._shown: Tail | None = None
        self._build()
        ui.timer(FOLLOW_S, self._follow, immediate=False)

    def _build(self) -> None:
        with theme.card():
            with ui.element("div").classes("tr-row"):
                self._choice = ui.toggle([], on_change=lambda event: self._turn(event.value)).props(
                    'dense no-caps unelevated aria-label="Process"'
                )
                ui.space()
                ui.select(LEVELS, value=self.level, on_change=lambda event: self._filter(event.value)).props(
                    'dense outlined options-dense aria-label="Lines"'
                )
                ui.input("Find", value=self.words, on_change=lambda event: self._find(event.value)).props(
                    "dense outlined clearable debounce=250"
                )
                ui.switch("Follow", value=True, on_change=lambda event: self._set_follow(event.value)).props("dense")
            self._says = ui.label().classes("tr-soft tr-small").props("aria-live=polite")
            self._text = ui.html("", sanitize=False).classes("tr-log tr-mono")
            self._text.props('tabindex=0 role=log aria-label="Log"')

    async def show(self) -> None:
        """All of it anew."""
        self._name_files()
        file = log_files(self.run.path).get(self.process)
        if file is None:
            self._says.set_text(f"There are no logs in {self.run.paths.logs} yet.")
            return
        self._shown = await threads.io_bound(tail, file, words=self.words, level=self.level)
        if self._shown is not None and not self._text.is_deleted:
            self._text.set_content(to_html(self._shown.lines, self.words))
            self._says.set_text(_summary(self._shown))
            self._scroll()

    def _name_files(self) -> None:
        names = list(log_files(self.run.path))
        if self.process not in names:
            self.process = names[0] if names else ""
        if self._choice.options != names or self._choice.value != (self.process or None):
            self._choice.set_options(names, value=self.process or None)

    def _scroll(self) -> None:
        if self.follows:
            text = f"getHtmlElement({self._text.id})"
            ui.run_javascript(f"const log = {text}; if (log) log.scrollTop = log.scrollHeight;")

    async def _follow(self) -> None:
        file = log_files(self.run.path).get(self.process)
        if not self.follows or (file is not None and self._shown is not None and _size(file) == self._shown.size):
            return
        await self.show()

    async def _turn(self, process: str | None) -> None:
        if process and process != self.process:
            self.process = process
            await self.show()

    async def _filter(self, level: Level) -> None:
        self.level = level
        await self.show()

    async def _find(self, words: str | None) -> None:
        self.words = words or ""
        await self.show()

    async def _set_follow(self, follows: bool) -> None:
        self.follows = follows
        if follows:
            await self.show()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1


def _summary(shown: Tail) -> str:
    """ "the newest 1000 of 20,312 lines"."""
    if not shown.num_found:
        return "No such line." if shown.size else "It has said nothing yet."
    more = f"the newest {len(shown.lines):,} of " if shown.num_found > len(shown.lines) else ""
    begin = "" if shown.is_whole else " (older ones are in the file)"
    return f"{more}{shown.num_found:,} line{'s' if shown.num_found > 1 else ''}{begin}"
