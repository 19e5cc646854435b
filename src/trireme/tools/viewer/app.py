"""`trireme eval-view [FOLDER ...]`: a tree of runs and evaluations, a table of rollouts, and a reader of one rollout.

On a narrow terminal one of the three is shown at a time: enter goes to the next, escape back. Files are found, read and
searched in threads, so that keys answer at once; the threads hand their results to the main thread.
"""

from __future__ import annotations

import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.events import DescendantFocus
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static, Tree
from textual.worker import get_current_worker

from trireme.base.errors import ConfigError
from trireme.base.safe_text import clean
from trireme.tools.rollout_filters import SYNTAX, Filter, parse_filter
from trireme.tools.rollouts import BatchFile, ResultsFile, Row, open_rollouts
from trireme.tools.viewer.panes import LARGEST_FIRST, Key, Reader, RolloutTable, RunTree, in_order, key_of, summary
from trireme.tools.viewer.sources import TRAINING, MeanRewards, Source, find_sources, require_folders, run_title

USUAL = ("outputs", "environments")
REDRAW_S = 1.0  # between two results of a long search or a large file


def command(argv: list[str]) -> int:
    """Return 0 when the user leaves the viewer.

    Raises: ConfigError if there is no such folder, or no terminal.
    """
    parser = ArgumentParser(
        prog="trireme eval-view",
        description="Runs and evaluations with their mean rewards, their rollouts, and each one's conversation. The "
        "run may still be training. Writes nothing.",
        epilog="? shows all keys. Exit codes: 0, or 2 if there is nothing at the path.",
    )
    what = f"of a run, one with runs or evaluations below it, or a .jsonl file; by default {' and '.join(USUAL)}"
    parser.add_argument("folders", metavar="FOLDER", type=Path, nargs="*", help=what)
    folders = (
        parser.parse_args(argv).folders or [Path(name) for name in USUAL if Path(name).is_dir()] or [Path(USUAL[0])]
    )

    require_folders(folders)

    # Checked after the folders, so that a wrong path is reported in a script too.
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise ConfigError(
            "The viewer needs a terminal, and standard input or output is none. Expected both to be one. Run it in a "
            "terminal; `trireme dashboard` shows the same in a browser, and `trireme rollouts` writes files."
        )

    app = EvalView(folders)
    app.run()
    return app.return_code or 0


class EvalView(App[None]):
    """Shows what lies in `folders`: runs, evaluations, or single files of results."""

    TITLE = "trireme eval-view"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide"), (170, "-widest")]
    CSS_PATH = "app.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "go_back", "back"),
        Binding("slash", "filter", "filter"),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "reverse", show=False),
        Binding("n", "step_rollout(1)", "next", show=False),
        Binding("p", "step_rollout(-1)", "previous", show=False),
        Binding("left_square_bracket", "step_source(-1)", "step before", show=False),
        Binding("right_square_bracket", "step_source(1)", "step after", show=False),
        Binding("z", "zoom", "zoom"),
        Binding("r", "reload", "reload"),
        Binding("question_mark", "help", "keys"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__()
        self.folders = list(folders)
        self.sources: list[Source] = []
        self.source: Source | None = None
        self.opened: ResultsFile | BatchFile | None = None
        self.rows: list[Row] = []  # those that pass the filter
        self.filter = Filter()
        self.sorted_by, self.backwards = "example", False
        self.pane = "tree"  # the one that is shown if there is room for only one
        self._reading = threading.Lock()  # a worker that was replaced may still be reading
        self._means = MeanRewards()
        self._wanted: tuple[str, str, int] | None = None  # place of the cursor: env, example, rollout
        self._shown: tuple[Any, Any] = (None, None)  # file and row that the reader shows
        self._has_stepped = self._has_looked = False

    def compose(self) -> ComposeResult:
        self.where = Static(id="where", markup=False)
        self.run_tree = RunTree(self._means.known, id="tree")
        self.figures = Static(id="figures", markup=False)
        self.table = RolloutTable(id="table")
        self.filter_line = Input(placeholder='words, "a phrase", reward<0.5, is:truncated', id="filter")
        self.reader = Reader(id="reader")
        self.panes = {"tree": self.run_tree, "table": self.table, "reader": self.reader}
        yield self.where
        with Horizontal(id="panes") as self.all_panes:
            yield self.run_tree
            with Container(id="work"):
                yield Vertical(self.figures, self.table, self.filter_line, id="list")
                yield Vertical(self.reader, id="read")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self._go_to_pane("tree")
        self.action_reload()

    # files

    def action_reload(self) -> None:
        self._find_sources()
        self._read_rollouts()

    @work(thread=True, exclusive=True, group="find")
    def _find_sources(self) -> None:
        worker = get_current_worker()
        sources = find_sources(self.folders)

        # The tree shows names at once. Mean rewards follow, as files are read for them.
        self._hand_over(self._show_sources, sources)
        redraw_at = time.monotonic() + REDRAW_S
        for _ in self._means.update(sources):
            if worker.is_cancelled:
                return
            if time.monotonic() > redraw_at:
                self._hand_over(self.run_tree.relabel)
                redraw_at = time.monotonic() + REDRAW_S
        self._hand_over(self.run_tree.relabel)

    def _hand_over(self, function: Callable[..., Any], *values: Any) -> None:
        """Call a function in the main thread, unless the viewer has been left."""
        with suppress(RuntimeError):
            self.call_from_thread(lambda: function(*values) if self.screen_stack else None)

    def _show_sources(self, sources: list[Source]) -> None:
        self.sources = sources
        titles = {source.run: run_title(source.run, self.folders) for source in sources}
        self.run_tree.show(sources, titles)

        # A later look must not replace the line on top, which shows the open rollout by then.
        if self._has_looked:
            return
        self._has_looked = bool(sources)
        if not sources:
            folders = ", ".join(map(str, self.folders))
            self.where.update(clean(f"nothing to look at below {folders} yet - r looks again"))
            return
        self.where.update("enter opens what the cursor is on, ? shows all keys")
        if len(sources) == 1:
            self.run_tree.go_to(sources[0])

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[Key]) -> None:
        source = self.run_tree.source_of(event.node)
        if source is not None and source != self.source:
            self._open(source)

    def on_tree_node_selected(self, event: Tree.NodeSelected[Key]) -> None:
        if self.run_tree.source_of(event.node):
            self._go_to_pane("table")

    def _open(self, source: Source) -> None:
        # Only rollouts of training have an advantage, so an order by it cannot be kept.
        if self.source is None or (self.source.series == TRAINING) != (source.series == TRAINING):
            self.sorted_by, self.backwards = "example", False

        self.source, self.opened = source, open_rollouts(source.path)
        self._write_where()
        self._read_rollouts()

    @work(thread=True, exclusive=True, group="read")
    def _read_rollouts(self) -> None:
        """Read what is new in the open file, and pick the rollouts that pass the filter.

        Conversations are read only if the filter looks for words.
        """
        worker, opened, chosen = get_current_worker(), self.opened, self.filter
        if opened is None:
            return

        rows: list[Row] | None = None
        has_more, redraw_at = True, 0.0
        while has_more:
            # A worker that was replaced may still be reading the same file.
            with self._reading:
                if worker.is_cancelled:
                    return
                has_more = opened.read_more()
            if rows is not opened.rows:  # the first part, or the file was replaced
                rows, num_seen, passed = opened.rows, 0, []

            # A search for words reads each conversation from disk, so the next filter must be able to end it early.
            for row in rows[num_seen:]:
                if worker.is_cancelled:
                    return
                if chosen.matches(row, opened.record):
                    passed.append(row)
            num_seen = len(rows)

            # A long search shows what it has found so far.
            if not has_more or time.monotonic() > redraw_at:
                self._hand_over(self._take_rows, opened, list(passed))
                redraw_at = time.monotonic() + REDRAW_S

    def _take_rows(self, opened: ResultsFile | BatchFile, rows: list[Row]) -> None:
        # The user may have opened another file meanwhile.
        if opened is not self.opened:
            return

        self.rows = rows
        has_stepped, self._has_stepped = self._has_stepped, False
        examples = {(row.env, row.example) for row in rows}
        if has_stepped and self.filter.line and self._wanted and self._wanted[:2] not in examples:
            self._set_filter("")  # a filter must not hide the example that the user follows through the versions
        else:
            self._show_table()

    # the table

    def _show_table(self) -> None:
        assert self.opened is not None
        wanted, rows = self._wanted, in_order(self.rows, self.sorted_by, backwards=self.backwards)
        self.table.show(rows, sorted_by=self.sorted_by, backwards=self.backwards)

        # The cursor stays on its rollout, or else on its example, so that a user can follow it through the steps.
        keys = [key_of(row) for row in self.table.listed]
        same_example = (place for place, key in enumerate(keys) if wanted and key[:2] == wanted[:2])
        place = keys.index(wanted) if wanted in keys else next(same_example, 0)
        self.table.move_cursor(row=place, animate=False)

        self.figures.update(summary(self.opened, self.rows, self.filter))
        self.figures.set_class(bool(self.opened.trouble), "trouble")
        self._show_current()

    def on_data_table_row_highlighted(self) -> None:
        self._show_current()

    def _show_current(self) -> None:
        """Show the rollout under the cursor."""
        row = self.table.current
        if row is not None:
            self._wanted = key_of(row)
            if (self.opened, row) == self._shown:
                return
        self._shown = self.opened, row
        self.reader.show(self.opened.record(row) if self.opened and row else None)
        self._write_where()

    def _write_where(self) -> None:
        if self.source is None:
            return
        parts = [self.source.run.resolve().name, self.source.series, self.source.label]
        if self.reader.record is not None:
            parts.append(f"example {self.reader.record.row.example}, rollout {self.reader.record.row.rollout}")
        self.where.update(Text(" › ".join(map(clean, parts)), style="bold"))

    def on_data_table_row_selected(self) -> None:
        if self.table.current is not None:
            self._go_to_pane("reader")

    # panes

    def action_go_back(self) -> None:
        if self.focused is self.filter_line:
            self._close_filter()
        elif self.pane == "reader":
            self._go_to_pane("table")
        elif self.pane == "table" and self.filter.line:
            self._set_filter("")
        else:
            self._go_to_pane("tree")

    def _go_to_pane(self, name: str) -> None:
        self._mark_pane(name)
        self.panes[name].focus()

    def _mark_pane(self, name: str) -> None:
        """Make it the pane that is shown if only one is."""
        self.pane = name
        for pane in self.panes:
            self.all_panes.set_class(pane == name, f"at-{pane}")

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        if event.widget.id in self.panes:
            self._mark_pane(event.widget.id)

    def action_focus_next(self, by: int = 1) -> None:
        names = list(self.panes)
        self._go_to_pane(names[(names.index(self.pane) + by) % len(names)])

    def action_focus_previous(self) -> None:
        self.action_focus_next(-1)

    def action_zoom(self) -> None:
        self.all_panes.toggle_class("zoomed")

    def action_step_rollout(self, by: int) -> None:
        self.table.move_cursor(row=self.table.cursor_row + by, animate=False)

    def action_step_source(self, by: int) -> None:
        """Go to the same example in the evaluation, or the batch, before or after."""
        if self.source is None:
            return
        series = [one for one in self.sources if (one.run, one.series) == (self.source.run, self.source.series)]
        place = series.index(self.source) + by if self.source in series else -1
        if not 0 <= place < len(series):
            which = "first" if by < 0 else "last"
            self.notify(clean(f"{self.source.label} is the {which} of {self.source.series}"), markup=False)
            return

        # A filter must not hide the example in the other file; `_take_rows` sees to it.
        self._has_stepped = True
        self.run_tree.go_to(series[place])
        self._open(series[place])

    # filter and order

    def action_filter(self) -> None:
        self._mark_pane("table")
        self.filter_line.add_class("open")
        self.filter_line.value = self.filter.line
        self.filter_line.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self._set_filter(event.value):
            self._close_filter()

    def _set_filter(self, line: str) -> bool:
        """Return whether the line has a meaning."""
        try:
            self.filter = parse_filter(line)
        except ConfigError as error:
            self.notify(clean(str(error)), severity="error", markup=False)
            return False
        self._read_rollouts()
        return True

    def _close_filter(self) -> None:
        self.filter_line.remove_class("open")
        self._go_to_pane("table")

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        name = event.column_key.value or ""
        self._sort(name, backwards=not self.backwards if name == self.sorted_by else None)

    def action_sort(self) -> None:
        names = [str(key.value) for key in self.table.columns]
        if names:
            self._sort(names[(names.index(self.sorted_by) + 1) % len(names) if self.sorted_by in names else 0])

    def action_reverse(self) -> None:
        self._sort(self.sorted_by, backwards=not self.backwards)

    def _sort(self, name: str, *, backwards: bool | None = None) -> None:
        if self.opened is not None:
            self.sorted_by, self.backwards = name, name in LARGEST_FIRST if backwards is None else backwards
            self._show_table()

    def action_help(self) -> None:
        self.push_screen(Help())


# the screen with all keys

KEYS = """\
Everywhere
  enter        go into what the cursor is on
  escape       go back, or drop the filter
  tab          next pane (shift+tab: the one before)
  ↑ ↓ j k      move, with page up, page down, home, end
  z            give this pane the whole screen, or take it back
  r            look again for what is new
  q            leave
Rollouts
  /            filter, or search: see below
  s   S        order by the next column; the other way round
  ← →          scroll a table that is wider than its pane
  n   p        next and previous rollout, also while reading
  [   ]        the same example, one step earlier or later
Reading
  space        a page on
  x            long texts in full
Filters
""" + indent(SYNTAX, "  ")


class Help(ModalScreen[None]):
    DEFAULT_CSS = """
    Help { align: center middle; }
    Help VerticalScroll {
        width: 78; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; padding: 0 1; background: $surface;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q,enter", "dismiss", "close")]

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(KEYS, markup=False)
