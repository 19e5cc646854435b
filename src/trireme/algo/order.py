"""The data order: which environment a group draws from, and which of its examples it is.

Functions of the seed and of numbers alone, so a run that restarts goes on exactly where it was, and anyone can work
out afterwards which example each group had to be. What has happened counts too, where there are difficulty pools or a
curriculum: `DataOrder` is moved by two events, a group that is taken and a batch that is closed, and whoever repeats
them in the same order, as the audit does from the journal, is told the same examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from trireme.algo import curriculum as stages
from trireme.algo import difficulty
from trireme.algo.curriculum import Place, Stage
from trireme.algo.difficulty import Outcome, Pools, Scores


class Cursor(msgspec.Struct):
    """How far an environment's examples have been handed out."""

    epoch: int = 0
    position: int = 0


class OrderRules(Protocol):
    """What of a run's configuration the order depends on."""

    @property
    def seed(self) -> int: ...
    @property
    def shuffle(self) -> bool: ...
    @property
    def weights(self) -> dict[str, float]: ...
    @property
    def pools(self) -> Pools | None: ...
    @property
    def curriculum(self) -> Sequence[Stage]: ...


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
    return min(place, int(np.flatnonzero(shares)[-1]))  # the sum of shares may round to just below 1


def example_order(seed: int, place: int, epoch: int, size: int, shuffle: bool) -> np.ndarray:
    """[size] every example of the environment at `place` once, in the order of that epoch."""
    if not shuffle:
        return np.arange(size)
    return np.random.default_rng([seed, 2, place, epoch]).permutation(size)


def draws_of(seed: int, place: int, epoch: int, size: int) -> np.ndarray:
    """[size] in [0, 1): the example at a position is taken where its chance is above the draw."""
    return np.random.default_rng([seed, 3, place, epoch]).random(size)


class DataOrder:
    """Where a run is in its data. Rules are given with each event: a run may go on with others."""

    def __init__(self, sizes: dict[str, int]) -> None:
        """At the very beginning.

        Args:
            sizes: number of training examples per environment.
        """
        self.sizes = dict(sizes)
        self.cursors = {name: Cursor() for name in sorted(sizes)}
        self.place = Place()
        self._means: dict[str, np.ndarray] = {}  # [N] per environment, where pools are in use
        self._chances: dict[str, tuple[Pools, np.ndarray]] = {}  # of these means
        self._epochs: dict[str, tuple[tuple[int, ...], np.ndarray, np.ndarray]] = {}  # of each environment's epoch

    def go_on_from(self, cursors: dict[str, Cursor], scores: dict[str, Scores], place: Place) -> None:
        """From where a run was after some batch."""
        self.cursors = {
            name: Cursor(cursors[name].epoch, cursors[name].position) if name in cursors else Cursor()
            for name in sorted(self.sizes)
        }
        self.place = place
        self._means = {
            name: difficulty.from_scores(scores[name], size) for name, size in self.sizes.items() if name in scores
        }
        self._chances.clear()

    def take(self, group: int, rules: OrderRules) -> tuple[str, int]:
        """Environment and example of the next group, whose number is `group`."""
        names, shares = names_and_shares(stages.weights_in(self.place, rules.curriculum, rules.weights))
        place = environment_of(group, rules.seed, shares)
        return names[place], self._next_example(names[place], place, rules)

    def _next_example(self, name: str, place: int, rules: OrderRules) -> int:
        """Ends within two epochs: some example has chance 1."""
        cursor, size = self.cursors[name], self.sizes[name]
        while True:
            if cursor.position >= size:
                cursor.epoch, cursor.position = cursor.epoch + 1, 0
            order, draws = self._epoch(name, place, cursor.epoch, rules)
            example = int(order[cursor.position])
            draw = draws[cursor.position]
            cursor.position += 1
            if rules.pools is None or draw < self._chances_of(name, rules.pools)[example]:
                return example

    def _epoch(self, name: str, place: int, epoch: int, rules: OrderRules) -> tuple[np.ndarray, np.ndarray]:
        which = (rules.seed, place, epoch, self.sizes[name], rules.shuffle)
        if name not in self._epochs or self._epochs[name][0] != which:
            order, draws = example_order(*which), draws_of(rules.seed, place, epoch, self.sizes[name])
            self._epochs[name] = which, order, draws
        return self._epochs[name][1:]

    def _chances_of(self, name: str, pools: Pools) -> np.ndarray:
        if name not in self._chances or self._chances[name][0] != pools:
            self._chances[name] = pools, difficulty.chances(self._means_of(name), pools)
        return self._chances[name][1]

    def _means_of(self, name: str) -> np.ndarray:
        return self._means.get(name, np.full(self.sizes[name], np.nan))

    def close_batch(self, outcomes: Sequence[Outcome], rules: OrderRules, *, next_step: int) -> None:
        """What the groups that ended with the batch say of their examples, and of the stage."""
        self.place = stages.after_batch(self.place, rules.curriculum, outcomes, next_step=next_step)
        self._chances.clear()
        if rules.pools is None:
            self._means = {}
            return
        for name in {outcome.env for outcome in outcomes}:
            own = [outcome for outcome in outcomes if outcome.env == name]
            self._means[name] = difficulty.updated(self._means_of(name), own, rules.pools.memory)

    @property
    def scores(self) -> dict[str, Scores]:
        """Of environments that have any."""
        return {name: difficulty.to_scores(self._means[name]) for name in sorted(self._means)}

    def left_out(self, rules: OrderRules) -> list[str]:
        """Environments whose examples all are in pools that are left out; they come in their order all the same."""
        if rules.pools is None:
            return []
        return [name for name in self.sizes if difficulty.left_out(self._means_of(name), rules.pools)]
