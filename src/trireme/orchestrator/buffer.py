"""Choose the next example: environments by weight and stage, examples by a seeded order per epoch and by difficulty.

Nothing here is random in itself, see `algo/data/order.py`: a run that restarts from the journal's state continues
exactly where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trireme.algo.data.curriculum import Place
from trireme.algo.data.difficulty import Outcome
from trireme.algo.data.order import Cursor, DataOrder
from trireme.algo.rules import Rules
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.journal.records import OpenGroup, State

log = get_logger("buffer")


class Buffer:
    """Hands out groups to roll out."""

    def __init__(self, sizes: dict[str, int], rules: Rules, state: State) -> None:
        """
        Args:
            sizes: number of training examples per environment.

        Raises: ConfigError if the run that `state` is of had other examples.
        """
        _refuse_other_examples(state.sizes, sizes)
        self._rules = rules
        self._order = DataOrder(sizes)
        self._order.resume_from(state.cursors, state.scores, Place(state.stage, state.stage_reward))
        self.reopened = list(state.open_groups)  # those that were open when the run stopped, until they are taken
        self._left_out: set[str] = set()  # environments that were warned about
        self.next_group = state.next_group

    def take(self) -> OpenGroup:
        """Return the next group; first those that were open when the run stopped."""
        if self.reopened:
            return self.reopened.pop(0)
        group = self.next_group
        self.next_group += 1
        name, example = self._order.take(group, self._rules)
        return OpenGroup(id=group, env=name, example=example)

    def close_batch(self, outcomes: Sequence[Outcome], *, next_step: int) -> None:
        """Take in the outcomes of groups that ended with the batch; they decide what the next groups are."""
        before = self._order.place.stage
        self._order.close_batch(outcomes, self._rules, next_step=next_step)
        if self._order.place.stage != before:
            log.info("batch %d: the curriculum's stage %d begins", next_step, self._order.place.stage)

        # An environment whose examples are all in pools of weight 0 would have none: its pools are ignored then.
        left_out = set(self._order.left_out(self._rules))
        for name in sorted(left_out - self._left_out):  # each environment once
            log.warning(
                "all examples of %s are in difficulty pools of weight 0 - some that are not were expected, so they "
                "come in their order as if there were no pools. Give a pool some weight "
                "(`[orchestrator.buffer.pools]`), or take other examples.",
                name,
            )
        self._left_out = left_out

    def state(self) -> dict[str, Any]:
        """Return the fields of `State` to resume from; the caller knows which groups are open."""
        return {
            "next_group": self.next_group,
            "sizes": dict(self._order.sizes),
            "cursors": {name: Cursor(at.epoch, at.position) for name, at in self._order.cursors.items()},
            "scores": self._order.scores,
            "stage": self._order.place.stage,
            "stage_reward": self._order.place.reward,
        }


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
        "expected, because the data order continues by position. Restore the data and the environments' `args`, or "
        "start a new run: set another `name`, or leave out --resume."
    )
