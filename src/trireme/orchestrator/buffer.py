"""Which example comes next: environments by weight, examples by a seeded order per epoch.

Nothing here is random in itself: the choice is a function of the seed, the group's number and the cursors, so a run
that restarts from the journal's cursors goes on exactly where it was.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from trireme.ledger.records import Cursor, OpenGroup, State


class Buffer:
    """Hands out groups to roll out."""

    def __init__(
        self, sizes: dict[str, int], weights: dict[str, float], *, seed: int, shuffle: bool, state: State
    ) -> None:
        """
        Args:
            sizes: number of training examples per environment.
            weights: share of the examples per environment, in any unit.
        """
        self._names = sorted(sizes)
        self._sizes = sizes
        total = sum(weights[name] for name in self._names)
        self._shares = np.array([weights[name] / total for name in self._names])
        self._seed = seed
        self._shuffle = shuffle
        self._cursors = {name: state.cursors.get(name, Cursor()) for name in self._names}
        self._reopened = list(state.open_groups)
        self.next_group = state.next_group

    def take(self) -> OpenGroup:
        """The next group; first those that were open when the run stopped."""
        if self._reopened:
            return self._reopened.pop(0)
        group = self.next_group
        self.next_group += 1
        name = self._environment_of(group)
        return OpenGroup(id=group, env=name, example=self._next_example(name))

    def _environment_of(self, group: int) -> str:
        if len(self._names) == 1:
            return self._names[0]
        draw = np.random.default_rng([self._seed, 1, group]).random()
        place = int(np.searchsorted(np.cumsum(self._shares), draw, side="right"))
        return self._names[min(place, len(self._names) - 1)]

    def _next_example(self, name: str) -> int:
        cursor = self._cursors[name]
        if cursor.position >= self._sizes[name]:
            cursor.epoch, cursor.position = cursor.epoch + 1, 0
        example = self._order(name, cursor.epoch)[cursor.position]
        cursor.position += 1
        return int(example)

    @lru_cache(maxsize=8)  # noqa: B019 - one buffer per process
    def _order(self, name: str, epoch: int) -> np.ndarray:
        size = self._sizes[name]
        if not self._shuffle:
            return np.arange(size)
        return np.random.default_rng([self._seed, 2, self._names.index(name), epoch]).permutation(size)

    def cursors(self) -> dict[str, Cursor]:
        return {name: Cursor(cursor.epoch, cursor.position) for name, cursor in self._cursors.items()}

    @property
    def reopened(self) -> list[OpenGroup]:
        """Groups of the run before that have not been taken yet."""
        return list(self._reopened)
