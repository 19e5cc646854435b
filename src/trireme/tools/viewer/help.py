"""All keys, on one screen."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

KEYS: dict[str, dict[str, str]] = {
    "Everywhere": {
        "enter": "go into what the cursor is on",
        "escape": "go back, or drop the filter",
        "tab": "next pane (shift+tab: the one before)",
        "↑ ↓ j k": "move, with page up, page down, home, end",
        "z": "give this pane the whole screen, or take it back",
        "r": "look again for what is new",
        "f": "follow: look again every two seconds",
        "y": "copy this rollout as JSON",
        "?": "this",
        "q": "leave",
    },
    "Rollouts": {
        "/": "filter, or search: see below",
        "s   S": "order by the next column; the other way round",
        "g": "one line for each example, or for each rollout",
        "n   p": "next and previous rollout, also while reading",
        "[   ]": "the same example, one step earlier or later",
    },
    "Reading": {
        "space": "a page on",
        "t": "tokens instead of text (rollouts of training)",
        "← →": "token by token",
        "c": "colour tokens by logprob, advantage, version",
        "x": "long texts in full",
    },
    "Filters": {
        "two words": "rollouts that say both; quotes make a phrase, - in front means without",
        "reward<0.5": "also tokens, turns, advantage, rollout, and > >= <= = !=",
        "example=12": "also env, stop, error, flaws; ~ for a part of it: stop~len",
        "is:failed": "also is:truncated and is:flawed",
    },
}


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
            yield Static(manual())


def manual() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold cyan")
    table.add_column()
    for title, keys in KEYS.items():
        table.add_row(Text(title, style="bold underline"), "")
        for key, meaning in keys.items():
            table.add_row(Text(key), Text(meaning))
    return table
