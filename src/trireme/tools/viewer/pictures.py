"""Numbers and texts as a terminal can show them: nothing that a model wrote may move its cursor or change colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

BLOCKS = " ▁▂▃▄▅▆▇█"
SHOWN_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "␡"}
SHOWN_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), "�")
SHOWN_CONTROLS |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x2028, 0x2029), "�")
SHOWN_CONTROLS |= dict.fromkeys(range(0xD800, 0xE000), "�")  # halves of a character: no terminal takes them


def clean(text: str) -> str:
    """Control characters become pictures of themselves, tabs spaces; line ends stay."""
    return text.replace("\r\n", "\n").translate(SHOWN_CONTROLS).expandtabs(4)


def one_line(value: Any, longest: int) -> str:
    """The beginning of a text, on one line."""
    text = value if isinstance(value, str) else str(value)
    return clean(" ".join(text[: 2 * longest].split())[:longest])


def decimal(value: float | None, digits: int = 3) -> str:
    """0.5 -> "0.500"; "-" where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.3g}"


def histogram(values: Sequence[float], width: int = 10) -> str:
    """How many values lie in each of `width` equal parts from the lowest to the highest.

    Example:
        histogram([0, 0, 0, 0.5, 1], width=3)  # "█▃▃"
    """
    if not values:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    counts = [0] * width
    for value in values:
        counts[min(width - 1, int(width * (value - low) / span))] += 1
    most = max(counts)
    return "".join(BLOCKS[math.ceil(8 * count / most)] for count in counts)
