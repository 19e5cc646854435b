"""How much better a rollout was than its siblings."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from trireme.algo.advantage import ESTIMATORS, group_mean, group_mean_std


def test_group_mean_by_hand() -> None:
    assert group_mean(np.array([1.0, 0.0, 0.0, 1.0])).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert group_mean(np.array([0.3, 0.6])) == pytest.approx([-0.15, 0.15])


def test_group_mean_std_by_hand() -> None:
    # mean 2, deviations -2 0 2, standard deviation of the population sqrt(8/3)
    assert group_mean_std(np.array([0.0, 2.0, 4.0]), eps=0.0) == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5])


def test_group_mean_std_agrees_with_the_standard_library() -> None:
    rewards = np.random.default_rng(0).normal(size=16)
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    expected = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
    assert group_mean_std(rewards) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_of_a_group_sum_to_zero(name: str) -> None:
    rewards = np.random.default_rng(1).normal(size=(100, 8))
    assert np.abs([ESTIMATORS[name](group).sum() for group in rewards]).max() < 1e-12


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_that_agrees_teaches_nothing(name: str) -> None:
    assert ESTIMATORS[name](np.array([0.5, 0.5, 0.5])).tolist() == [0.0, 0.0, 0.0]
