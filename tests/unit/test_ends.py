"""A run's first and last steps, in two means: they tell whether it learned, however short it is."""

from __future__ import annotations

import pytest

from trireme.monitor.ends import Ends, ends_of


@pytest.mark.parametrize(
    ("rewards", "ends"),
    [
        ([0.25], Ends(0.25, 0.25, 1)),
        ([0.0, 0.5, 1.0], Ends(0.0, 1.0, 1)),
        ([0.0, 0.5, 0.5, 1.0], Ends(0.25, 0.75, 2)),
        ([0.0] * 5 + [9.0] + [1.0] * 5, Ends(0.0, 1.0, 5)),
    ],
)
def test_the_ends_of_a_short_run_do_not_overlap(rewards: list[float], ends: Ends) -> None:
    assert ends_of(rewards) == ends


def test_they_say_how_many_steps_they_are_of() -> None:
    assert ends_of([]) is None
    assert [str(Ends(0.0, 1.0, steps)) for steps in (1, 2)] == [
        "the first and the last step",
        "the first and the last 2 steps",
    ]
