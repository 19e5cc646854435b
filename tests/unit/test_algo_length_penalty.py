"""What a rollout's length takes off its reward."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.algo.length_penalty import LengthPenalty, linear, relative, soft_overlong, with_length_penalty

lengths = st.lists(st.integers(0, 500), min_size=1, max_size=8)


def test_soft_overlong_by_hand() -> None:
    # L_max 100, L_cache 20: nothing up to 80, half way down at 90, all of it at 100 and beyond
    found = soft_overlong(np.array([0, 80, 85, 90, 100, 130]), max_length=100, buffer=20)
    assert found.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@given(lengths=lengths, max_length=st.integers(1, 400), share=st.floats(0.01, 1.0))
def test_soft_overlong_agrees_with_its_three_cases(lengths: list[int], max_length: int, share: float) -> None:
    buffer = max(1, int(max_length * share))
    for length, found in zip(
        lengths, soft_overlong(np.array(lengths), max_length=max_length, buffer=buffer), strict=True
    ):
        if length <= max_length - buffer:
            assert found == 0
        elif length <= max_length:
            assert found == pytest.approx(((max_length - buffer) - length) / buffer)
        else:
            assert found == -1


def test_relative_by_hand() -> None:
    # shortest 10, longest 30: shares 0.5, 0, -0.5; a wrong answer never gains by being short
    rewards = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
    found = relative(np.array([10, 20, 30, 10, 30]), rewards)
    assert found.tolist() == [0.5, 0.0, -0.5, 0.0, -0.5]


def test_among_answers_of_one_length_none_is_preferred() -> None:
    assert relative(np.array([7, 7, 7]), np.array([1.0, 0.0, 1.0])).tolist() == [0.0, 0.0, 0.0]


@given(lengths=lengths, seed=st.integers(0, 99))
def test_relative_agrees_with_the_paper_on_rewards_of_0_and_1(lengths: list[int], seed: int) -> None:
    rewards = np.random.default_rng(seed).integers(0, 2, size=len(lengths)).astype(float)
    shortest, longest = min(lengths), max(lengths)
    for length, reward, found in zip(lengths, rewards, relative(np.array(lengths), rewards), strict=True):
        if shortest == longest:
            assert found == 0
            continue
        share = 0.5 - (length - shortest) / (longest - shortest)
        assert found == pytest.approx(share if reward == 1 else min(0, share))


def test_linear_by_hand() -> None:
    assert linear(np.array([0, 25, 100, 200]), max_length=100).tolist() == [0.0, -0.25, -1.0, -1.0]


@pytest.mark.parametrize("kind", ["soft_overlong", "relative", "linear"])
@given(lengths=lengths)
def test_of_two_right_answers_the_longer_one_is_never_worth_more(kind: str, lengths: list[int]) -> None:
    penalty = LengthPenalty(type=kind, max_length=300, buffer=60, weight=0.5)
    rewards = with_length_penalty(np.ones(len(lengths)), np.array(lengths), penalty)
    for one, other in zip(lengths, rewards, strict=True):
        assert all(reward <= other + 1e-12 for length, reward in zip(lengths, rewards, strict=True) if length >= one)


def test_the_weight_multiplies_and_no_penalty_takes_nothing() -> None:
    rewards, sampled = np.array([1.0, 0.25]), np.array([50, 100])
    penalty = LengthPenalty(type="linear", max_length=100, buffer=1, weight=0.5)
    assert with_length_penalty(rewards, sampled, penalty).tolist() == [0.75, -0.25]
    assert with_length_penalty(rewards, sampled, None).tolist() == [1.0, 0.25]
