"""The list of the viewer: a line for each rollout or for each example, and a summary of what is listed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, pstdev
from typing import Any, ClassVar, NamedTuple

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

    @property
    def key(self) -> tuple[str, str, int]:
        return self.env, self.example, -1


Line = Row | ExampleRow


def key_of(line: Line) -> tuple[str, str, int]:
    """Return environment, example and rollout: the same rollout at another step has the same key."""
    return line.key if isinstance(line, ExampleRow) else (line.env, line.example, line.rollout)


def by_example(rows: Iterable[Row]) -> list[ExampleRow]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.env, row.example), []).append(row)
    lines = []
    for (env, example), group in groups.items():
        rewards = [row.reward for row in group if row.reward is not None]
        line = ExampleRow(env, example, len(group), next((row.question for row in group if row.question), ""))
        if rewards:
            line.mean, line.std = fmean(rewards), pstdev(rewards)
            line.low, line.high = min(rewards), max(rewards)
        lines.append(line)
    return lines


def reward_style(reward: float | None) -> str:
    if reward is None:
        return "bright_black"
    return "green" if reward >= 0.999 else "red" if reward <= 0.001 else "yellow"


def _number_style(value: float | None) -> str:
    return "" if not value else "green" if value > 0 else "red"


def _ending(row: Row) -> Text:
    style = "red" if row.error else "yellow" if row.truncated or row.flaws else "bright_black"
    ending = row.stop or ("truncated" if row.truncated else "")
    return Text("failed" if row.error and row.stop != DROPPED else ending, style=style)


def _natural(name: str) -> tuple[int, int, str]:
    """Sort "10" after "9", and names after numbers."""
    return (0, int(name), "") if name.isascii() and name.isdigit() and len(name) < 18 else (1, 0, name)


class Column(NamedTuple):
    """One value of a line: how it is shown, and by what the table is sorted if it is sorted by this column."""

    name: str
    heading: str
    show: Callable[[Any], Text]
    order: Callable[[Any], Any]
    is_descending: bool = False  # when the user first sorts by it: what is usually looked for comes first


def _count(name: str, heading: str) -> Column:
    return Column(
        name,
        heading,
        lambda line: Text(str(getattr(line, name)), justify="right"),
        lambda line: getattr(line, name),
        is_descending=name != "rollout",
    )


def _decimal(
    name: str, heading: str, style: Callable[[float | None], str] = lambda value: "", digits: int = 3
) -> Column:
    def show(line: Any) -> Text:
        value = getattr(line, name)
        return Text(decimal(value, digits), style=style(value), justify="right")

    return Column(name, heading, show, lambda line: getattr(line, name), is_descending=name in ("std", "advantage"))


ENV = Column("env", "env", lambda line: Text(clean(line.env)), lambda line: (line.env, _natural(line.example)))
EXAMPLE = Column(
    "example",
    "example",
    lambda line: Text(clean(line.example), justify="right"),
    lambda line: (getattr(line, "stop", "") == DROPPED, line.env, _natural(line.example), key_of(line)[2]),
)
ADVANTAGE = _decimal("advantage", "adv", _number_style, digits=2)
ROLLOUTS = (
    *(EXAMPLE, _count("rollout", "#"), _decimal("reward", "reward", reward_style), ADVANTAGE),
    *(_count("tokens", "tokens"), _count("turns", "turns")),
    Column("stop", "end", _ending, lambda row: row.error or row.stop),
    Column(
        "said",
        "last words",
        lambda row: Text(row.error or row.said or row.question, style="red" if row.error else ""),
        lambda row: row.said,
    ),
)
EXAMPLES = (
    *(EXAMPLE, _count("count", "n"), _decimal("mean", "mean", reward_style), _decimal("std", "std")),
    *(_decimal("low", "lowest"), _decimal("high", "highest")),
    Column("question", "question", lambda line: Text(line.question), lambda line: line.question),
)


def columns_for(rows: Sequence[Row], *, by_example: bool) -> list[Column]:
    """Leave out environments where there is one, and advantages where there are none."""
    columns = [*(EXAMPLES if by_example else ROLLOUTS)]
    if all(row.advantage is None for row in rows) and not by_example:
        columns.remove(ADVANTAGE)
    return [ENV, *columns] if len({row.env for row in rows}) > 1 else columns


def in_order(lines: Iterable[Line], column: Column, *, backwards: bool) -> list[Any]:
    """Sort lines. A line without a value comes last, in either direction."""
    lines = list(lines)
    missing = [line for line in lines if column.order(line) is None]
    there = [line for line in lines if column.order(line) is not None]
    return sorted(there, key=column.order, reverse=backwards) + missing


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

    def show(self, lines: Sequence[Line], columns: Sequence[Column], *, sorted_by: str, backwards: bool) -> None:
        content = lines[:MOST_LINES], columns, sorted_by, backwards
        if content == self._content:
            return  # an update would scroll the table back
        self._content, self.lines = content, lines[:MOST_LINES]
        self.clear(columns=True)
        for column in columns:
            mark = MARKS[backwards] if column.name == sorted_by else ""
            self.add_column(Text(f"{column.heading}{mark}"), key=column.name)
        for line in self.lines:
            self.add_row(*(column.show(line) for column in columns))

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
        parts.append(f"{decimal(min(rewards), 2)} {histogram(rewards)} {decimal(max(rewards), 2)}")
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


def histogram(values: Sequence[float], width: int = 10) -> str:
    """Draw how many values lie in each of `width` equal parts from the lowest to the highest.

    Example:
        histogram([0, 0, 0, 0.5, 1], width=3)  # "█▃▃"
    """
    low, span = min(values), (max(values) - min(values)) or 1.0
    counts = [0] * width
    for value in values:
        counts[min(width - 1, int(width * (value - low) / span))] += 1
    return "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * count / max(counts))] for count in counts)
