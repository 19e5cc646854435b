"""The list of the viewer: a line for each rollout or for each example, and a summary of what is listed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev
from typing import Any, ClassVar

import msgspec
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from trireme.base.safe_text import clean, decimal
from trireme.tools.rollout_filters import Filter
from trireme.tools.rollouts import DROPPED, BatchFile, ResultsFile, Row

MOST_LINES = 2000  # of the table; Textual measures each cell of it
MARKS = {False: "▲", True: "▼"}


class ExampleRow(msgspec.Struct):
    """The rollouts of one example as a line."""

    env: str
    example: str
    count: int
    question: str
    mean: float | None = None  # of the rewards; None if there is none
    std: float | None = None
    low: float | None = None
    high: float | None = None
    rollout: int = -1


Line = Row | ExampleRow


def key_of(line: Line) -> tuple[str, str, int]:
    """Return environment, example and rollout: the same rollout at another step has the same key."""
    return line.env, line.example, line.rollout


def by_example(rows: Iterable[Row]) -> list[ExampleRow]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.env, row.example), []).append(row)
    lines = []
    for (env, example), group in groups.items():
        line = ExampleRow(env, example, len(group), next((row.question for row in group if row.question), ""))
        if rewards := [row.reward for row in group if row.reward is not None]:
            line.mean, line.std = fmean(rewards), pstdev(rewards)
            line.low, line.high = min(rewards), max(rewards)
        lines.append(line)
    return lines


ROLLOUTS = {
    **{"example": "example", "rollout": "#", "reward": "reward", "advantage": "adv", "tokens": "tokens"},
    **{"turns": "turns", "stop": "end", "last_message": "last message"},
}
EXAMPLES = {
    **{"example": "example", "count": "n", "mean": "mean", "std": "std", "low": "lowest", "high": "highest"},
    "question": "question",
}
"""Fields of a line with their headings."""
LARGEST_FIRST = {"advantage", "tokens", "turns", "count", "std"}
"""Columns whose largest values are what a user who sorts by them looks for."""


def columns_for(rows: Sequence[Row], *, by_example: bool) -> dict[str, str]:
    """Leave out environments if there is only one, and advantages if there are none."""
    columns = dict(EXAMPLES if by_example else ROLLOUTS)
    if all(row.advantage is None for row in rows):
        columns.pop("advantage", None)
    return {"env": "env"} | columns if len({row.env for row in rows}) > 1 else columns


def cell(line: Any, name: str) -> Text:
    """Show one value of a line: numbers on the right, green if they are good and red if they are bad."""
    if name == "stop":
        style = "red" if line.error else "yellow" if line.truncated or line.flaws else "bright_black"
        ending = line.stop or ("truncated" if line.truncated else "")
        return Text("failed" if line.error and line.stop != DROPPED else ending, style=style)
    if name == "last_message":
        return Text(line.error or line.last_message or line.question, style="red" if line.error else "")
    value = getattr(line, name)
    if isinstance(value, str):
        return Text(clean(value), justify="right" if name == "example" else "left")
    if isinstance(value, int):
        return Text(str(value), justify="right")
    if name == "advantage":
        return Text(decimal(value, 2), style="" if not value else "green" if value > 0 else "red", justify="right")
    return Text(decimal(value), style=reward_style(value) if name in ("reward", "mean") else "", justify="right")


def reward_style(reward: float | None) -> str:
    if reward is None:
        return "bright_black"
    return "green" if reward >= 0.999 else "red" if reward <= 0.001 else "yellow"


def in_order(lines: Sequence[Any], name: str, *, backwards: bool) -> list[Any]:
    """Sort lines by a column. A line without a value comes last, in either direction."""

    def order(line: Any) -> Any:
        if name in ("example", "env"):  # "10" after "9", names after numbers, dropped rollouts at the end
            example = line.example
            is_number = example.isascii() and example.isdigit() and len(example) < 18
            natural = (0, int(example), "") if is_number else (1, 0, example)
            return getattr(line, "stop", "") == DROPPED, line.env, natural, key_of(line)[2]
        return line.error or line.stop if name == "stop" else getattr(line, name)

    missing = [line for line in lines if order(line) is None]
    return sorted((line for line in lines if order(line) is not None), key=order, reverse=backwards) + missing


class RolloutTable(DataTable[Text]):
    """A table whose cells are always `Text`: a string would be taken for markup."""

    DEFAULT_CSS = "RolloutTable { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    def __init__(self, **options: Any) -> None:
        super().__init__(cursor_type="row", **options)
        self.lines: Sequence[Line] = ()
        self._content: tuple[Any, ...] = ()

    def show(self, lines: Sequence[Line], columns: dict[str, str], *, sorted_by: str, backwards: bool) -> None:
        content = lines[:MOST_LINES], columns, sorted_by, backwards
        if content == self._content:
            return  # an update would scroll the table back
        self._content, self.lines = content, lines[:MOST_LINES]
        self.clear(columns=True)
        for name, heading in columns.items():
            self.add_column(Text(f"{heading}{MARKS[backwards] if name == sorted_by else ''}"), key=name)
        for line in self.lines:
            self.add_row(*(cell(line, name) for name in columns))

    @property
    def current(self) -> Line | None:
        return self.lines[self.cursor_row] if 0 <= self.cursor_row < len(self.lines) else None


def summary(opened: ResultsFile | BatchFile, rows: Sequence[Row], chosen: Filter, num_lines: int) -> Text:
    """Return a line on what is listed: how many rollouts, their rewards, and what is wrong with their file."""
    if opened.trouble:
        return Text(clean(opened.trouble), style="red")
    rewards = [row.reward for row in rows if row.reward is not None]
    parts = [f"{len(rows)} of {len(opened.rows)} rollouts" if chosen.line else f"{len(rows)} rollouts"]
    if num_lines > MOST_LINES:
        parts.append(f"first {MOST_LINES} of {num_lines} lines")
    if rewards:
        parts.append(f"reward {decimal(fmean(rewards))} ±{decimal(pstdev(rewards), 2)}")
    counts = {"truncated": sum(row.truncated for row in rows), "dropped": sum(row.stop == DROPPED for row in rows)}
    counts["failed"] = sum(bool(row.error) for row in rows) - counts["dropped"]
    parts += [f"{count} {name}" for name, count in counts.items() if count]
    text = Text(" · ".join(parts))
    if opened.damaged:
        lines = ", ".join(map(str, opened.damaged[:3])) + ("…" if len(opened.damaged) > 3 else "")
        text.append(f" · {len(opened.damaged)} damaged (line {lines})", style="red")
    if chosen.line:
        text.append(f" · / {clean(chosen.line)}", style="cyan")
    return text
