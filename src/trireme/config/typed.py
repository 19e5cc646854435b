"""What is typed after a flag, for `argparse`: each raises ArgumentTypeError that says what was expected."""

from __future__ import annotations

import json
import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive(text: str) -> float:
    if (value := not_negative(text)) == 0:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def not_negative(text: str) -> float:
    if not 0 <= (value := _number(text)) < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def share(text: str) -> float:
    if not 0 < (value := _number(text)) <= 1:
        raise ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def json_table(example: str) -> Callable[[str], dict[str, Any]]:
    """
    Args:
        example: of what to write.
    """

    def read(text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is no JSON ({error}); write '{example}'") from None
        if not isinstance(value, dict):
            raise ArgumentTypeError(f"{text!r} is no JSON object; write '{example}'")
        return value

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
