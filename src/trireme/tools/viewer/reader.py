"""The reader of the viewer: a rollout as text with its rewards and metrics, or token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from rich.color import Color
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Key, Resize
from textual.message import Message
from textual.widgets import RichLog

from trireme.base.safe_text import clean, decimal, shortened
from trireme.journal.message_text import as_text
from trireme.tools.conversation import Block, blocks
from trireme.tools.rollouts import Record
from trireme.tools.token_columns import COLOURS, FAINTEST, TokenColumns, colours_of, facts_of, load_columns, shades_of
from trireme.tools.tokenizer import visible, window_of
from trireme.tools.viewer.table import reward_style

LONGEST = 20_000  # characters of a block, unless all are asked for
ROLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
BAR = "▏"
BLOCK_STYLES = {"reasoning": "italic bright_black", "call": "yellow"}

GIVEN, CURSOR = Style(dim=True), Style(reverse=True, bold=True)
TOKENS_PER_LINE = 12  # about, for moving up and down


class Reader(RichLog):
    """A page of wrapped lines, written again for each rollout, width and position of the token cursor."""

    DEFAULT_CSS = "Reader { height: 1fr; background: transparent; scrollbar-size-vertical: 1; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "scroll_up", show=False),
        Binding("j", "scroll_down", show=False),
        Binding("space", "page_down", show=False),
        Binding("c", "colour", "colour", show=False),
        Binding("x", "in_full", "in full", show=False),
    ]

    class TokenMoved(Message):
        """The token cursor moved to another token."""

        def __init__(self, description: str) -> None:
            super().__init__()
            self.description = description

    def __init__(self, **options: Any) -> None:
        super().__init__(wrap=True, auto_scroll=False, min_width=0, **options)
        self.record: Record | None = None
        self.shows_tokens = False
        self._run = Path()
        self._samples: list[TokenColumns] = []  # empty until tokens are shown
        self._has_texts = False
        self._colour = "engine"
        self._cursor = 0  # token, counted over all samples
        self._in_full = False

    def show(self, record: Record | None, run: Path) -> None:
        """Show a rollout from its beginning."""
        self.record, self._run = record, run
        samples = record.rollout.samples if record and record.rollout else []
        self._cursor = int(samples[0].loss_mask.argmax()) if samples and samples[0].length else 0
        self._samples, self._in_full = [], False
        self._write_page()
        self.scroll_to(y=0, animate=False, immediate=True, force=True)

    def on_resize(self, event: Resize) -> None:
        self._write_page()

    def _write_page(self) -> None:
        self.clear()
        if self.record is None or not self.scrollable_content_region.width:
            return  # it is written when it gets its size
        if self.shows_tokens and self.record.rollout:
            if not self._samples:
                step = self.record.row.step or 0
                self._samples, self._has_texts = load_columns(self._run, step, self.record.rollout)
            for text in self._token_page():
                self.write(text)
        else:
            width = max(1, self.scrollable_content_region.width - len(BAR))
            for text, colour in page(self.record, longest=None if self._in_full else LONGEST):
                lines = [Text(BAR, style=colour) + line for line in text.wrap(self.app.console, width)]
                self.write(Text("\n").join(lines) if colour else text)

    def action_in_full(self) -> None:
        self._in_full = not self._in_full
        self._write_page()

    # tokens

    def toggle_tokens(self) -> None:
        self.shows_tokens = not self.shows_tokens
        self._write_page()
        self._follow_cursor()

    def action_colour(self) -> None:
        if names := colours_of(self._samples):
            self._colour = names[(names.index(self._colour) + 1) % len(names) if self._colour in names else 0]
            self._write_page()

    def on_key(self, event: Key) -> None:
        """Among tokens, the keys that scroll elsewhere move the cursor."""
        num_tokens = sum(sample.length for sample in self._samples)
        line, jump = TOKENS_PER_LINE, 10 * TOKENS_PER_LINE
        steps = {"left": -1, "right": 1, "up": -line, "k": -line, "down": line, "j": line}
        steps |= {"pageup": -jump, "pagedown": jump, "space": jump, "home": -num_tokens, "end": num_tokens}
        if self.shows_tokens and num_tokens and event.key in steps:
            event.stop()
            event.prevent_default()
            self._cursor = max(0, min(num_tokens - 1, self._cursor + steps[event.key]))
            self._write_page()
            self._follow_cursor()

    def _follow_cursor(self) -> None:
        """Report the token under the cursor, and scroll to it."""
        if not (self.shows_tokens and self.record and self._samples):
            return
        place = self._cursor
        for sample in self._samples:
            if place < sample.length:
                facts = facts_of(sample, place, step=self.record.row.step or 0)
                self.post_message(self.TokenMoved(" · ".join(f"{name} {fact}" for name, fact in facts)))
                break
            place -= sample.length
        has_cursor = [any(part.style and part.style.reverse for part in strip) for strip in self.lines]
        line = has_cursor.index(True) if True in has_cursor else 0
        top, height = self.scroll_offset.y, max(1, self.size.height)
        if not top <= line < top + height:
            self.scroll_to(y=max(0, line - height // 2), animate=False, immediate=True, force=True)

    def _token_page(self) -> Iterator[Text]:
        yield Text(f"coloured by {self._colour} (c): {COLOURS[self._colour]}", style="bright_black")
        if not self._has_texts:
            yield Text("The run's tokenizer is not on this machine: tokens are shown as numbers.", style="yellow")
        cursor = self._cursor
        for number, sample in enumerate(self._samples, 1):
            window = window_of(cursor if 0 <= cursor < sample.length else 0, sample.length)
            shown = "" if len(window) == sample.length else f", {window.start + 1} to {window.stop} shown"
            yield Text(f"\n── sample {number} of {len(self._samples)}: {sample.length} tokens{shown}", "bold")
            tokens, shades = Text(), shades_of(sample, self._colour)
            for place in window:
                (red, green, blue), strength = shades[place]
                style = Style() if sample.sampled[place] else GIVEN
                if strength > FAINTEST:  # darker than in a browser: the text is white
                    dark = 0.2 + 0.4 * strength
                    style = Style(bgcolor=Color.from_rgb(dark * red, dark * green, dark * blue), color="#ffffff")
                tokens.append(visible(sample.texts[place]), style + CURSOR if place == cursor else style)
            yield tokens
            cursor -= sample.length


# the page of text


def page(record: Record, *, longest: int | None) -> Iterator[tuple[Text, str]]:
    """Yield all of a rollout as texts, each with the colour of the bar on its left, or with ""."""
    row = record.row
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
    for title, messages in (("prompt", record.prompt), ("completion", record.completion)):
        if messages:
            yield Text(f"━━ {title} ", style="bold bright_black"), ""
        for block in blocks(messages):
            yield from _block(block, longest)
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


def as_json(record: Record) -> str:
    """Return messages, reward and metrics of a rollout, without tokens."""
    row = msgspec.to_builtins(record.row)
    head = {name: row[name] for name in ("env", "example", "rollout", "reward", "tokens", "turns", "stop", "error")}
    body = {"prompt": record.prompt, "completion": record.completion, "answer": record.answer}
    text = json.dumps(head | body | {"metrics": record.metrics, "info": record.info}, default=str, indent=1)
    return text.encode(errors="replace").decode()
