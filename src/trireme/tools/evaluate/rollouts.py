"""The rollouts of an evaluation outside a run: those that are missing are made, and each is told as soon as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.orchestrator.environments.open_rollout import RolloutFailed
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Split
from trireme.orchestrator.evaluation.results import Answer, Place
from trireme.tools.environments.check_rollouts import CheckPolicy, Turned, Which

log = get_logger("eval")

OnAnswer = Callable[[Answer], None]


@dataclass(frozen=True)
class Wanted:
    """How much of an environment: the first examples of a split, and how many rollouts of each."""

    split: Split
    num_examples: int
    rollouts_per_example: int

    @property
    def places(self) -> Iterator[Place]:
        for example in range(self.num_examples):
            yield from ((example, rollout) for rollout in range(self.rollouts_per_example))


def wanted_of(environment: Environment, *, num_examples: int | None, rollouts_per_example: int) -> Wanted:
    """Of its evaluation set, or of its training set where it has none.

    Raises: ConfigError where it has no examples, or its rewards compare more rollouts than these.
    """
    environment.check_group_size(rollouts_per_example)
    available = environment.num_eval or environment.num_train
    if not available:
        raise ConfigError(
            f"environment {environment.name!r} has no examples, neither to train on nor held out - expected at least "
            f"one - check what its `load_environment(**{environment.config.args!r})` makes its data set of."
        )
    split: Split = "eval" if environment.num_eval else "train"
    return Wanted(split, min(available, num_examples or available), rollouts_per_example)


@dataclass(frozen=True)
class Evaluating:
    """One policy on one environment."""

    environment: Environment
    policy: CheckPolicy
    wanted: Wanted
    purpose: str  # differs between evaluations of this environment by one process
    version: int = -1  # of the policy, where it has one
    max_attempts: int = 3

    def missing(self, answered: Collection[Place]) -> list[Place]:
        """Where rewards compare the rollouts of an example, none of them can come alone."""
        missing = [place for place in self.wanted.places if place not in answered]
        if not self.environment.group_rewards:
            return missing
        examples = {example for example, _ in missing}
        return [place for place in self.wanted.places if place[0] in examples]

    async def run(self, missing: Iterable[Place], told: OnAnswer) -> None:
        """Raises: whatever is not one rollout's own failure: the engine is gone, the key is wrong."""
        if not self.environment.group_rewards:
            await together(self._one(example, rollout, told) for example, rollout in missing)
            return
        await together(self._group(example, told) for example in sorted({example for example, _ in missing}))

    async def _one(self, example: int, rollout: int, told: OnAnswer) -> None:
        try:
            told(await self._answer(example, rollout))
        except RolloutFailed as failure:
            told(self._failed(example, rollout, failure))

    async def _group(self, example: int, told: OnAnswer) -> None:
        """Where one fails for good, all of them have."""
        rollouts = range(self.wanted.rollouts_per_example)
        try:
            answers = await together(self._answer(example, rollout) for rollout in rollouts)
        except RolloutFailed as failure:
            answers = [self._failed(example, rollout, failure) for rollout in rollouts]
        for answer in answers:
            told(answer)

    async def _answer(self, example: int, rollout: int) -> Answer:
        """Raises: RolloutFailed where no attempt came to an end."""
        attempts = 0
        while True:
            which = Which(
                self.wanted.split,
                example,
                rollout,
                self.wanted.rollouts_per_example,
                purpose=self.purpose,
                attempt=attempts,
            )
            try:
                return self._answered(which, await self.policy.rollout(self.environment, which))
            except RolloutFailed as failure:
                attempts += 1
                if attempts == self.max_attempts:
                    raise
                log.warning("%s, example %d, rollout %d: %s", self.environment.name, example, rollout, failure)

    def _answered(self, which: Which, turned: Turned) -> Answer:
        return Answer.of(
            turned.done,
            example=which.example,
            rollout=which.place,
            version=self.version,
            tokens=turned.num_sampled or 0,
            turns=turned.num_turns,
            truncated=turned.truncated,
            stop=turned.stop,
        )

    def _failed(self, example: int, rollout: int, failure: Exception) -> Answer:
        return Answer.failed(failure, example=example, rollout=rollout, version=self.version)


async def together(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All of them at once; where one raises, the others are ended first."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
