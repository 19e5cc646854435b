"""Comparison of two records, to the bit: the names whose values differ, the place within a column or a list, and values
as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LONGEST = 120  # characters of a value


def differing(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> list[Any]:
    """Return the names whose values are not the same to the bit, in the order of A; a missing value counts as None."""
    return [name for name in {**a, **b} if not _are_identical(a.get(name), b.get(name))]


def _are_identical(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if type(a) is not type(b):
            return False
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float) and isinstance(b, float):
        return repr(a) == repr(b)  # NaN is identical to NaN, and 0.0 is not to -0.0
    return bool(a == b)


def first_place(a: np.ndarray, b: np.ndarray) -> int | None:
    """Return the first index at which two sequences differ, as far as the shorter one goes; to the bit."""
    shorter = min(len(a), len(b))
    bits_a, bits_b = (np.ascontiguousarray(each[:shorter]).view(f"u{each.dtype.itemsize}") for each in (a, b))
    differ = np.flatnonzero(bits_a != bits_b)
    return int(differ[0]) if len(differ) else None


def narrowed(a: Any, b: Any, *, unit: str = "place") -> tuple[str, Any, Any]:
    """Return the place at which two columns, or two lists of messages, differ, and what is there.

    Args:
        unit: word for a place in a column.

    Example:
        narrowed(np.array([1, 2]), np.array([1, 3]), unit="token")  # ", token 1", 2, 3
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and (a.shape, a.dtype) == (b.shape, b.dtype):
        place = first_place(a, b)
        return f", {unit} {place}", a[place], b[place]
    if isinstance(a, list) and isinstance(b, list) and all(isinstance(each, dict) for each in (*a, *b)):
        number = next((n for n, both in enumerate(zip(a, b, strict=False)) if both[0] != both[1]), min(len(a), len(b)))
        one, other = (messages[number] if number < len(messages) else None for messages in (a, b))
        return f", message {number}", one, other
    return "", a, b


def shown(value: Any) -> str:
    """Return a value as text, cut off where it is long."""
    if isinstance(value, np.ndarray):
        return f"{len(value)} value{'' if len(value) == 1 else 's'}"
    text = "nothing" if value is None else str(value) if isinstance(value, np.generic) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def some(values: Sequence[Any], most: int = 6) -> str:
    """Return the first values of a list as text.

    Example:
        some([1, 2, 3, 4], most=3)  # "1, 2, 3 and 1 more"
    """
    first = ", ".join(str(value) for value in values[:most])
    return first + (f" and {len(values) - most} more" if len(values) > most else "")


def counted(number: int, one: str, many: str | None = None) -> str:
    """
    Example:
        counted(1200, "batch", "batches")  # "1,200 batches"
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"
