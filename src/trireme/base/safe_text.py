"""Untrusted text as a terminal or a page can show it.

Nothing that a model, a tool or an environment wrote may move a terminal's cursor, change its colours or reverse the
direction of a line.
"""

from __future__ import annotations

_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "␡"}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), "�")
_PICTURES |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x2028, 0x2029), "�")
_PICTURES |= dict.fromkeys(range(0xD800, 0xE000), "�")  # lone surrogates cannot be encoded


def clean(text: str) -> str:
    """Replace control characters by their Unicode pictures and tabs by spaces; line ends stay."""
    return text.replace("\r\n", "\n").translate(_PICTURES).expandtabs(4)
