"""Stretches of equal values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def runs_of(mask_T: np.ndarray) -> Iterator[slice]:
    """The stretches in which the mask holds, in order.

    Example:
        list(runs_of(np.array([0, 1, 1, 0, 1])))  # [slice(1, 3), slice(4, 5)]
    """
    return (slice(int(start), int(stop)) for start, stop in _edges(mask_T))


def longest_run(mask_T: np.ndarray) -> int:
    """Length of the longest of them; 0 where the mask never holds."""
    return int(np.diff(_edges(mask_T)).max(initial=0))


def _edges(mask_T: np.ndarray) -> np.ndarray:
    """[number of stretches, 2]"""
    return np.flatnonzero(np.diff(np.concatenate([[0], (mask_T != 0).astype(np.int8), [0]]))).reshape(-1, 2)
