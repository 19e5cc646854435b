"""Differences, named."""

from __future__ import annotations


def first_difference(expected: dict[str, str], found: dict[str, str]) -> str | None:
    """The first entry, in the order of `expected`, that differs, is missing, or is too many.

    Example:
        first_difference({"norm": "ab"}, {"norm": "cd"})  # "norm has digest cd, expected ab"
    """
    for name, digest in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != digest:
            return f"{name} has digest {found[name]}, expected {digest}"
    extra = [name for name in found if name not in expected]
    return f"{extra[0]} was not sent" if extra else None
