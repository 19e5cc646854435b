"""The list of rollouts, or of examples: only the lines on the screen are drawn, so a million are as quick as ten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from trireme.tools.rollouts import DROPPED, Row, decimal
from trireme.tools.viewer.rows import ExampleRow

GAP = 1  # cells between columns
LEAST = 14  # cells of the last column


@dataclass(frozen=True)
class Column:
    """How one value of a row is shown. The last column takes the width that is left."""

    name: str  # of its order in `rows.SORTS`
    heading: str
    width: int
    show: Callable[[Any], str]
    right: bool = True
    style: Callable[[Any], str] = lambda row: ""


def reward_style(reward: float | None) -> str:
    if reward is None:
        return "bright_black"
    return "green" if reward >= 0.999 else "red" if reward <= 0.001 else "yellow"


def advantage_style(advantage: float | None) -> str:
    return "" if not advantage else "green" if advantage > 0 else "red"


def _ending(row: Row) -> str:
    return "failed" if row.error and row.stop != DROPPED else row.stop or ("truncated" if row.truncated else "")


def _words(row: Row) -> str:
    return row.error or row.said or row.question


def _ending_style(row: Row) -> str:
    return "red" if row.error else "yellow" if row.truncated or row.flaws else "bright_black"


EXAMPLE = Column("example", "example", 9, lambda row: row.example)
ENVIRONMENT = Column("example", "env", 12, lambda row: row.env, right=False)
ADVANTAGE = Column(
    "advantage", "adv", 7, lambda row: decimal(row.advantage, 2), style=lambda row: advantage_style(row.advantage)
)
ROLLOUTS = (
    EXAMPLE,
    Column("rollout", "#", 3, lambda row: str(row.rollout)),
    Column("reward", "reward", 7, lambda row: decimal(row.reward), style=lambda row: reward_style(row.reward)),
    Column("tokens", "tokens", 7, lambda row: str(row.tokens)),
    Column("turns", "turns", 6, lambda row: str(row.turns)),
    Column("stop", "end", 10, _ending, right=False, style=_ending_style),
    Column("said", "last words", 0, _words, right=False, style=lambda row: "red" if row.error else ""),
)
EXAMPLES = (
    EXAMPLE,
    Column("count", "n", 3, lambda row: str(row.count)),
    Column("mean", "mean", 7, lambda row: decimal(row.mean), style=lambda row: reward_style(row.mean)),
    Column("std", "std", 7, lambda row: decimal(row.std)),
    Column("low", "lowest", 7, lambda row: decimal(row.low)),
    Column("high", "highest", 8, lambda row: decimal(row.high)),
    Column("question", "question", 0, lambda row: row.question, right=False),
)


def columns_for(rows: Sequence[Row], *, by_example: bool) -> tuple[Column, ...]:
    """Environments where there are several, advantages where there are any."""
    several = len({row.env for row in rows}) > 1
    if by_example:
        return ((ENVIRONMENT,) if several else ()) + EXAMPLES
    has_advantages = any(row.advantage is not None for row in rows)
    head, tail = ROLLOUTS[:3], ROLLOUTS[3:]
    return ((ENVIRONMENT,) if several else ()) + head + ((ADVANTAGE,) if has_advantages else ()) + tail


SPARED = ("turns", "tokens", "rollout", "stop", "advantage")
"""Columns to do without where the last one would have too little room, the first of these first."""


def fitting(columns: tuple[Column, ...], width: int) -> tuple[Column, ...]:
    for name in SPARED:
        if width - sum(column.width + GAP for column in columns) >= LEAST:
            break
        columns = tuple(column for column in columns if column.name != name)
    return columns


class Listing(ScrollView, can_focus=True):
    """One line of headings, then the rows."""

    DEFAULT_CSS = """
    Listing { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "go(0)", "first", show=False),
        Binding("end", "go(-1)", "last", show=False),
        Binding("enter", "open", "open", show=False),
    ]
    cursor: reactive[int] = reactive(0)

    class Moved(Message):
        """The cursor stands on another row, or the rows are others."""

    class Opened(Message):
        """Enter, or a click on the row under the cursor."""

    class HeadingPressed(Message):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows: Sequence[Row | ExampleRow] = ()
        self.columns: tuple[Column, ...] = ROLLOUTS
        self._shown: tuple[Column, ...] = self.columns  # those that there is room for
        self.sorted_by, self.backwards = "", False

    def show(
        self,
        rows: Sequence[Row | ExampleRow],
        columns: tuple[Column, ...],
        *,
        sorted_by: str,
        backwards: bool,
        cursor: int = 0,
    ) -> None:
        self.rows, self.columns = rows, columns
        self.sorted_by, self.backwards = sorted_by, backwards
        self._fit_columns()
        self.virtual_size = Size(self.size.width, len(rows) + 1)
        self.cursor = max(0, min(cursor, len(rows) - 1))
        self._bring_into_view()
        self.refresh()
        self.post_message(self.Moved())

    @property
    def current(self) -> Row | ExampleRow | None:
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def watch_cursor(self) -> None:
        self._bring_into_view()
        self.refresh()
        self.post_message(self.Moved())

    def _bring_into_view(self) -> None:
        """Not under the headings, which stay where they are."""
        top, shown = self.scroll_offset.y, max(1, self.size.height - 1)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False, immediate=True, force=True)
        elif self.cursor >= top + shown:
            self.scroll_to(y=self.cursor - shown + 1, animate=False, immediate=True, force=True)

    def _fit_columns(self) -> None:
        self._shown = fitting(self.columns, self.size.width)

    def on_resize(self) -> None:
        self._fit_columns()
        self.virtual_size = Size(self.size.width, len(self.rows) + 1)
        self._bring_into_view()

    def action_move(self, by: int) -> None:
        self.cursor = max(0, min(len(self.rows) - 1, self.cursor + by))

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - 2))

    def action_go(self, place: int) -> None:
        self.cursor = max(0, place if place >= 0 else len(self.rows) + place)

    def action_open(self) -> None:
        if self.current is not None:
            self.post_message(self.Opened())

    def on_click(self, event: events.Click) -> None:
        if event.y == 0:
            self._press_heading(event.x)
            return
        place = self.scroll_offset.y + event.y - 1
        if place < len(self.rows):
            if place == self.cursor:
                self.post_message(self.Opened())
            self.cursor = place

    def _press_heading(self, x: int) -> None:
        left = 0
        for column, width in zip(self._shown, self._widths(), strict=True):
            left += width + GAP
            if x < left:
                self.post_message(self.HeadingPressed(column.name))
                return

    # drawing

    def _widths(self) -> list[int]:
        fixed = sum(column.width + GAP for column in self._shown)
        return [column.width or max(4, self.size.width - fixed) for column in self._shown]

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        if y == 0:
            return Strip(self._headings(base + Style(bold=True, underline=True))).adjust_cell_length(width, base)
        place = self.scroll_offset.y + y - 1
        if place >= len(self.rows):
            return Strip.blank(width, base)
        if place == self.cursor:
            base += Style(reverse=True) if self.has_focus else Style(bgcolor="#3a3a4a")
        return Strip(self._cells(self.rows[place], base)).adjust_cell_length(width, base)

    def _headings(self, style: Style) -> list[Segment]:
        mark = "▼" if self.backwards else "▲"
        texts = [
            f"{column.heading}{mark if column.name == self.sorted_by and column is not ENVIRONMENT else ''}"
            for column in self._shown
        ]
        return [
            Segment(_fit(text, width, right=column.right) + " " * GAP, style)
            for column, width, text in zip(self._shown, self._widths(), texts, strict=True)
        ]

    def _cells(self, row: Row | ExampleRow, base: Style) -> list[Segment]:
        return [
            Segment(
                _fit(column.show(row), width, right=column.right) + " " * GAP, base + Style.parse(column.style(row))
            )
            for column, width in zip(self._shown, self._widths(), strict=True)
        ]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.rows) + 1


def _fit(text: str, width: int, *, right: bool) -> str:
    """Cut or filled to so many cells; what is cut ends with a sign of it."""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…"
    return " " * (width - length) + text if right else text + " " * (width - length)
