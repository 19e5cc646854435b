"""Tokens of a packed row that need to be computed once: those before which samples are the same.

What a causal model makes of a token depends on the tokens before it alone. The rollouts of a group begin with the same
prompt, and often go on alike for a while: there, one sample stands for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shared:
    """Which of a row's T tokens stand for which.

    Example:
        shared(ids=[7, 8, 9, 7, 8, 5], lengths=[3, 3])  # kept=[0, 1, 2, 5], places=[0, 1, 2, 0, 1, 3]
    """

    kept: np.ndarray  # [P] int64: tokens of the row that are computed, ascending
    places: np.ndarray  # [T] int64: where among those each token of the row is found


def shared(ids: np.ndarray, lengths: list[int]) -> Shared:
    """Samples in alphabetical order: each has the longest beginning in common with a neighbour."""
    ends = np.cumsum(lengths)
    samples = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    owners = np.arange(len(ids))
    before: int | None = None
    for number in sorted(range(len(samples)), key=lambda number: samples[number].astype(">i8").tobytes()):
        first = ends[number] - lengths[number]
        if before is not None:
            alike = _alike(samples[before], samples[number])
            theirs = ends[before] - lengths[before]
            owners[first : first + alike] = owners[theirs : theirs + alike]
        before = number
    kept = np.unique(owners)
    return Shared(kept, np.searchsorted(kept, owners))


def _alike(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens at the beginning of both."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def unshared(length: int) -> Shared:
    """Every token is computed for itself."""
    return Shared(np.arange(length), np.arange(length))
