"""Difficulty pools: how difficult an example is by the rewards of its last groups, and how often it is drawn for that.

Letters: E examples of an environment that were seen, N all of its examples.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from trireme.config.orchestrator import DifficultyPools


class Outcome(msgspec.Struct, frozen=True):
    """The result of a finished group, whether it was trained on or had no signal."""

    group: int
    env: str
    example: int
    mean: float  # mean reward of its rollouts


class Scores(msgspec.Struct):
    """The mean rewards of those examples of an environment that were seen, as the journal holds them."""

    examples: np.ndarray  # [E] int32, ascending
    means: np.ndarray  # [E] float64: exponential mean of group means


def updated(means_N: np.ndarray, outcomes: Iterable[Outcome], memory: float) -> np.ndarray:
    """Return the means after these outcomes, applied in order: mean <- memory * mean + (1 - memory) * the group's mean.

    The first group of an example sets its mean.

    Args:
        means_N: NaN for examples that were never seen.
    """
    means = means_N.copy()
    for outcome in outcomes:
        before = means[outcome.example]
        known = not np.isnan(before)
        means[outcome.example] = memory * before + (1 - memory) * outcome.mean if known else outcome.mean
    return means


def chances(means_N: np.ndarray, pools: DifficultyPools) -> np.ndarray:
    """Return [N] the probability of taking each example when its turn comes: its pool's weight over the largest weight.

    The largest weight is that of the pools that have examples now. So some examples are always taken and the search for
    the next one ends. If every pool that has examples has weight 0, all examples have probability 1 (see `left_out`).
    """
    weights = _weights(means_N, pools)
    largest = weights.max(initial=0.0)
    return weights / largest if largest > 0 else np.ones(len(weights))


def left_out(means_N: np.ndarray, pools: DifficultyPools) -> bool:
    """Return whether every example is in a pool of weight 0."""
    return not _weights(means_N, pools).any()


def _weights(means_N: np.ndarray, pools: DifficultyPools) -> np.ndarray:
    """Return [N] the weight of each example's pool. Unseen examples (NaN) are normal; easy is checked before hard."""
    weights = np.full(len(means_N), pools.normal_weight)
    weights[means_N <= pools.hard_threshold] = pools.hard_weight
    weights[means_N >= pools.easy_threshold] = pools.easy_weight
    return weights


def to_scores(means_N: np.ndarray) -> Scores:
    seen = np.flatnonzero(~np.isnan(means_N))
    return Scores(examples=seen.astype(np.int32), means=means_N[seen])


def from_scores(scores: Scores | None, size: int) -> np.ndarray:
    """Return [N] means from scores: the inverse of `to_scores`."""
    means = np.full(size, np.nan)
    if scores is not None:
        means[scores.examples] = scores.means
    return means
