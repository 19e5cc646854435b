"""Numbers as people and models write them, compared as numbers."""

import re
from fractions import Fraction

_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
MAX_CHARS = 100  # a number of a million digits is no answer, and slow


def to_number(text: str) -> Fraction | None:
    """The number that a text is, or None where it is none: `$1,234.50`, `3/4`, `\\frac{3}{4}`, `12 \\text{ apples}`."""
    if len(text) > MAX_CHARS:
        return None

    # Units, currency signs, spaces and the marks of LaTeX are no part of the number.
    plain = _FRACTION.sub(r"\1/\2", _TEXT.sub("", text))
    plain = re.sub(r"\\[,!; ]|\\%|[\s$€£%\\{}]", "", plain).rstrip(".")
    above, slash, below = plain.partition("/")
    numerator, denominator = _plain_number(above), _plain_number(below) if slash else Fraction(1)
    return numerator / denominator if numerator is not None and denominator else None


def _plain_number(text: str) -> Fraction | None:
    if not text.isascii() or not _NUMBER.fullmatch(text) or not any(map(str.isdigit, text)):
        return None
    return Fraction(text.replace(",", ""))


def is_same_number(one: str, other: str) -> bool:
    number = to_number(one)
    return number is not None and number == to_number(other)
