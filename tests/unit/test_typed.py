"""What is typed after a flag: taken where it makes sense, and else answered by what was expected."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest

from trireme.cli.plan import plan
from trireme.cli.typed import count, json_table, not_negative, positive, positive_int, share


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (positive_int, "3", 3),
        (count, "0", 0),
        (positive, "0.5", 0.5),
        (not_negative, "0", 0.0),
        (share, "1", 1.0),
        (json_table("{}"), '{"a": [1]}', {"a": [1]}),
    ],
)
def test_what_makes_sense_is_taken(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (positive_int, ["0", "-1", "1.5", "many"]),
        (count, ["-1", "1.5", ""]),
        (positive, ["0", "-1", "nan", "inf", "much"]),
        (not_negative, ["-0.1", "nan", "inf"]),
        (share, ["0", "1.01", "5", "nan", "half"]),
        (json_table('{"a": 1}'), ["[1]", "{", "3"]),
    ],
)
def test_anything_else_is_answered_with_itself_and_what_was_expected(
    read: Callable[[str], Any], texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError) as refused:
            read(text)
        assert repr(text) in str(refused.value)


def test_no_plan_is_made_for_a_gpu_that_does_more_than_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan(["--mfu", "5"])
    assert "'5' is not a number above 0 and up to 1" in capsys.readouterr().err
