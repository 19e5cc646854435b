"""The logs of a run: the newest lines of each process, filtered, and followed while the run is alive."""

from __future__ import annotations

import html
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from nicegui import run as threads
from nicegui import ui

from trireme.base.safe_text import clean, shortened
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.runs import RunSet
from trireme.tools.record_differences import counted

FOLLOW_S = 1.0
ENDING = ".stdout"
FIRST = ("orchestrator", "trainer", "inference", "sft")
TAIL_BYTES = 512 * 1024  # bytes read from the file's end without a filter
SEARCH_BYTES = 16 * 1024 * 1024  # bytes read from the file's end with a filter
MOST_LINES = 1000
LONGEST = 2000  # characters of a line

Level = Literal["all", "trouble", "errors"]
LEVELS: dict[Level, str] = {"all": "All lines", "trouble": "Warnings and errors", "errors": "Errors"}

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")
ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL|Traceback)\b|(Error|Exception)\b")
WARNING = re.compile(r"\b(WARNING|WARN)\b|Warning\b")


class Tail(NamedTuple):
    """The end of a log, as it is shown."""

    lines: list[str]
    num_found: int  # lines that passed the filter, of those that were read
    is_whole: bool  # the file was read from its beginning
    size: int  # bytes of the file


def log_files(folder: Path) -> dict[str, Path]:
    """Return the logs by process; those of the main processes come first."""
    found = {file.name.removesuffix(ENDING): file for file in folder.glob(f"*{ENDING}")}
    place = {name: min((n for n, first in enumerate(FIRST) if name.startswith(first)), default=9) for name in found}
    return dict(sorted(found.items(), key=lambda item: (place[item[0]], item[0])))


def tail(file: Path, *, words: str = "", level: Level = "all", most: int = MOST_LINES) -> Tail:
    """Return the newest lines of a level that have all the words in them; none if the file cannot be read."""
    wanted_words = words.lower().split()
    try:
        with open(file, "rb") as log:
            size = log.seek(0, 2)
            # a filter may match few lines, so more of the file is read for it
            begin = max(0, size - (SEARCH_BYTES if wanted_words or level != "all" else TAIL_BYTES))
            log.seek(begin)
            data = log.read(size - begin)
    except OSError:
        return Tail([], 0, True, 0)

    if begin:
        data = data.partition(b"\n")[2]  # the rest of a line that begins before
    raw = data.removesuffix(b"\n").split(b"\n") if data else []
    lines = [shown_line(line.decode(errors="replace")) for line in raw]

    if level != "all":
        levels = {"trouble": ("warn", "bad"), "errors": ("bad",)}[level]
        lines = [line for line in lines if level_of(line) in levels]
    lines = [line for line in lines if all(word in line.lower() for word in wanted_words)]
    return Tail(lines[-most:], len(lines), begin == 0, size)


def shown_line(line: str) -> str:
    """Return a line without colours and control characters; of a progress bar that was redrawn, the last state."""
    return shortened(clean(ANSI.sub("", line).rstrip("\r").rpartition("\r")[2]), LONGEST)


def level_of(line: str) -> Literal["", "warn", "bad"]:
    if ERROR.search(line):
        return "bad"
    return "warn" if WARNING.search(line) else ""


def to_html(lines: list[str]) -> str:
    """Return lines with their levels marked. Text is escaped."""
    return "\n".join(f'<span class="{level_of(line)}">{html.escape(line)}</span>' for line in lines)


async def build(runs: RunSet) -> None:
    await LogsPage(runs).show()


class LogsPage:
    """The log of the first of the chosen runs that is shown, and its filter."""

    def __init__(self, runs: RunSet) -> None:
        self._run = runs.main
        self._shown: Tail | None = None
        with theme.card():
            with theme.row():
                self._process = ui.toggle([], value=None, on_change=self.show)
                self._process.props('dense no-caps unelevated aria-label="Process"')
                ui.space()
                self._level = ui.select(LEVELS, value="all", on_change=self.show)
                self._level.props('dense outlined options-dense aria-label="Lines"')
                self._find = ui.input("Find", value=runs.query.get("find", ""), on_change=self.show)
                self._find.props("dense outlined clearable debounce=250")
                self._follow = ui.switch("Follow", value=True, on_change=self.show).props("dense")
            self._summary = theme.soft().props("aria-live=polite")
            self._text = ui.html("", sanitize=False).classes("tr-log tr-mono")
            self._text.props('tabindex=0 role=log aria-label="Log"')
        self._show_processes(runs.query.get("process"))
        ui.timer(FOLLOW_S, self._look, immediate=False)

    def _show_processes(self, wanted: str | None) -> None:
        names = list(log_files(self._run.paths.logs))
        if names != self._process.options or (names and self._process.value is None):
            self._process.set_options(names, value=wanted if wanted in names else next(iter(names), None))

    def _file(self) -> Path | None:
        return log_files(self._run.paths.logs).get(self._process.value or "")

    async def show(self) -> None:
        file = self._file()
        if file is None:
            self._summary.set_text(f"There are no logs in {self._run.paths.logs} yet.")
            return
        words = self._find.value or ""
        shown = await threads.io_bound(tail, file, words=words, level=self._level.value)
        # the user may have chosen another log while this one was read
        if shown is None or self._text.is_deleted or file != self._file():
            return
        self._shown = shown
        self._text.set_content(to_html(shown.lines))
        self._summary.set_text(summary(shown))
        if self._follow.value:
            text = f"getHtmlElement({self._text.id})"
            ui.run_javascript(f"const log = {text}; if (log) log.scrollTop = log.scrollHeight;")

    async def _look(self) -> None:
        self._show_processes(self._process.value)
        file = self._file()
        if not (self._follow.value and file):
            return
        with suppress(FileNotFoundError):  # a new run moves the old logs aside
            if self._shown is None or file.stat().st_size != self._shown.size:
                await self.show()


def summary(shown: Tail) -> str:
    """
    Example:
        the newest 1,000 of 20,312 lines (older ones are in the file)
    """
    if not shown.num_found:
        return "No line matches." if shown.size else "The log is empty."
    more = f"the newest {len(shown.lines):,} of " if shown.num_found > len(shown.lines) else ""
    begin = "" if shown.is_whole else " (older ones are in the file)"
    return f"{more}{counted(shown.num_found, 'line')}{begin}"
