"""The list of the viewer: a line for each rollout, and a summary of what is listed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from trireme.base.safe_text import clean, decimal
from trireme.tools.rollout_filters import Filter
from trireme.tools.rollouts import DROPPED, BatchFile, ResultsFile, Row

MOST_LINES = 2000  # most lines of the table, as Textual measures each cell
MARKS = {False: "▲", True: "▼"}


def key_of(row: Row) -> tuple[str, str, int]:
    """Return environment, example and rollout: the same rollout at another step has the same key."""
    return row.env, row.example, row.rollout


ROLLOUTS = {
    **{"example": "example", "rollout": "#", "reward": "reward", "advantage": "adv", "tokens": "tokens"},
    **{"turns": "turns", "stop": "end", "last_message": "last message"},
}
"""Fields of a row with their headings."""
LARGEST_FIRST = {"advantage", "tokens", "turns"}
"""Columns whose largest values are what a user who sorts by them looks for."""


def columns_for(rows: Sequence[Row]) -> dict[str, str]:
    """Leave out environments if there is only one, and advantages if there are none."""
    columns = dict(ROLLOUTS)
    if all(row.advantage is None for row in rows):
        columns.pop("advantage", None)
    return {"env": "env"} | columns if len({row.env for row in rows}) > 1 else columns


def cell(row: Row, name: str) -> Text:
    """Show one value of a row: numbers on the right, green if they are good and red if they are bad."""
    if name == "stop":
        style = "red" if row.error else "yellow" if row.truncated or row.flaws else "bright_black"
        ending = row.stop or ("truncated" if row.truncated else "")
        return Text("failed" if row.error and row.stop != DROPPED else ending, style=style)
    if name == "last_message":
        return Text(row.error or row.last_message or row.question, style="red" if row.error else "")
    value = getattr(row, name)
    if isinstance(value, str):
        return Text(clean(value), justify="right" if name == "example" else "left")
    if isinstance(value, int):
        return Text(str(value), justify="right")
    if name == "advantage":
        return Text(decimal(value, 2), style="" if not value else "green" if value > 0 else "red", justify="right")
    return Text(decimal(value), style=reward_style(value) if name == "reward" else "", justify="right")


def reward_style(reward: float | None) -> str:
    if reward is None:
        return "bright_black"
    return "green" if reward >= 0.999 else "red" if reward <= 0.001 else "yellow"


def in_order(rows: Sequence[Row], name: str, *, backwards: bool) -> list[Row]:
    """Sort rows by a column. A row without a value comes last, in either direction."""

    def order(row: Row) -> Any:
        if name in ("example", "env"):  # "10" after "9", names after numbers, dropped rollouts at the end
            example = row.example
            is_number = example.isascii() and example.isdigit() and len(example) < 18
            natural = (0, int(example), "") if is_number else (1, 0, example)
            return row.stop == DROPPED, row.env, natural, row.rollout
        return row.error or row.stop if name == "stop" else getattr(row, name)

    missing = [row for row in rows if order(row) is None]
    return sorted((row for row in rows if order(row) is not None), key=order, reverse=backwards) + missing


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
        self.listed: Sequence[Row] = ()
        self._content: tuple[Any, ...] = ()

    def show(self, rows: Sequence[Row], *, sorted_by: str, backwards: bool) -> None:
        columns, listed = columns_for(rows), rows[:MOST_LINES]
        content = listed, columns, sorted_by, backwards
        if content == self._content:
            return  # an update would scroll the table back

        self._content, self.listed = content, listed
        self.clear(columns=True)
        for name, heading in columns.items():
            self.add_column(Text(f"{heading}{MARKS[backwards] if name == sorted_by else ''}"), key=name)
        for row in listed:
            self.add_row(*(cell(row, name) for name in columns))

    @property
    def current(self) -> Row | None:
        return self.listed[self.cursor_row] if 0 <= self.cursor_row < len(self.listed) else None


def summary(opened: ResultsFile | BatchFile, rows: Sequence[Row], chosen: Filter) -> Text:
    """Return a line on what is listed: how many rollouts, their rewards, and what is wrong with their file."""
    if opened.trouble:
        return Text(clean(opened.trouble), style="red")

    rewards = [row.reward for row in rows if row.reward is not None]
    parts = [f"{len(rows)} of {len(opened.rows)} rollouts" if chosen.line else f"{len(rows)} rollouts"]
    if len(rows) > MOST_LINES:
        parts.append(f"the first {MOST_LINES} are listed")
    if rewards:
        parts.append(f"reward {decimal(fmean(rewards))} ±{decimal(pstdev(rewards), 2)}")

    # A dropped rollout has an error too, and counts once.
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
