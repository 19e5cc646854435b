"""The reader of the viewer: a rollout as text with its rewards and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import RichLog

from trireme.base.safe_text import clean, decimal, shortened
from trireme.journal.message_text import as_text
from trireme.tools.conversation import Block, blocks
from trireme.tools.rollouts import Record
from trireme.tools.viewer.table import reward_style

LONGEST = 20_000  # characters of a block, unless all are asked for
ROLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
BAR = "▏"
BLOCK_STYLES = {"reasoning": "italic bright_black", "call": "yellow"}


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


# the page of text


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
