"""How difficult an example is, by how its last groups did, and how often it comes for that.

E examples of an environment that were seen, N all of its examples.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np


class Pools(msgspec.Struct, frozen=True):
    """`[orchestrator.buffer.pools]`."""

    easy_threshold: float
    hard_threshold: float
    easy_weight: float
    normal_weight: float
    hard_weight: float
    memory: float


class Outcome(msgspec.Struct, frozen=True):
    """How a group that came to its end did, whether it was trained on or had no signal."""

    group: int
    env: str
    example: int
    mean: float  # of its rewards


class Scores(msgspec.Struct):
    """What is known of the difficulty of an environment's examples, for those that were seen."""

    examples: np.ndarray  # [E] int32, ascending
    means: np.ndarray  # [E] float64: exponential mean of group means


def updated(means_N: np.ndarray, outcomes: Iterable[Outcome], memory: float) -> np.ndarray:
    """mean <- memory * mean + (1 - memory) * the group's, in the order of the outcomes; the first time, the group's.

    Args:
        means_N: NaN where an example was never seen.
    """
    means = means_N.copy()
    for outcome in outcomes:
        before = means[outcome.example]
        known = not np.isnan(before)
        means[outcome.example] = memory * before + (1 - memory) * outcome.mean if known else outcome.mean
    return means


def chances(means_N: np.ndarray, pools: Pools) -> np.ndarray:
    """[N] with which probability each example is taken when its turn comes: its pool's weight over the largest one.

    The largest is that among pools which have examples now. So whatever the weights, some examples are taken for
    certain, and nobody searches for ever: where all that is left are easy ones, they come as often as anything can.
    Where each pool that has examples has weight 0, all are left out, and all have chance 1 (see `left_out`).
    """
    weights = _weights(means_N, pools)
    largest = weights.max(initial=0.0)
    return weights / largest if largest > 0 else np.ones(len(weights))


def left_out(means_N: np.ndarray, pools: Pools) -> bool:
    """Whether every example is in a pool that is to be left out."""
    return not _weights(means_N, pools).any()


def _weights(means_N: np.ndarray, pools: Pools) -> np.ndarray:
    """[N] by pool. Comparisons with NaN do not hold: what was never seen is normal. Easy goes before hard."""
    weights = np.full(len(means_N), pools.normal_weight)
    weights[means_N <= pools.hard_threshold] = pools.hard_weight
    weights[means_N >= pools.easy_threshold] = pools.easy_weight
    return weights


def to_scores(means_N: np.ndarray) -> Scores:
    seen = np.flatnonzero(~np.isnan(means_N))
    return Scores(examples=seen.astype(np.int32), means=means_N[seen])


def from_scores(scores: Scores | None, size: int) -> np.ndarray:
    """[N] the inverse."""
    means = np.full(size, np.nan)
    if scores is not None:
        means[scores.examples] = scores.means
    return means
