"""Which example comes next: environments by weight, examples by a seeded order per epoch.

Nothing here is random in itself: the choice is a function of the seed, the group's number and the cursors, so a run
that restarts from the journal's cursors goes on exactly where it was. The functions stand in `algo/order.py`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from trireme.algo.order import environment_of, example_order, names_and_shares
from trireme.base.errors import ConfigError
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

        Raises:
            ConfigError: the run that `state` is of had other examples.
        """
        _refuse_other_examples(state.sizes, sizes)
        self._names, self._shares = names_and_shares({name: weights[name] for name in sizes})
        self._sizes = dict(sizes)
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
        name = self._names[environment_of(group, self._seed, self._shares)]
        return OpenGroup(id=group, env=name, example=self._next_example(name))

    def _next_example(self, name: str) -> int:
        cursor = self._cursors[name]
        if cursor.position >= self._sizes[name]:
            cursor.epoch, cursor.position = cursor.epoch + 1, 0
        example = self._order(name, cursor.epoch)[cursor.position]
        cursor.position += 1
        return int(example)

    @lru_cache(maxsize=8)  # noqa: B019 - one buffer per process
    def _order(self, name: str, epoch: int) -> np.ndarray:
        return example_order(self._seed, self._names.index(name), epoch, self._sizes[name], self._shuffle)

    def cursors(self) -> dict[str, Cursor]:
        return {name: Cursor(cursor.epoch, cursor.position) for name, cursor in self._cursors.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Number of training examples per environment."""
        return dict(self._sizes)

    @property
    def reopened(self) -> list[OpenGroup]:
        """Groups of the run before that have not been taken yet."""
        return list(self._reopened)


def _refuse_other_examples(before: dict[str, int], now: dict[str, int]) -> None:
    if not before or before == now:
        return
    changes = [
        f"{name} had {before.get(name, 'none')}, now {now.get(name, 'none')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    raise ConfigError(
        f"The training examples have changed since this run began: {'; '.join(changes)} - the same examples were "
        "expected, because the data order goes on by position. Restore the data and the environments' `args`, or start "
        "a new run: set another `name`, or leave out --resume."
    )
