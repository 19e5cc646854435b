"""What a rollout's length takes off its reward."""

from __future__ import annotations

import numpy as np
import pytest

from trireme.algo.length_penalty import LengthPenalty, relative, soft_overlong, with_length_penalty


def test_soft_overlong_by_hand() -> None:
    # L_max 100, L_cache 20: nothing up to 80, half way down at 90, all of it at 100 and beyond
    found = soft_overlong(np.array([0, 80, 85, 90, 100, 130]), max_length=100, buffer=20)
    assert found.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_relative_by_hand() -> None:
    # shortest 10, longest 30: shares 0.5, 0, -0.5; a wrong answer never gains by being short
    rewards = np.array([1.0, 0.5, 1.0, 0.0, 0.0, 0.4])
    found = relative(np.array([10, 20, 30, 10, 30, 15]), rewards)
    assert found.tolist() == [0.5, 0.0, -0.5, 0.0, -0.5, 0.0]
    assert relative(np.array([10, 30]), np.array([0.5, 1.0])).tolist() == [0.5, -0.5]  # 0.5 is a right answer
    assert relative(np.array([7, 7]), np.array([1.0, 0.0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [0.875, 0.5, 0.5]),
        ("relative", [1.25, 0.875, 0.75]),
        ("soft_overlong", [1.0, 0.5, 0.5]),
        (None, [1.0, 1.0, 1.0]),
    ],
)
def test_a_reward_loses_the_weighted_penalty(kind: str | None, expected: list[float]) -> None:
    penalty = LengthPenalty(type=kind, max_length=100, buffer=20, weight=0.5) if kind else None
    assert with_length_penalty(np.ones(3), np.array([25, 100, 125]), penalty).tolist() == expected
