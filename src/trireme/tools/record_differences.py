"""Comparison of two records, to the bit: the first place at which they differ, and values as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

LONGEST = 120  # characters of a value


def first_difference(a: Any, b: Any, rtol: float = 0.0) -> tuple[str, Any, Any] | None:
    """Return the first place within two values at which they differ, and what each has there; None if they are the
    same. A missing value counts as None.

    Args:
        rtol: relative tolerance of numbers that are not computed in the same order again.

    Example:
        first_difference({"a": [1, 2]}, {"a": [1, 3]})  # ".a[1]", 2, 3
    """
    match a, b:
        case (float(), float()):
            # NaN is the same as NaN, and 0.0 is not the same as -0.0
            is_same = a.hex() == b.hex() or bool(rtol and np.isclose(a, b, rtol=rtol, atol=rtol / 1000))
            return None if is_same else ("", a, b)
        case (dict(), dict()):
            parts = [(f".{name}", a.get(name), b.get(name)) for name in {**a, **b}]
        case (msgspec.Struct(), msgspec.Struct()) if type(a) is type(b):
            parts = [(f".{name}", getattr(a, name), getattr(b, name)) for name in a.__struct_fields__]
        case (list(), list()):
            parts = [(f"[{place}]", *both) for place, both in enumerate(zip_longest(a, b))]
        case (np.ndarray(), np.ndarray()) if a.shape == b.shape and a.dtype == b.dtype:
            index = first_place(a, b)
            return None if index is None else (f"[{index}]", a.flat[index], b.flat[index])
        case (np.ndarray(), _) | (_, np.ndarray()):
            return "", a, b
        case _:
            return None if a == b else ("", a, b)
    # only the first difference counts, so parts are compared in order
    for place, one, other in parts:
        if difference := first_difference(one, other, rtol):
            return f"{place}{difference[0]}", *difference[1:]
    return None


def first_place(a: np.ndarray, b: np.ndarray) -> int | None:
    """Return the first index at which two columns differ, as far as the shorter one goes; to the bit."""
    shorter = min(a.size, b.size)
    # compared as bits, so that NaN equals NaN and 0.0 does not equal -0.0
    bits_a, bits_b = (np.ascontiguousarray(each).ravel()[:shorter].view(f"u{each.itemsize}") for each in (a, b))
    differ = np.flatnonzero(bits_a != bits_b)
    return int(differ[0]) if len(differ) else None


def differences(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[Any, tuple[str, Any, Any]]:
    """Return the `first_difference` of each name whose values are not the same, in the order of A."""
    compared = ((name, first_difference(a.get(name), b.get(name))) for name in {**a, **b})
    return {name: difference for name, difference in compared if difference}


def shown(value: Any) -> str:
    """Return a value as text, cut off if it is long."""
    if isinstance(value, np.ndarray):
        return counted(len(value), "value")
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
