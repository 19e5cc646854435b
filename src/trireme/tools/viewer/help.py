"""The screen with all keys."""

from __future__ import annotations

from textwrap import indent
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from trireme.tools.rollout_filters import SYNTAX

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
