"""The rewards that a policy earned, in figures, and how difficult they show its tasks to be.

The bounds are the usual ones for reinforcement learning from verifiable rewards: a policy learns where it sometimes
succeeds and sometimes does not. Of an example that always or never succeeds, all advantages are 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trireme.algo.advantage import SAME, are_same

TOO_EASY = 0.8
GOOD = (0.1, 0.7)
TOO_HARD = 0.05


@dataclass(frozen=True)
class Rewards:
    """Statistics over groups, which are the scored rollouts of one example each."""

    mean: float  # over groups: each example counts the same
    error: float | None  # standard error of that mean, from how much groups differ; None of a single group
    least: float
    most: float
    group_std: float | None  # mean standard deviation within a group; None if no group has two rollouts
    without_signal: float | None  # share of groups whose rewards are all the same
    success: float | None  # the mean, which the advice goes by; None if rewards are not all between 0 and 1


def rewards_of(earned: Iterable[tuple[int, float | None]]) -> Rewards | None:
    """Compute the statistics of rewards, each with its example. Without any there are none.

    Args:
        earned: the reward is None for a rollout that failed, which is no part of its group.
    """
    by_example: dict[int, list[float]] = defaultdict(list)
    for example, reward in earned:
        if reward is not None:
            by_example[example].append(reward)
    if not by_example:
        return None

    groups = list(by_example.values())
    averages = [float(np.mean(group)) for group in groups]

    # a group of one rollout has no spread, and says nothing about the signal
    every = [reward for group in groups for reward in group]
    several = [group for group in groups if len(group) > 1]
    mean = float(np.mean(averages))
    return Rewards(
        mean=mean,
        error=float(np.std(averages, ddof=1) / np.sqrt(len(averages))) if len(averages) > 1 else None,
        least=min(every),
        most=max(every),
        group_std=float(np.mean([np.std(group) for group in several])) if several else None,
        without_signal=float(np.mean([are_same(np.array(group)) for group in several])) if several else None,
        success=mean if min(every) >= -SAME and max(every) <= 1 + SAME else None,
    )


def difficulty_in_words(rewards: Rewards) -> str:
    success = rewards.success
    if success is None:
        return (
            f"difficulty: rewards from {rewards.least:g} to {rewards.most:g} are no shares of success, so it is not "
            "judged. The bounds are for rewards from 0 to 1."
        )
    measured = f"{success:.1%} success"
    if success > TOO_EASY:
        return f"too easy: {measured}, above {TOO_EASY:.0%}. There is little left to learn: take harder examples."
    if success < TOO_HARD:
        return (
            f"too hard: {measured}, below {TOO_HARD:.0%}. Take easier examples, a stronger model, a supervised "
            "warm-up (`sft`), or a reward that also pays for a part of the way."
        )
    if GOOD[0] <= success <= GOOD[1]:
        return f"good: {measured} is within {GOOD[0]:.0%} to {GOOD[1]:.0%}, where reinforcement learning works best."
    side = "easy" if success > GOOD[1] else "hard"
    return f"on the {side} side: {measured}; {GOOD[0]:.0%} to {GOOD[1]:.0%} is best."
