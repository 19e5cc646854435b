"""The data order: which environment a group draws from, and which of its examples.

Draws depend on the seed and on counters only, so a restarted run continues exactly, and the audit can recompute which
example each group had. With difficulty pools or a curriculum they also depend on what happened: two events move a
`DataOrder`, a group that is taken and a batch that is closed. Repeating the events in the same order, as the audit does
from the journal, gives the same examples.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from trireme.algo.data import curriculum as stages
from trireme.algo.data import difficulty
from trireme.algo.data.curriculum import Place
from trireme.algo.data.difficulty import Outcome, Scores
from trireme.algo.rules import Rules
from trireme.config.orchestrator import DifficultyPools

ENDLESS = 2**31 - 1
"""Size of an environment whose tasks never end. They come in their own order, without epochs and difficulty pools."""


class Cursor(msgspec.Struct):
    """The position within an environment's examples."""

    epoch: int = 0
    position: int = 0


def names_and_shares(weights: dict[str, float]) -> tuple[list[str], np.ndarray]:
    """Return the environments in the order of their places, and the share of each. Shares sum to 1."""
    names = sorted(weights)
    total = sum(weights[name] for name in names)
    return names, np.array([weights[name] / total for name in names])


def environment_of(group: int, seed: int, shares: np.ndarray) -> int:
    """Return the place of the environment that group `group` draws its example from.

    Args:
        shares: [number of environments], summing to 1.
    """
    if len(shares) == 1:
        return 0
    draw = np.random.default_rng([seed, 1, group]).random()
    place = int(np.searchsorted(np.cumsum(shares), draw, side="right"))
    return min(place, int(np.flatnonzero(shares)[-1]))  # the sum of shares may round to just below 1


def example_order(seed: int, place: int, epoch: int, size: int, shuffle: bool) -> np.ndarray:
    """Return [size] every example of the environment at `place` once, in the order of that epoch."""
    if not shuffle:
        return np.arange(size)
    return np.random.default_rng([seed, 2, place, epoch]).permutation(size)


def draws_of(seed: int, place: int, epoch: int, size: int) -> np.ndarray:
    """Return [size] numbers in [0, 1). The example at a position is taken if its probability is above its draw."""
    return np.random.default_rng([seed, 3, place, epoch]).random(size)


class DataOrder:
    """The position of a run in its data. Each event is given its rules, as a resumed run may have other ones."""

    def __init__(self, sizes: dict[str, int]) -> None:
        """Start at the first of each environment's training examples, of which there are so many."""
        self.sizes = dict(sizes)
        self.cursors = {name: Cursor() for name in sorted(sizes)}
        self.place = Place()
        self._means: dict[str, np.ndarray] = {}  # [N] per environment, if pools are in use
        self._chances: dict[str, tuple[DifficultyPools, np.ndarray]] = {}  # [N] from these means
        # For each environment: what its epoch depends on, and the order and the draws of that epoch.
        self._epochs: dict[str, tuple[tuple[int, ...], np.ndarray, np.ndarray]] = {}

    def resume_from(self, cursors: dict[str, Cursor], scores: dict[str, Scores], place: Place) -> None:
        """Continue from the position after some batch."""
        self.cursors = {
            name: Cursor(cursors[name].epoch, cursors[name].position) if name in cursors else Cursor()
            for name in sorted(self.sizes)
        }
        self.place = place
        self._means = {
            name: difficulty.from_scores(scores[name], size)
            for name, size in self.sizes.items()
            if name in scores and size != ENDLESS
        }
        self._chances.clear()

    def take(self, group: int, rules: Rules) -> tuple[str, int]:
        """Return environment and example of the next group, whose number is `group`."""
        names, shares = names_and_shares(stages.weights_in(self.place, rules.curriculum, rules.weights))
        place = environment_of(group, rules.seed, shares)
        name = names[place]

        cursor, size, rules = self.cursors[name], self.sizes[name], rules.of(name)
        # An endless environment has no order of ours: its tasks are numbered as they are taken.
        if size == ENDLESS:
            cursor.position += 1
            return name, cursor.position - 1

        # Examples are passed over by their probability. This ends within two epochs, as some have probability 1.
        while True:
            if cursor.position >= size:
                cursor.epoch, cursor.position = cursor.epoch + 1, 0
            order, draws = self._epoch(name, place, cursor.epoch, rules)
            example = int(order[cursor.position])
            draw = draws[cursor.position]
            cursor.position += 1
            if rules.pools is None or draw < self._chances_of(name, rules.pools)[example]:
                return name, example

    def _epoch(self, name: str, place: int, epoch: int, rules: Rules) -> tuple[np.ndarray, np.ndarray]:
        which = (rules.seed, place, epoch, self.sizes[name], rules.shuffle)
        if name not in self._epochs or self._epochs[name][0] != which:
            order, draws = example_order(*which), draws_of(rules.seed, place, epoch, self.sizes[name])
            self._epochs[name] = which, order, draws
        return self._epochs[name][1:]

    def _chances_of(self, name: str, pools: DifficultyPools) -> np.ndarray:
        if name not in self._chances or self._chances[name][0] != pools:
            self._chances[name] = pools, difficulty.chances(self._means_of(name), pools)
        return self._chances[name][1]

    def _means_of(self, name: str) -> np.ndarray:
        return self._means.get(name, np.full(self.sizes[name], np.nan))

    def close_batch(self, outcomes: Sequence[Outcome], rules: Rules, *, next_step: int) -> None:
        """Update difficulties and stage by the groups that ended with the batch."""
        self.place = stages.after_batch(self.place, rules.curriculum, outcomes, next_step=next_step)
        self._chances.clear()

        # Without pools nothing is remembered: pools that a resumed run adds start with unseen examples.
        self._means = {name: means for name, means in self._means.items() if rules.of(name).pools is not None}
        for name in {outcome.env for outcome in outcomes if self.sizes[outcome.env] != ENDLESS}:
            own = [outcome for outcome in outcomes if outcome.env == name]
            if (pools := rules.of(name).pools) is not None:
                self._means[name] = difficulty.updated(self._means_of(name), own, pools.memory)

    @property
    def scores(self) -> dict[str, Scores]:
        """Return the scores of the environments that have any."""
        return {name: difficulty.to_scores(self._means[name]) for name in sorted(self._means)}

    def left_out(self, rules: Rules) -> list[str]:
        """Return the environments whose examples are all in pools of weight 0; they are drawn in their order anyway."""
        finite = [name for name, size in self.sizes.items() if size != ENDLESS]
        pools_of = {name: pools for name in finite if (pools := rules.of(name).pools) is not None}
        return [name for name, pools in pools_of.items() if difficulty.left_out(self._means_of(name), pools)]
