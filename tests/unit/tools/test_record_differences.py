"""The audit and `trireme diff` rest on one comparison of two records, to the bit."""

import math
from typing import Any

import numpy as np
import pytest

from trireme.journal.records import OpenGroup
from trireme.tools.record_differences import first_difference


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": [1, {"y": 2}]}, {"x": [1, {"y": 3}]}, (".x[1].y", 2, 3)),
        ([1, 2], [1, 2, 3], ("[2]", None, 3)),
        ([1, 2], [1], ("[1]", 2, None)),
        ({}, {"x": 1}, (".x", None, 1)),
        ({"x": None}, {}, None),
        (OpenGroup(7, "a", 1), OpenGroup(7, "a", 2), (".example", 1, 2)),
        (OpenGroup(7, "a", 1), None, ("", OpenGroup(7, "a", 1), None)),
        (math.nan, math.nan, None),
        (0.0, -0.0, ("", 0.0, -0.0)),
        (1.0, math.nextafter(1.0, 2), ("", 1.0, math.nextafter(1.0, 2))),
        (np.array([0.0, math.nan]), np.array([-0.0, math.nan]), ("[0]", 0.0, 0.0)),
        (np.array([math.nan, 1.0]), np.array([math.nan, 1.0]), None),
        (np.zeros((2, 2), np.uint8), np.array([[0, 0], [1, 0]], np.uint8), ("[2]", 0, 1)),
    ],
)
def test_the_first_place_that_differs_is_named_with_what_each_has_there(a: Any, b: Any, expected: Any) -> None:
    assert first_difference(a, b) == expected
    swapped = expected and (expected[0], expected[2], expected[1])
    assert first_difference(b, a) == swapped


def test_columns_of_other_types_or_lengths_differ_as_a_whole_and_close_numbers_may_be_let_pass() -> None:
    for other in (np.zeros(3, np.float64), np.zeros(2, np.float32), None):
        difference = first_difference({"x": np.zeros(3, np.float32)}, {"x": other})
        assert difference is not None
        assert difference[0] == ".x"
    assert first_difference({"x": [1.0]}, {"x": [1.0 + 1e-9]}, rtol=1e-6) is None
    assert first_difference({"x": [1.0]}, {"x": [1.01]}, rtol=1e-6) == (".x[0]", 1.0, 1.01)
