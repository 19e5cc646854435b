"""Untrusted text and numbers as a terminal or a page can show them.

Nothing that a model, a tool or an environment wrote may move a terminal's cursor, change its colours or reverse the
direction of a line.
"""

from __future__ import annotations

import math
import re

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters, line ends among them: in no name of a folder, nor in a line of a script."""

_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "␡"}
# C1 controls, which some terminals obey like escape sequences.
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), "�")
# Marks of direction, and separators that some viewers show as line ends.
_PICTURES |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x2028, 0x2029), "�")
_PICTURES |= dict.fromkeys(range(0xD800, 0xE000), "�")  # lone surrogates cannot be encoded


def clean(text: str) -> str:
    """Replace control characters by their Unicode pictures and tabs by spaces; line ends stay."""
    return text.replace("\r\n", "\n").translate(_PICTURES).expandtabs(4)


def encodable(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can hold and UTF-8 cannot, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def one_line(value: object, longest: int) -> str:
    """Return the beginning of a text, cleaned and on one line."""
    text = value if isinstance(value, str) else str(value)
    # Only the beginning is split and cleaned: a text may be megabytes long.
    return clean(" ".join(text[: 2 * longest].split())[:longest])


def shortened(text: str, longest: int) -> str:
    """Return the beginning of a text, with the number of characters that were left out."""
    left = len(text) - longest
    return text if left <= 0 else f"{text[:longest]} … ({left:,} more characters)"


def decimal(value: float | None, digits: int = 3) -> str:
    """Format a number: 0.5 -> "0.500"; "-" for None, infinities and NaN."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.3g}"
