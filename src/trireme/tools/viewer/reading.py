"""One rollout: what was said, with its rewards and metrics, or its tokens, each with what the journal knows of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.console import Console
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from trireme.tools.conversation import Block, blocks
from trireme.tools.rollouts import Record, clean, decimal
from trireme.tools.tokenizer import Decode, pieces, window_of
from trireme.tools.viewer.listing import reward_style
from trireme.tools.viewer.tokens import (
    COLOURS,
    describe,
    legend,
    token_text,
)

LONGEST = 20_000  # characters of a block, before it is asked for in full
ROLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
BAR = "▏"
MARKS = {"reasoning": "reasoning", "call": "calls", "result": "returned", "other": "also"}


class Part(NamedTuple):
    """Of a page: a text that is wrapped, with a bar of that colour along it where it is what somebody said."""

    text: Text
    bar: str = ""

    def lines(self, console: Console, width: int) -> Iterator[Text]:
        bar = Text(BAR, style=self.bar) if self.bar else Text()
        yield from (bar + line for line in self.text.wrap(console, max(1, width - len(bar))))


class Reading(ScrollView, can_focus=True):
    """A page of wrapped lines. Made once for a rollout and a width, then only scrolled."""

    DEFAULT_CSS = """
    Reading { height: 1fr; overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll(-1)", "up", show=False),
        Binding("down,j", "scroll(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown,space", "page(1)", "page down", show=False),
        Binding("home", "top", "top", show=False),
        Binding("end", "bottom", "bottom", show=False),
        Binding("left", "token(-1)", "token before", show=False),
        Binding("right", "token(1)", "next token", show=False),
        Binding("c", "colour", "colour", show=False),
        Binding("x", "in_full", "in full", show=False),
    ]

    class Told(Message):
        """Something to say on the line above: the token under the cursor."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.record: Record | None = None
        self.step: int | None = None
        self.shows_tokens = False
        self.colour = COLOURS[0]
        self.cursor = 0  # over the tokens of all samples, one after the other
        self._decode: Decode | None = None
        self._pieces: list[list[str]] = []
        self._in_full = False
        self._lines: list[Text] = []
        self._cursor_line = 0

    def show(self, record: Record | None, *, step: int | None = None, decode: Decode | None = None) -> None:
        self.record, self.step, self._decode = record, step, decode
        self.cursor, self._pieces, self._in_full = self._first_sampled(), [], False
        self.make()
        self.scroll_to(y=0, animate=False, immediate=True, force=True)

    def _first_sampled(self) -> int:
        """The token that one wants to look at first."""
        samples = self.record.samples if self.record else []
        return int(samples[0].loss_mask.argmax()) if samples and samples[0].length else 0

    @property
    def num_tokens(self) -> int:
        return sum(sample.length for sample in self.record.samples) if self.record else 0

    def make(self) -> None:
        """Wraps everything anew. Of a page that is not on the screen nothing: it will be told its size."""
        width = self.scrollable_content_region.width
        parts = self._parts() if width else ()
        self._lines = [line for part in parts for line in part.lines(self.app.console, width)]
        self.virtual_size = Size(width, len(self._lines))
        self.refresh()

    def _parts(self) -> Iterable[Part]:
        if self.record is None:
            return ()
        if self.shows_tokens and self.num_tokens:
            return map(Part, self._token_texts())
        return page(self.record, longest=None if self._in_full else LONGEST)

    def on_resize(self) -> None:
        self.make()

    def render_line(self, y: int) -> Strip:
        place = self.scroll_offset.y + y
        base = self.rich_style
        if place >= len(self._lines):
            return Strip.blank(self.size.width, base)
        line = Strip(self._lines[place].render(self.app.console, end=""))
        return line.apply_style(base).adjust_cell_length(self.size.width, base)

    # moving

    def action_scroll(self, by: int) -> None:
        if self.shows_tokens:
            self.action_token(self._row_of_tokens() * by)
        else:
            self.scroll_relative(y=by, animate=False, immediate=True, force=True)

    def _row_of_tokens(self) -> int:
        """About as many as stand on a line."""
        return max(4, self.size.width // 5)

    def action_page(self, by: int) -> None:
        if self.shows_tokens:
            self.action_token(by * self._row_of_tokens() * 10)
        else:
            self.scroll_relative(y=by * max(1, self.size.height - 1), animate=False, immediate=True, force=True)

    def action_top(self) -> None:
        self._move_cursor(0)
        self.scroll_to(y=0, animate=False, immediate=True, force=True)

    def action_bottom(self) -> None:
        self._move_cursor(self.num_tokens - 1)
        self.scroll_to(y=max(0, len(self._lines) - self.size.height), animate=False, immediate=True, force=True)

    def action_in_full(self) -> None:
        self._in_full = not self._in_full
        self.make()

    # tokens

    def toggle_tokens(self) -> None:
        self.shows_tokens = not self.shows_tokens
        self.make()
        self._follow_cursor()

    def action_token(self, by: int) -> None:
        if self.shows_tokens:
            self._move_cursor(self.cursor + by)

    def action_colour(self) -> None:
        self.colour = COLOURS[(COLOURS.index(self.colour) + 1) % len(COLOURS)]
        self.make()

    def _move_cursor(self, place: int) -> None:
        if not (self.shows_tokens and self.num_tokens):
            return
        self.cursor = max(0, min(self.num_tokens - 1, place))
        self.make()
        self._follow_cursor()

    def _follow_cursor(self) -> None:
        if not (self.shows_tokens and self.num_tokens):
            return
        number, place = self.at_cursor()
        sample = (self.record.samples if self.record else [])[number]
        self.post_message(self.Told(describe(sample, place, self._texts_of(number)[place], step=self.step)))
        line = next((n for n, text in enumerate(self._lines) if any(_is_cursor(span.style) for span in text.spans)), 0)
        top, height = self.scroll_offset.y, max(1, self.size.height)
        if not top <= line < top + height:
            self.scroll_to(y=max(0, line - height // 2), animate=False, immediate=True, force=True)

    def at_cursor(self) -> tuple[int, int]:
        """Which sample, and which of its tokens."""
        rest = self.cursor
        for number, sample in enumerate(self.record.samples if self.record else []):
            if rest < sample.length:
                return number, rest
            rest -= sample.length
        return 0, 0

    def _texts_of(self, number: int) -> list[str]:
        assert self.record is not None
        if not self._pieces:
            self._pieces = [pieces(sample.ids.tolist(), self._decode) for sample in self.record.samples]
        return self._pieces[number]

    def _token_texts(self) -> Iterator[Text]:
        assert self.record is not None
        current, place = self.at_cursor()
        yield Text(f"coloured by {self.colour} (c): {legend(self.colour)}", style="bright_black")
        if self._decode is None:
            yield Text("the run's tokenizer is not on this machine: numbers of tokens instead of text", style="yellow")
        for number, sample in enumerate(self.record.samples):
            window = window_of(place if number == current else 0, sample.length)
            shown = "" if len(window) == sample.length else f", {window.start + 1} to {window.stop} shown"
            yield Text(f"\n── sample {number + 1} of {len(self.record.samples)}: {sample.length} tokens{shown}", "bold")
            cursor = place if number == current else -1
            yield token_text(sample, self._texts_of(number), self.colour, cursor=cursor, window=window)


def _is_cursor(style: str | Style) -> bool:
    return isinstance(style, Style) and bool(style.reverse)


# the page


def page(record: Record, *, longest: int | None) -> list[Part]:
    """What there is to know of a rollout, from its reward to its last word."""
    parts = [*map(Part, _head(record)), Part(Text(""))]
    for title, messages in (("prompt", record.prompt), ("completion", record.completion)):
        if messages:
            parts.append(Part(Text(f"━━ {title} ", style="bold bright_black")))
            for block in blocks(messages):
                parts += _block(block, longest)
    return [*parts, *map(Part, _rest(record))]


def _head(record: Record) -> Iterator[Text]:
    row = record.row
    first = Text.assemble(
        (f"{row.env} " if row.env else "", "bold"),
        (f"example {clean(row.example)} · rollout {row.rollout} · ", "bold"),
        (f"reward {decimal(row.reward)}", f"bold {reward_style(row.reward)}"),
    )
    if row.advantage is not None:
        first.append(f" · advantage {row.advantage:+.3f}", style="bold")
    yield first
    yield Text(" · ".join(record.facts), style="bright_black")
    if record.metrics:
        yield _pairs((clean(name), decimal(value)) for name, value in record.metrics.items())
    if row.error:
        yield Text.assemble(("failed: ", "bold red"), (row.error, "red"))
    if record.answer:
        yield Text.assemble(("answer: ", "bold"), clean(record.answer[:LONGEST]))


def _rest(record: Record) -> Iterator[Text]:
    """What is rarely looked for."""
    rest = ({"info": record.info} if record.info else {}) | record.more
    if rest:
        yield Text("━━ also ", style="bold bright_black")
    for name, value in rest.items():
        yield Text.assemble((f"{clean(name)}: ", "bold bright_black"), (_value(value), "bright_black"))


def _pairs(pairs: Iterable[tuple[str, str]]) -> Text:
    found = Text()
    for name, value in pairs:
        found.append(f"{name} ", style="bright_black")
        found.append(f"{value}   ")
    return found


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return clean(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")


def _block(block: Block, longest: int | None) -> Iterator[Part]:
    colour = ROLES.get(block.role, "white")
    kind = MARKS.get(block.kind, "")
    heading = " ".join(part for part in (clean(block.role), kind, clean(block.name)) if part)
    yield Part(Text(f"▌ {heading}", style=f"bold {colour}"))
    style = "italic bright_black" if block.kind == "reasoning" else "yellow" if block.kind == "call" else ""
    for line in _shortened(clean(block.text), longest):
        yield Part(Text(line, style=style), bar=colour)
    yield Part(Text(""))


def _shortened(text: str, longest: int | None) -> Sequence[str]:
    if longest is None or len(text) <= longest:
        return text.split("\n")
    rest = len(text) - longest
    return [*text[:longest].split("\n"), f"… {rest:,} more characters: x shows them"]
