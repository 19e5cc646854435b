"""The curriculum: stages that say which environments are drawn from, one after the other.

The stage is chosen when a batch is closed and applies to groups that begin afterwards. With asynchronous generation,
some groups of the next batches have begun already.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trireme.algo.data.difficulty import Outcome
from trireme.config.orchestrator import Stage


class Place(msgspec.Struct, frozen=True):
    """The position of a run in its curriculum."""

    stage: int = 0
    reward: float | None = None  # mean reward of that stage so far, smoothed


def weights_in(place: Place, curriculum: Sequence[Stage], weights: dict[str, float]) -> dict[str, float]:
    """Return the weight of each environment in the current stage; 0 for those that it does not name.

    Args:
        weights: the environments' weights without a curriculum.
    """
    if not curriculum:
        return weights
    stage = curriculum[min(place.stage, len(curriculum) - 1)]  # a resumed run may have fewer stages
    return {name: stage.weights.get(name, 0.0) for name in weights}


def after_batch(place: Place, curriculum: Sequence[Stage], outcomes: Sequence[Outcome], *, next_step: int) -> Place:
    """Return the position for the groups that begin next.

    The reward of a stage is b <- b + (m - b) / smoothing over its batches, starting from the first batch's m. Here m is
    the mean over the groups that ended with the batch and belong to an environment that the stage draws from.
    """
    if not curriculum:
        return Place()
    number, reward = min(place.stage, len(curriculum) - 1), place.reward
    stage = curriculum[number]

    # Groups of environments that the stage does not draw from are left over from another stage.
    if means := [outcome.mean for outcome in outcomes if stage.weights.get(outcome.env, 0.0) > 0]:
        mean = sum(means) / len(means)
        before = mean if reward is None else reward
        reward = before + (mean - before) / stage.smoothing

    # Several stages may begin at once by their steps. One that waits for a reward cannot follow another at once, as the
    # new stage has no reward yet.
    for following in curriculum[number + 1 :]:
        if following.from_step is not None:
            begins = next_step >= following.from_step
        else:
            begins = following.from_reward is not None and reward is not None and reward >= following.from_reward
        if not begins:
            break
        number, reward = number + 1, None
    return Place(number, reward)
