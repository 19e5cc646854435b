"""Runs some rollouts of one environment, on the way that training takes, and keeps what came of each.

Who answers the environment's questions is a `CheckPolicy`: a script (`check_script`), an engine of ours
(`check_engine`), or somebody's chat endpoint (`check_endpoint`). What the outcomes mean is said in `check_report`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from trireme.orchestrator.environments.open_rollout import RolloutFailed
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Done, RunTask, Split


@dataclass(frozen=True)
class Turned:
    """A rollout that was scored, and how long it became."""

    done: Done
    num_turns: int  # of the model
    truncated: bool
    stop: str | None  # what ended it
    num_sampled: int | None = None  # tokens of the model; None where nobody counts them
    num_tokens: int | None = None  # of the whole conversation


def as_environments_tell(done: Done, *, num_sampled: int | None = None, num_tokens: int | None = None) -> Turned:
    """Where nobody but the environment knows how it went."""
    num_turns = sum(message.get("role") == "assistant" for message in done.completion)
    return Turned(done, num_turns, done.truncated, done.stop, num_sampled, num_tokens)


@dataclass(frozen=True)
class Attempt:
    """One rollout of the check: scored, or failed."""

    example: int
    place: int  # in its group
    seconds: float
    turned: Turned | None = None
    failure: RolloutFailed | None = None


class CheckPolicy(Protocol):
    """Who answers."""

    @property
    def name(self) -> str:
        """For the report."""
        ...

    @property
    def is_policy(self) -> bool:
        """Whether its rewards say how hard the environment is."""
        ...

    async def rollout(self, environment: Environment, which: Which) -> Turned:
        """Raises: RolloutFailed; TriremeError where no other rollout could go better."""
        ...


@dataclass(frozen=True)
class Which:
    """One rollout to make."""

    split: Split
    example: int
    place: int  # in its group
    group_size: int
    purpose: str = "check"  # differs between groups of the same example, at whatever time
    attempt: int = 0

    @property
    def group(self) -> str:
        return f"{self.purpose}-{self.example}"

    @property
    def key(self) -> str:
        return f"{self.group}-{self.place}"

    def task(self, environment: Environment) -> RunTask:
        return RunTask(
            task=f"{self.key}.{self.attempt}",
            split=self.split,
            index=self.example,
            attempt=self.attempt,
            max_turns=environment.config.max_turns,
            group=self.group,
            group_size=self.group_size,
        )


@dataclass(frozen=True)
class Extent:
    """How much is tried."""

    split: Split
    examples: tuple[int, ...]
    rollouts_per_example: int

    @property
    def num_rollouts(self) -> int:
        return len(self.examples) * self.rollouts_per_example


def extent_of(environment: Environment, *, split: Split, num_examples: int, rollouts_per_example: int) -> Extent | None:
    """Examples from all over the set, which may be sorted; None where there are none.

    As in training, an environment without an evaluation set evaluates on its training set, and the other way round.
    """
    sizes = {"train": environment.num_train, "eval": environment.num_eval}
    split = split if sizes[split] else "eval" if split == "train" else "train"
    size = sizes[split]
    count = min(size, num_examples)
    return Extent(split, tuple(i * size // count for i in range(count)), rollouts_per_example) if count else None


async def run_check(
    environment: Environment, policy: CheckPolicy, extent: Extent, *, on_attempt: Callable[[Attempt], None]
) -> list[Attempt]:
    """In order of examples and places. The environment's `max_concurrent` bounds how many run at once.

    Raises: whatever is not one rollout's own failure: the engine is gone, the key is wrong.
    """
    groups = [asyncio.create_task(_group(environment, policy, extent, each, on_attempt)) for each in extent.examples]
    try:
        return [attempt for group in await asyncio.gather(*groups) for attempt in group]
    finally:
        await _end(groups)


async def _group(
    environment: Environment,
    policy: CheckPolicy,
    extent: Extent,
    example: int,
    on_attempt: Callable[[Attempt], None],
) -> list[Attempt]:
    """All rollouts of one example. Where rewards compare them, none can be scored without the others."""
    size = extent.rollouts_per_example
    whiches = [Which(extent.split, example, place, size) for place in range(size)]
    tasks = {asyncio.create_task(_attempt(environment, policy, which)): which for which in whiches}
    attempts: list[Attempt] = []
    pending = set(tasks)
    try:
        while pending:
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            made = [task.result() for task in ended]
            if environment.group_rewards and any(attempt.failure for attempt in made):
                await _end(pending)
                made += [_left_alone(tasks[task]) for task in pending]
                pending = set()
            for attempt in made:
                on_attempt(attempt)
            attempts += made
    finally:
        await _end(tasks)
    return sorted(attempts, key=lambda attempt: attempt.place)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Also of those that have failed: where one key is wrong, all rollouts say so, and one of them is enough."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _attempt(environment: Environment, policy: CheckPolicy, which: Which) -> Attempt:
    began = time.monotonic()
    try:
        turned = await policy.rollout(environment, which)
        return Attempt(which.example, which.place, time.monotonic() - began, turned=turned)
    except RolloutFailed as failure:
        return Attempt(which.example, which.place, time.monotonic() - began, failure=failure)


def _left_alone(which: Which) -> Attempt:
    words = "not scored, because another rollout of its group failed and rewards compare the whole group"
    return Attempt(which.example, which.place, 0.0, failure=RolloutFailed("score", words))
