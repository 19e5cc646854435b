"""The line above the list: how many rollouts, their rewards, and what is wrong with their file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from rich.text import Text

from trireme.tools.rollout_filters import Filter
from trireme.tools.rollouts import DROPPED, BatchFile, ResultsFile, Row, clean, decimal


def figures(opened: ResultsFile | BatchFile, rows: Sequence[Row], chosen: Filter) -> Text:
    """A line on what is listed."""
    if opened.trouble:
        return Text(clean(opened.trouble), style="red")
    rewards = [row.reward for row in rows if row.reward is not None]
    parts = [f"{len(rows)} rollouts" if not chosen.line else f"{len(rows)} of {len(opened.rows)} rollouts"]
    if rewards:
        parts.append(f"reward {decimal(fmean(rewards))} ±{decimal(pstdev(rewards), 2)}")
        parts.append(f"{decimal(min(rewards), 2)} {histogram(rewards)} {decimal(max(rewards), 2)}")
    dropped = sum(row.stop == DROPPED for row in rows)
    counts = {"truncated": sum(row.truncated for row in rows), "dropped": dropped}
    counts["failed"] = sum(bool(row.error) for row in rows) - dropped
    parts += [f"{count} {name}" for name, count in counts.items() if count]
    text = Text(" · ".join(parts))
    if opened.damaged:
        lines = ", ".join(map(str, opened.damaged[:3])) + ("…" if len(opened.damaged) > 3 else "")
        text.append(f" · {len(opened.damaged)} damaged (line {lines})", style="red")
    if chosen.line:
        text.append(f" · / {clean(chosen.line)}", style="cyan")
    return text


def histogram(values: Sequence[float], width: int = 10) -> str:
    """Draw how many values lie in each of `width` equal parts from the lowest to the highest.

    Example:
        histogram([0, 0, 0, 0.5, 1], width=3)  # "█▃▃"
    """
    low, span = min(values), (max(values) - min(values)) or 1.0
    counts = [0] * width
    for value in values:
        counts[min(width - 1, int(width * (value - low) / span))] += 1
    return "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * count / max(counts))] for count in counts)
