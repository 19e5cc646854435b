"""The panes of the viewer: the tree of runs, the list of rollouts, and the reader of one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import DataTable, RichLog, Tree
from textual.widgets.tree import TreeNode

from trireme.base.safe_text import clean, decimal, shortened
from trireme.journal.message_text import as_text
from trireme.tools.conversation import Block, blocks
from trireme.tools.rollout_filters import Filter
from trireme.tools.rollouts import DROPPED, BatchFile, Record, ResultsFile, Row
from trireme.tools.viewer.sources import TRAINING, Source

TREND = 10  # cells of the sparkline
FEW = 60  # most evaluations of a series that is open from the start
MOST_LINES = 2000  # most lines of the table, as Textual measures each cell
MARKS = {False: "▲", True: "▼"}
ROLLOUTS = {
    **{"example": "example", "rollout": "#", "reward": "reward", "advantage": "adv", "tokens": "tokens"},
    **{"turns": "turns", "stop": "end", "last_message": "last message"},
}
"""Fields of a row with their headings."""
LARGEST_FIRST = {"advantage", "tokens", "turns"}
"""Columns whose largest values are what a user who sorts by them looks for."""
LONGEST = 20_000  # characters of a block, unless all are asked for
ROLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
BAR = "▏"
BLOCK_STYLES = {"reasoning": "italic bright_black", "call": "yellow"}

Key = tuple[Path | str, ...]
"""(run), (run, series) or (run, series, path)."""


# the tree


class RunTree(Tree[Key]):
    """Stays as it is, with its cursor and open branches, when files appear or disappear."""

    DEFAULT_CSS = """
    RunTree { width: 40; padding: 0 1; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("left", "close", "close", show=False),
        Binding("right", "open", "open", show=False),
    ]

    def __init__(self, means: Mapping[Path, float | None], **options: Any) -> None:
        super().__init__("", **options)
        self.show_root = False
        self.guide_depth = 2
        self._means = means
        self._by_key: dict[Key, TreeNode[Key]] = {}
        self._sources: dict[Key, Source] = {}

    def show(self, sources: Sequence[Source], titles: Mapping[Path, str]) -> None:
        if list(self._sources.values()) == list(sources):
            return

        # The tree is built from scratch, so what the user opened is remembered.
        was_open = {key: node.is_expanded for key, node in self._by_key.items()}
        cursor = self.cursor_node.data if self.cursor_node else None
        self.clear()
        self._by_key.clear()

        self._sources = {(one.run, one.series, one.path): one for one in sources}
        for run, of_run in groupby(sources, key=lambda source: source.run):
            top = self.root.add(Text(clean(titles[run]), style="bold"), (run,), expand=was_open.get((run,), True))
            self._by_key[run,] = top
            for series, group in groupby(of_run, key=lambda source: source.series):
                files = list(group)

                # Long series start closed, so that all runs fit on a screen.
                is_open = was_open.get((run, series), series != TRAINING and len(files) <= FEW)
                branch = top.add("", (run, series), expand=is_open)
                self._by_key[run, series] = branch
                for source in files:
                    key = (run, series, source.path)
                    self._by_key[key] = branch.add_leaf("", key)

        # The new nodes have their lines only after the next refresh.
        self.relabel()
        if cursor in self._by_key:
            self.call_after_refresh(self.move_cursor, self._by_key[cursor])

    def relabel(self) -> None:
        """Show the mean rewards of files, and the trends of all series."""
        means: dict[Key, list[float | None]] = {}
        for key, source in self._sources.items():
            mean = self._means.get(source.path)
            means.setdefault(key[:2], []).append(mean)
            label = Text(f"{clean(source.label)}  ")
            if mean is not None:
                label.append(decimal(mean), style=reward_style(mean))
            # Each new label redraws the tree.
            if self._by_key[key].label != label:
                self._by_key[key].set_label(label)
        for series, values in means.items():
            label, trend = Text(f"{clean(str(series[1]))} "), [value for value in values if value is not None]
            if len(trend) > 1:
                label.append(f"{sparkline(trend, TREND)} ", style="cyan")
                label.append(f"{decimal(trend[0])}→{decimal(trend[-1])}", style="bright_black")
            else:
                label.append(str(len(values)), style="bright_black")
            self._by_key[series].set_label(label)

    def source_of(self, node: TreeNode[Key]) -> Source | None:
        return self._sources.get(node.data or ())

    def go_to(self, source: Source) -> None:
        """Move the cursor to a source and open its series."""
        node = self._by_key[source.run, source.series, source.path]
        self._by_key[source.run, source.series].expand()
        self.call_after_refresh(self.move_cursor, node)

    def action_close(self) -> None:
        """Close the branch under the cursor, or else go to the branch that it is in."""
        node = self.cursor_node
        if node and node.is_expanded and node.allow_expand:
            node.collapse()
        elif node and node.parent and node.parent is not self.root:
            self.move_cursor(node.parent)

    def action_open(self) -> None:
        if self.cursor_node and self.cursor_node.allow_expand:
            self.cursor_node.expand()


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw means of equal shares of the values, from lowest to highest."""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (mean - low) / span))] for mean in means)


# the list


def key_of(row: Row) -> tuple[str, str, int]:
    """Return environment, example and rollout: the same rollout at another step has the same key."""
    return row.env, row.example, row.rollout


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


# the reader


class Reader(RichLog):
    """A page of wrapped lines, written again for each rollout and width."""

    DEFAULT_CSS = "Reader { height: 1fr; background: transparent; scrollbar-size-vertical: 1; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "scroll_up", show=False),
        Binding("j", "scroll_down", show=False),
        Binding("space", "page_down", show=False),
        Binding("x", "in_full", "in full", show=False),
    ]

    def __init__(self, **options: Any) -> None:
        super().__init__(wrap=True, auto_scroll=False, min_width=0, **options)
        self.record: Record | None = None
        self._in_full = False

    def show(self, record: Record | None) -> None:
        """Show a rollout from its beginning."""
        self.record, self._in_full = record, False
        self._write_page()
        self.scroll_to(y=0, animate=False, immediate=True, force=True)

    def on_resize(self, event: Resize) -> None:
        self._write_page()

    def _write_page(self) -> None:
        self.clear()
        if self.record is None or not self.scrollable_content_region.width:
            return  # it is written when it gets its size
        width = max(1, self.scrollable_content_region.width - len(BAR))
        for text, colour in page(self.record, longest=None if self._in_full else LONGEST):
            lines = [Text(BAR, style=colour) + line for line in text.wrap(self.app.console, width)]
            self.write(Text("\n").join(lines) if colour else text)

    def action_in_full(self) -> None:
        self._in_full = not self._in_full
        self._write_page()


def page(record: Record, *, longest: int | None) -> Iterator[tuple[Text, str]]:
    """Yield all of a rollout as texts, each with the colour of the bar on its left, or with ""."""
    row = record.row

    # What users look for first: which rollout it is, its reward, and how it ended.
    first = Text.assemble(
        (f"{clean(row.env)} " if row.env else "", "bold"),
        (f"example {clean(row.example)} · rollout {row.rollout} · ", "bold"),
        (f"reward {decimal(row.reward)}", f"bold {reward_style(row.reward)}"),
    )
    if row.advantage is not None:
        first.append(f" · advantage {row.advantage:+.3f}", style="bold")
    yield first, ""
    yield Text(" · ".join(record.facts), style="bright_black"), ""

    if record.metrics:
        metrics = record.metrics.items()
        parts = (x for k, v in metrics for x in ((f"{clean(k)} ", "bright_black"), f"{decimal(v)}   "))
        yield Text.assemble(*parts), ""

    if row.error:
        yield Text.assemble(("failed: ", "bold red"), (row.error, "red")), ""
    if record.answer:
        yield Text.assemble(("answer: ", "bold"), clean(record.answer[:LONGEST])), ""
    yield Text(), ""

    # The conversation is the only part with bars, in the colours of its roles.
    for title, messages in (("prompt", record.prompt), ("completion", record.completion)):
        if messages:
            yield Text(f"━━ {title} ", style="bold bright_black"), ""
        for block in blocks(messages):
            yield from _block(block, longest)

    # The rest has no place above, such as keys that another tool wrote.
    rest = ({"info": record.info} if record.info else {}) | record.more
    if rest:
        yield Text("━━ also ", style="bold bright_black"), ""
    for name, value in rest.items():
        text = clean(shortened(as_text(value), LONGEST))
        yield Text.assemble((f"{clean(name)}: ", "bold bright_black"), (text, "bright_black")), ""


def _block(block: Block, longest: int | None) -> Iterator[tuple[Text, str]]:
    colour = ROLES.get(block.role, "white")
    yield Text(f"▌ {clean(block.heading)}", style=f"bold {colour}"), ""
    text = clean(block.text)
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}\n… {len(text) - longest:,} more characters: x shows them"
    yield Text(text, style=BLOCK_STYLES.get(block.kind, "")), colour
    yield Text(), ""
