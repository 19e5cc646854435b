"""The data order: which environment a group draws from, and in which order an epoch hands out its examples.

Functions of the seed and of numbers alone, so a run that restarts goes on exactly where it was, and anyone can work
out afterwards which example each group had to be.
"""

from __future__ import annotations

import numpy as np


def names_and_shares(weights: dict[str, float]) -> tuple[list[str], np.ndarray]:
    """Environments in the order in which they are counted ("places"), and each one's share; shares sum to 1."""
    names = sorted(weights)
    total = sum(weights[name] for name in names)
    return names, np.array([weights[name] / total for name in names])


def environment_of(group: int, seed: int, shares: np.ndarray) -> int:
    """The place of the environment that group `group` draws its example from.

    Args:
        shares: [number of environments], summing to 1.
    """
    if len(shares) == 1:
        return 0
    draw = np.random.default_rng([seed, 1, group]).random()
    place = int(np.searchsorted(np.cumsum(shares), draw, side="right"))
    return min(place, len(shares) - 1)  # the sum of shares may round to just below 1


def example_order(seed: int, place: int, epoch: int, size: int, shuffle: bool) -> np.ndarray:
    """[size] every example of the environment at `place` once, in the order of that epoch."""
    if not shuffle:
        return np.arange(size)
    return np.random.default_rng([seed, 2, place, epoch]).permutation(size)
