"""The logs of a run as text: their newest lines, those with certain words, those that tell of trouble."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trireme.base.paths import RunPaths

ENDING = ".stdout"
ORDER = ("orchestrator", "trainer", "inference", "sft")
TAIL_BYTES = 512 * 1024  # read without a filter
SEARCH_BYTES = 16 * 1024 * 1024  # searched, of the file's end
MOST_LINES = 1000
LONGEST = 2000  # characters of a line
UNSEEN = "\N{REPLACEMENT CHARACTER}"

Level = Literal["all", "trouble", "errors"]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")
_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL|Traceback|[A-Za-z]*(Error|Exception))\b")
_MARKS = re.compile(rb"ERROR|CRITICAL|FATAL|Traceback|Error|Exception|WARN|Warning")
_WARNING = re.compile(r"\b(WARNING|WARN|[A-Za-z]*Warning)\b")


@dataclass(frozen=True)
class Tail:
    """What is shown of a log."""

    lines: list[str]
    num_found: int  # lines that were wanted, of those that were read
    is_whole: bool  # nothing before them was left unread
    size: int


def log_files(run: Path) -> dict[str, Path]:
    """By process; those of the rooms first."""
    try:
        found = {file.name.removesuffix(ENDING): file for file in RunPaths(run).logs.glob(f"*{ENDING}")}
    except OSError:
        return {}
    return dict(sorted(found.items(), key=lambda item: (_place(item[0]), item[0])))


def _place(name: str) -> int:
    return next((place for place, room in enumerate(ORDER) if name.startswith(room)), len(ORDER))


def tail(file: Path, *, words: str = "", level: Level = "all", most: int = MOST_LINES) -> Tail:
    """The newest lines with all the words in them. A file that cannot be read has none."""
    is_filtered = bool(words.strip()) or level != "all"
    try:
        with open(file, "rb") as log:
            size = log.seek(0, 2)
            begin = max(0, size - (SEARCH_BYTES if is_filtered else TAIL_BYTES))
            log.seek(begin)
            data = log.read(size - begin)
    except OSError:
        return Tail([], 0, True, 0)
    if begin:
        data = data.partition(b"\n")[2]  # what is left of a line that begins before
    raw = data.removesuffix(b"\n").split(b"\n") if data else []
    if level != "all":
        raw = [line for line in raw if _MARKS.search(line)]  # in a hundredth of the time that the rest takes per line
    lines = [clean(line.decode(errors="replace")) for line in raw]
    wanted = [line for line in lines if _is_wanted(line, words.lower().split(), level)] if is_filtered else lines
    return Tail(wanted[-most:], len(wanted), begin == 0, size)


def clean(line: str) -> str:
    """Without colours; of a progress bar that was drawn over itself, the last state; no control characters."""
    line = _ANSI.sub("", line).rstrip("\r").rpartition("\r")[2]
    if not line.isprintable():
        line = "".join(character if character.isprintable() or character == "\t" else UNSEEN for character in line)
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} … ({len(line) - LONGEST} characters more)"


def _is_wanted(line: str, words: list[str], level: Level) -> bool:
    if level == "errors" and kind_of(line) != "bad":
        return False
    if level == "trouble" and not kind_of(line):
        return False
    lower = line.lower() if words else ""
    return all(word in lower for word in words)


def kind_of(line: str) -> Literal["", "warn", "bad"]:
    if _ERROR.search(line):
        return "bad"
    return "warn" if _WARNING.search(line) else ""


def to_html(lines: list[str], words: str = "") -> str:
    """Nothing that a process wrote is taken for markup."""
    return "\n".join(_line(line, words.split()) for line in lines)


def _line(line: str, words: list[str]) -> str:
    text = _marked(line, words)
    kind = kind_of(line)
    return f'<span class="{kind}">{text}</span>' if kind else text


def _marked(line: str, words: list[str]) -> str:
    if not words:
        return html.escape(line)
    pattern = re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)), re.IGNORECASE)
    parts, at = [], 0
    for match in pattern.finditer(line):
        parts += [html.escape(line[at : match.start()]), f"<mark>{html.escape(match[0])}</mark>"]
        at = match.end()
    return "".join([*parts, html.escape(line[at:])])
