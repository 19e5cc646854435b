"""The viewer: a tree of runs and evaluations, a list of rollouts, and one rollout to read.

On a narrow terminal there is one of the three at a time, enter goes on to the next, escape back. Files are looked for
and read in threads, so that the keys answer at once; what comes of it is handed over to the main thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.events import DescendantFocus
from textual.screen import Screen
from textual.widgets import Footer, Input, Static, Tree
from textual.worker import get_current_worker

from trireme.base.errors import ConfigError
from trireme.tools.rollout_filters import Filter, parse_filter
from trireme.tools.rollouts import BatchFile, Record, ResultsFile, Row, clean, open_rollouts
from trireme.tools.tokenizer import Decode, find_decoder
from trireme.tools.viewer.found import Home, Source, find, neighbours
from trireme.tools.viewer.headline import figures
from trireme.tools.viewer.help import Help
from trireme.tools.viewer.listing import Listing, columns_for
from trireme.tools.viewer.reading import Reading
from trireme.tools.viewer.rewards import Rewards
from trireme.tools.viewer.rows import (
    EXAMPLE_SORTS,
    SORTS,
    ExampleRow,
    as_json,
    by_example,
    examples_in_order,
    in_order,
    key_of,
)
from trireme.tools.viewer.shelves import Shelves

FOLLOW_S = 2.0
PANES = ("shelves", "listing", "reading")
BACKWARDS_FIRST = {"tokens", "turns", "count", "std", "advantage"}
"""What one wants to see the most of first; of rewards the least: that is where something is wrong."""

Opened = ResultsFile | BatchFile
Lines = list[Row] | list[ExampleRow]


class EvalView(App[None]):
    """`folders` are looked through for runs and evaluations; a file of results may be one of them."""

    TITLE = "trireme eval-view"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide"), (170, "-widest")]
    CSS_PATH = "app.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "go_back", "back"),
        Binding("slash", "filter", "filter"),
        Binding("s", "sort", "sort"),
        Binding("S", "backwards", "reverse", show=False),
        Binding("g", "group", "examples"),
        Binding("n", "step_rollout(1)", "next", show=False),
        Binding("p", "step_rollout(-1)", "previous", show=False),
        Binding("left_square_bracket", "step_source(-1)", "step before", show=False),
        Binding("right_square_bracket", "step_source(1)", "step after", show=False),
        Binding("t", "tokens", "tokens"),
        Binding("z", "zoom", "zoom"),
        Binding("r", "reload", "reload"),
        Binding("f", "follow", "follow", show=False),
        Binding("y", "copy", "copy", show=False),
        Binding("question_mark", "help", "keys"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__()
        self.folders = list(folders)
        self.homes: list[Home] = []
        self.source: Source | None = None
        self.opened: Opened | None = None
        self.filter = Filter()
        self.sorted_by, self.backwards, self.groups = "example", False, False
        self.following = False
        self._zoomed = False
        self._rewards = Rewards()
        self._decoders: dict[Path, Decode | None] = {}
        self._wanted: tuple[str, str, int] | None = None  # env, example and rollout to stand on when it appears
        self._read_now: tuple[Opened | None, Row | ExampleRow | None] = (None, None)
        self._has_stepped = False  # to the source beside: nothing may hide the rollout that one looks at
        self._has_looked = False
        self.num_worker_changes = 0  # tells whether anything has gone on behind the screen

    # what is there

    def compose(self) -> ComposeResult:
        yield Static(id="where", markup=False)
        with Horizontal(id="panes"):
            yield Shelves(self._rewards, id="shelves")
            with Container(id="work"):
                with Vertical(id="list"):
                    yield Static(id="figures", markup=False)
                    yield Listing(id="listing")
                    yield Input(placeholder='words, "a phrase", reward<0.5, is:truncated', id="filter")
                with Vertical(id="read"):
                    yield Static(id="told", markup=False)
                    yield Reading(id="reading")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self._stand_at("shelves")
        self.set_interval(FOLLOW_S, self._look_again_if_following)
        self.action_reload()

    @property
    def main(self) -> Screen[Any]:
        """Not the help that may lie over it."""
        return self.screen_stack[0]

    @property
    def shelves(self) -> Shelves:
        return self.main.query_one(Shelves)

    @property
    def listing(self) -> Listing:
        return self.main.query_one(Listing)

    @property
    def reading(self) -> Reading:
        return self.main.query_one(Reading)

    def _say(self, name: str, text: str | Text) -> None:
        self.main.query_one(f"#{name}", Static).update(text)

    # looking for files

    def action_reload(self) -> None:
        self._look()
        if self.opened is not None:
            self._read(self.opened)

    def _look_again_if_following(self) -> None:
        if self.following:
            self.action_reload()

    @work(thread=True, exclusive=True, group="look")
    def _look(self) -> None:
        worker = get_current_worker()
        homes = find(self.folders)
        self._hand_over(self._found, homes)
        for changed in self._rewards.look(homes, is_wanted=lambda: not worker.is_cancelled):
            if changed:
                self._hand_over(self.shelves.name_all)

    def _hand_over(self, function: Callable[..., Any], *values: Any) -> None:
        """From a thread to the screen, as long as there is one."""
        with suppress(RuntimeError):  # the viewer has been left
            self.call_from_thread(lambda: function(*values) if self.screen_stack else None)

    def on_worker_state_changed(self) -> None:
        self.num_worker_changes += 1

    def _found(self, homes: list[Home]) -> None:
        self.homes = homes
        self.shelves.show(homes)
        if self._has_looked:
            return
        self._has_looked = bool(homes)
        if not homes:
            places = ", ".join(map(str, self.folders))
            self._say("where", f"nothing to look at below {places} yet - r looks again")
            return
        self._say("where", "enter opens what the cursor is on, ? shows all keys")
        sources = [source for home in homes for shelf in home.shelves.values() for source in shelf.sources]
        if len(sources) == 1:
            self.shelves.go_to(sources[0])

    # opening one

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[Source | None]) -> None:
        if event.node.data is not None and event.node.data != self.source:
            self.open(event.node.data)

    def on_tree_node_selected(self, event: Tree.NodeSelected[Source | None]) -> None:
        if event.node.data is not None:
            self._stand_at("listing")

    def open(self, source: Source) -> None:
        if self.source is None or self.source.kind != source.kind:
            self.groups, self.sorted_by, self.backwards = False, "example", False
        self.source = source
        self.opened = open_rollouts(source.path)
        self._say_where()
        self._read(self.opened)

    @work(thread=True, exclusive=True, group="read")
    def _read(self, opened: Opened) -> None:
        worker = get_current_worker()
        more = True
        while more and not worker.is_cancelled:
            more = opened.read_more()
            self._hand_over(self._select)

    # what is shown of it

    @work(thread=True, exclusive=True, group="select")
    def _select(self) -> None:
        """Filters and orders; reads every conversation only where words are looked for."""
        worker, opened, chosen = get_current_worker(), self.opened, self.filter
        if opened is None:
            return
        passed: list[Row] = []
        for row in list(opened.rows):
            if worker.is_cancelled:
                return
            if chosen.matches(row, opened.record):
                passed.append(row)
        lines: Lines
        if self.groups:
            lines = examples_in_order(by_example(passed), self.sorted_by, backwards=self.backwards)
        else:
            lines = in_order(passed, self.sorted_by, backwards=self.backwards)
        if not worker.is_cancelled:
            self._hand_over(self._show, opened, passed, lines)

    def _show(self, opened: Opened, passed: list[Row], lines: Lines) -> None:
        if opened is not self.opened:
            return
        stepped, self._has_stepped = self._has_stepped, False
        if stepped and self.filter.line and self._wanted not in [key_of(line) for line in lines]:
            self._set_filter("")
            return
        columns = columns_for(passed, by_example=self.groups)
        cursor = self._place_of_wanted(lines)
        self.listing.show(lines, columns, sorted_by=self.sorted_by, backwards=self.backwards, cursor=cursor)
        self._say("figures", figures(opened, passed, self.filter))
        self.main.query_one("#figures").set_class(bool(opened.trouble), "trouble")

    def _place_of_wanted(self, lines: Lines) -> int:
        """The row that the cursor was on, in what is shown now; the first where it is not there."""
        if self._wanted is None:
            return 0
        keys = [key_of(line) for line in lines]
        env, example, _ = self._wanted
        if self._wanted in keys:
            return keys.index(self._wanted)
        same = [place for place, key in enumerate(keys) if key[:2] == (env, example)]
        return same[0] if same else 0

    def on_listing_moved(self) -> None:
        row = self.listing.current
        self.main.query_one("#told").remove_class("said")
        if row is not None:
            self._wanted = key_of(row)
        if row is not None and (self.opened, row) == self._read_now:
            return
        self._read_now = self.opened, row
        record = self._record(row)
        step = self.source.version if self.source and self.source.kind == "batch" else None
        self.reading.show(record, step=step, decode=self._decoder() if record and record.samples else None)
        self._say_where()

    def _record(self, line: Row | ExampleRow | None) -> Record | None:
        if line is None or self.opened is None:
            return None
        if isinstance(line, Row):
            return self.opened.record(line)
        rows = [row for row in self.opened.rows if (row.env, row.example) == (line.env, line.example)]
        return self.opened.record(rows[0]) if rows else None

    def _decoder(self) -> Decode | None:
        home = self.source.home if self.source else Path()
        if self._decoders.get(home) is None:
            self._decoders[home] = find_decoder(home)
        return self._decoders[home]

    def _say_where(self) -> None:
        if self.source is None:
            return
        parts = [self._title_of(self.source), self.source.shelf, self.source.label]
        if self.listing.current is not None and self.reading.record is not None:
            row = self.reading.record.row
            parts.append(f"example {row.example}, rollout {row.rollout}")
        text = Text(" › ".join(map(clean, parts)), style="bold")
        if self.following:
            text = Text("● following  ", style="green") + text
        self._say("where", text)

    def _title_of(self, source: Source) -> str:
        titles = (Path(home.title).name for home in self.homes if home.folder == source.home)
        return next(titles, source.home.name)

    # going in and back

    def on_listing_opened(self) -> None:
        line = self.listing.current
        if isinstance(line, ExampleRow):
            self._only(f"example={json.dumps(line.example)}" + (f" env={json.dumps(line.env)}" if line.env else ""))
        else:
            self._stand_at("reading")

    def _only(self, line: str) -> None:
        """The rollouts of one example."""
        self.groups, self.sorted_by, self.backwards = False, "rollout", False
        self._set_filter(line)

    def action_go_back(self) -> None:
        if self.focused is self.main.query_one("#filter"):
            self._close_filter()
        elif self._at == "reading":
            self._stand_at("listing")
        elif self._at == "listing" and self.filter.line:
            self._set_filter("")
        else:
            self._stand_at("shelves")

    @property
    def _at(self) -> str:
        return next((name for name in PANES if self.main.has_class(f"at-{name}")), PANES[0])

    def _stand_at(self, name: str) -> None:
        self._mark(name)
        self.main.query_one(f"#{name}").focus()

    def _mark(self, name: str) -> None:
        for pane in PANES:
            self.main.set_class(pane == name, f"at-{pane}")
        self._show_one()

    def _show_one(self) -> None:
        self.main.set_class(self._zoomed or self.size.width < 100, "one")

    on_resize = _show_one

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        if event.widget.id in PANES:
            self._mark(event.widget.id or "")

    def action_focus_next(self) -> None:
        self._stand_at(PANES[(PANES.index(self._at) + 1) % len(PANES)])

    def action_focus_previous(self) -> None:
        self._stand_at(PANES[(PANES.index(self._at) - 1) % len(PANES)])

    def action_zoom(self) -> None:
        self._zoomed = not self._zoomed
        self._show_one()

    def action_step_rollout(self, by: int) -> None:
        self.listing.action_move(by)

    def action_step_source(self, by: int) -> None:
        """The same example in the evaluation, or batch, before or after."""
        if self.source is None:
            return
        beside = neighbours(self.source, self.homes)
        place = next((n for n, source in enumerate(beside) if source.path == self.source.path), 0) + by
        if not 0 <= place < len(beside):
            self.notify(f"{self.source.label} is the {'first' if by < 0 else 'last'} of {self.source.shelf}")
            return
        self._has_stepped = True
        self.shelves.go_to(beside[place])
        self.open(beside[place])

    # filter and order

    def action_filter(self) -> None:
        box = self.main.query_one("#filter", Input)
        if self._at == "shelves" or (self._at == "reading" and self.main.has_class("one")):
            self._mark("listing")
        box.add_class("open")
        box.value = self.filter.line
        box.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self._set_filter(event.value):
            self._close_filter()

    def _set_filter(self, line: str) -> bool:
        """Returns whether it could be understood."""
        try:
            self.filter = parse_filter(line)
        except ConfigError as error:
            self.notify(str(error), severity="error", markup=False)
            return False
        self._select()
        return True

    def _close_filter(self) -> None:
        self.main.query_one("#filter").remove_class("open")
        self._stand_at("listing")

    def on_listing_heading_pressed(self, event: Listing.HeadingPressed) -> None:
        self._sort(event.name, not self.backwards if event.name == self.sorted_by else event.name in BACKWARDS_FIRST)

    def action_sort(self) -> None:
        names = list(dict.fromkeys(column.name for column in self.listing.columns))
        place = names.index(self.sorted_by) + 1 if self.sorted_by in names else 0
        name = names[place % len(names)]
        self._sort(name, name in BACKWARDS_FIRST)

    def action_backwards(self) -> None:
        self._sort(self.sorted_by, not self.backwards)

    def _sort(self, name: str, backwards: bool) -> None:
        self.sorted_by, self.backwards = name, backwards
        self._select()

    def action_group(self) -> None:
        self.groups = not self.groups
        if self.sorted_by not in (EXAMPLE_SORTS if self.groups else SORTS):
            self.sorted_by, self.backwards = "example", False
        self._select()

    def action_tokens(self) -> None:
        if self.reading.record is None or not self.reading.num_tokens:
            self.notify("There are no tokens here: files of evaluations hold texts, the journal of training has both.")
            return
        self.reading.toggle_tokens()
        self.main.query_one("#told").set_class(self.reading.shows_tokens, "said")
        self._stand_at("reading")

    def on_reading_told(self, event: Reading.Told) -> None:
        self._say("told", event.text)
        self.main.query_one("#told").add_class("said")

    def action_follow(self) -> None:
        self.following = not self.following
        self._say_where()
        self._look_again_if_following()

    def action_copy(self) -> None:
        if (record := self.reading.record) is None:
            return
        self.copy_to_clipboard(as_json(record))
        self.notify(f"example {clean(record.row.example)}, rollout {record.row.rollout}: copied as JSON", markup=False)

    def action_help(self) -> None:
        self.push_screen(Help())
