"""Filters: flaws of a rollout that its tokens show, and the action that `[orchestrator.filters]` sets for each.

Letters: T tokens of one turn that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from trireme.algo.advantage import are_same
from trireme.config.orchestrator import Filters

TRUNCATED, REPETITION, GIBBERISH, ZERO_ADVANTAGE = "truncated", "repetition", "gibberish", "zero_advantage"

FLAWS = (TRUNCATED, REPETITION, GIBBERISH, ZERO_ADVANTAGE)  # the order in which flaws are looked for and listed

Turn = tuple[np.ndarray, np.ndarray]  # ids and logprobs of the sampled tokens, [T] each


def find_flaws(truncated: bool, turns: Iterable[Turn], filters: Filters) -> list[str]:
    """Return all flaws but zero advantage, which is known only once the batch is full."""
    turns = list(turns)
    flaws = [TRUNCATED] if truncated else []
    if any(repeats(ids, window=filters.repetition_window, period=filters.repetition_period) for ids, _ in turns):
        flaws.append(REPETITION)
    if any(is_gibberish(lp, window=filters.gibberish_window, least=filters.gibberish_logprob) for _, lp in turns):
        flaws.append(GIBBERISH)
    return flaws


def repeats(ids_T: np.ndarray, *, window: int, period: int) -> bool:
    """Return whether `window` tokens in a row each equal the token one unit before, for a unit up to `period` tokens.

    Example:
        repeats(np.array([7, 1, 2, 1, 2, 1, 2]), window=4, period=2)  # True: 1 2, and then 1 2 1 2 again
    """
    units = range(1, min(period, len(ids_T) - window) + 1)
    return any(longest_run(ids_T[unit:] == ids_T[:-unit]) >= window for unit in units)


def is_gibberish(logprobs_T: np.ndarray, *, window: int, least: float) -> bool:
    """Return whether some `window` tokens in a row have a mean logprob below `least`. Shorter turns never do."""
    if len(logprobs_T) < window:
        return False
    sums = np.cumsum(np.concatenate([[0.0], logprobs_T.astype(np.float64)]))
    return bool(((sums[window:] - sums[:-window]) / window < least).any())


def shortest_judged(filters: Filters) -> int:
    """Return the tokens below which a turn is neither repetitive nor gibberish."""
    return min(filters.repetition_window, filters.gibberish_window)


def flaw_with(action: str, flaws: Iterable[str], filters: Filters) -> str | None:
    """Return the first flaw that the filters answer with `action` ("count", "mask" or "drop")."""
    return next((flaw for flaw in flaws if flaw in FLAWS and getattr(filters, flaw) == action), None)


def has_signal(rewards_G: np.ndarray, steps: np.ndarray) -> bool:
    """Return whether the rollouts of a group differ in their rewards, or in their step rewards.

    Args:
        steps: all step rewards of the group; empty if the environment gives none.
    """
    return not (are_same(rewards_G) and are_same(steps))


def runs_of(mask_T: np.ndarray) -> Iterator[slice]:
    """Return the runs of tokens in which the mask is set, in order.

    Example:
        list(runs_of(np.array([0, 1, 1, 0, 1])))  # [slice(1, 3), slice(4, 5)]
    """
    return (slice(int(start), int(stop)) for start, stop in _edges(mask_T))


def longest_run(mask_T: np.ndarray) -> int:
    """Return the length of the longest run in which the mask is set; 0 if it never is."""
    return int(np.diff(_edges(mask_T)).max(initial=0))


def _edges(mask_T: np.ndarray) -> np.ndarray:
    """Return [runs, 2]: the first token of each run, and the one after its last."""
    return np.flatnonzero(np.diff(np.concatenate([[0], (mask_T != 0).astype(np.int8), [0]]))).reshape(-1, 2)
