"""What was said in a rollout, and what came of it, as HTML. Pure.

Whatever a model or a tool wrote is text: nothing of it is taken for HTML.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trireme.tools.conversation import Block, blocks
from trireme.tools.rollouts import Record, clean, decimal

LONGEST = 20_000  # characters of a block that are shown
MARKS = {"reasoning": "reasoning", "call": "calls", "result": "returned", "other": "also"}
ROLES = {"system", "developer", "user", "assistant", "tool"}


def conversation_html(record: Record) -> str:
    parts = ""
    for title, messages in (("Prompt", record.prompt), ("Completion", record.completion)):
        if messages:
            parts += f'<h3 class="tr-part">{title}</h3>' + "".join(map(_block, blocks(messages)))
    return parts + "".join(_rest(record))


def _block(block: Block) -> str:
    role = block.role if block.role in ROLES else "other"
    heading = " ".join(filter(None, (clean(block.role), MARKS.get(block.kind, ""))))
    name = f"<b>{_text(block.name)}</b>" if block.name else ""
    return _said(f"{role} {block.kind}", f"{_text(heading)} {name}", block.text)


def _said(kinds: str, who: str, words: str) -> str:
    """
    Args:
        who: HTML already.
    """
    return (
        f'<div class="tr-said {kinds}"><div class="tr-who">{who}</div><div class="tr-words">{_text(words)}</div></div>'
    )


def _rest(record: Record) -> Iterator[str]:
    """What is rarely looked for."""
    rest = ({"answer": record.answer} if record.answer else {}) | ({"info": record.info} if record.info else {})
    for name, value in (rest | record.more).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        yield _said("other", _text(name), text)


def _text(text: str) -> str:
    shown = html.escape(clean(text[:LONGEST]))
    return shown if len(text) <= LONGEST else f"{shown}<i> … and {len(text) - LONGEST:,} more characters</i>"


def components_html(metrics: Mapping[str, float], reward: float | None) -> str:
    """The reward and what else was measured, each with a bar as long as it is beside the largest."""
    values = ({} if reward is None else {"reward": reward}) | dict(metrics)
    largest = max((abs(value) for value in values.values() if math.isfinite(value)), default=0.0) or 1.0
    return f'<div class="tr-components">{"".join(_component(*item, largest) for item in values.items())}</div>'


def _component(name: str, value: float, largest: float) -> str:
    share = min(1.0, abs(value) / largest) if math.isfinite(value) else 0.0
    sign = "bad" if value < 0 else "good"
    bar = f'<span class="tr-track"><span class="{sign}" style="width:{100 * share:.0f}%"></span></span>'
    return f'<span>{_text(name)}</span>{bar}<span class="tr-mono">{decimal(value)}</span>'


def facts(record: Record) -> list[str]:
    row = record.row
    found: Iterable[Any] = (
        f"{row.tokens} token{'' if row.tokens == 1 else 's'} sampled",
        f"{row.turns} turn{'' if row.turns == 1 else 's'}",
        row.stop and f"ended by {row.stop}",
        row.truncated and "truncated",
        row.flaws and f"flaws: {row.flaws}",
        record.samples and f"temperature {record.temperature:g}",
    )
    return [fact for fact in found if fact]
