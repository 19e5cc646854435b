"""Which environments are drawn from, and from when on: stages that follow one another.

A stage is decided when a batch is closed, and holds for the groups that are begun from then on. Where generation runs
ahead, some groups of the next batches were begun before.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trireme.algo.difficulty import Outcome


class Stage(msgspec.Struct, frozen=True):
    """`[[orchestrator.curriculum]]`."""

    weights: dict[str, float]
    from_step: int | None = None
    from_reward: float | None = None
    smoothing: int = 10


class Place(msgspec.Struct, frozen=True):
    """Where a run is in its curriculum."""

    stage: int = 0
    reward: float | None = None  # mean reward of that stage so far, smoothed


def weights_in(place: Place, curriculum: Sequence[Stage], weights: dict[str, float]) -> dict[str, float]:
    """Weight of each environment, 0 for those that the stage does not name.

    Args:
        weights: of the environments where there is no curriculum.
    """
    if not curriculum:
        return weights
    stage = curriculum[min(place.stage, len(curriculum) - 1)]  # a run may go on with fewer stages
    return {name: stage.weights.get(name, 0.0) for name in weights}


def after_batch(place: Place, curriculum: Sequence[Stage], outcomes: Sequence[Outcome], *, next_step: int) -> Place:
    """The stage for the groups that are begun next.

    The reward of a stage is b <- b + (m - b) / smoothing over its batches, beginning with the first one's m: the mean
    over the groups that ended with the batch and are of an environment that the stage draws from.
    """
    if not curriculum:
        return Place()
    place = _with_rewards(Place(min(place.stage, len(curriculum) - 1), place.reward), curriculum, outcomes)
    while place.stage + 1 < len(curriculum) and _begins(curriculum[place.stage + 1], place, next_step):
        place = Place(place.stage + 1)
    return place


def _with_rewards(place: Place, curriculum: Sequence[Stage], outcomes: Sequence[Outcome]) -> Place:
    stage = curriculum[place.stage]
    means = [outcome.mean for outcome in outcomes if stage.weights.get(outcome.env, 0.0) > 0]
    if not means:
        return place
    mean = sum(means) / len(means)
    before = mean if place.reward is None else place.reward
    return Place(place.stage, before + (mean - before) / stage.smoothing)


def _begins(stage: Stage, place: Place, next_step: int) -> bool:
    if stage.from_step is not None:
        return next_step >= stage.from_step
    return stage.from_reward is not None and place.reward is not None and place.reward >= stage.from_reward
