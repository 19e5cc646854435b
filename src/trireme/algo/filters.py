"""What is wrong with a rollout, by its tokens alone, and what is to become of it.

T tokens of one turn that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from trireme.algo.advantage import are_same

TRUNCATED, REPETITION, GIBBERISH, ZERO_ADVANTAGE = "truncated", "repetition", "gibberish", "zero_advantage"

FLAWS = (TRUNCATED, REPETITION, GIBBERISH, ZERO_ADVANTAGE)
"""In this order they are looked for, and listed."""


class FilterRules(msgspec.Struct, frozen=True):
    """`[orchestrator.filters]`. An action is count, mask or drop."""

    truncated: str = "count"
    repetition: str = "count"
    repetition_window: int = 128
    repetition_period: int = 32
    gibberish: str = "count"
    gibberish_logprob: float = -8.0
    gibberish_window: int = 32
    zero_advantage: str = "count"

    @property
    def shortest_judged(self) -> int:
        """Turns of fewer tokens are neither repetitive nor gibberish, whatever they say."""
        return min(self.repetition_window, self.gibberish_window)

    def action(self, flaw: str) -> str:
        return getattr(self, flaw) if flaw in FLAWS else "count"


Turn = tuple[np.ndarray, np.ndarray]
"""Ids and logprobs of what was sampled, [T] each."""


def find_flaws(truncated: bool, turns: Iterable[Turn], rules: FilterRules) -> list[str]:
    """All but zero advantage, which is not known before the batch is full."""
    turns = list(turns)
    flaws = [TRUNCATED] if truncated else []
    if any(repeats(ids, window=rules.repetition_window, period=rules.repetition_period) for ids, _ in turns):
        flaws.append(REPETITION)
    if any(is_gibberish(lp, window=rules.gibberish_window, least=rules.gibberish_logprob) for _, lp in turns):
        flaws.append(GIBBERISH)
    return flaws


def repeats(ids_T: np.ndarray, *, window: int, period: int) -> bool:
    """Whether `window` tokens in a row each are what stood one unit before them, for a unit of at most `period` tokens.

    Example:
        repeats(np.array([7, 1, 2, 1, 2, 1, 2]), window=4, period=2)  # True: 1 2, and then 1 2 1 2 again
    """
    units = range(1, min(period, len(ids_T) - window) + 1)
    return any(longest_run(ids_T[unit:] == ids_T[:-unit]) >= window for unit in units)


def is_gibberish(logprobs_T: np.ndarray, *, window: int, least: float) -> bool:
    """Whether some `window` tokens in a row have a mean logprob below `least`. Shorter turns are never judged."""
    if len(logprobs_T) < window:
        return False
    sums = np.cumsum(np.concatenate([[0.0], logprobs_T.astype(np.float64)]))
    return bool(((sums[window:] - sums[:-window]) / window < least).any())


def flaw_with(action: str, flaws: Iterable[str], rules: FilterRules) -> str | None:
    """The first flaw that is to be answered so."""
    return next((flaw for flaw in flaws if rules.action(flaw) == action), None)


def has_signal(rewards_G: np.ndarray, steps: np.ndarray) -> bool:
    """Whether a group's rollouts differ in anything that they can be told apart by.

    Args:
        steps: all step rewards of the group, where the environment gives any.
    """
    return not (are_same(rewards_G) and are_same(steps))


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
