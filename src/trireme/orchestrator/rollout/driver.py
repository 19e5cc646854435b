"""Roll out N examples x G rollouts: retries, a concurrency limit, and a callback for each rollout that ended.

Evaluation inside and outside a run, the environment check and GEPA all make their rollouts with `run_rollouts`.

- A rollout that fails (`RolloutFailed`, or an exception that nothing expected) is retried, unless its prompt can never
  be answered, then costs one outcome.
- Any other `TriremeError` ends everything: the engine is gone, the key is wrong, no other rollout could go better.
- If rewards compare the rollouts of an example, its group is scored, fails and is resumed together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from trireme.algo.data.order import ENDLESS
from trireme.base.errors import ConfigError, TriremeError
from trireme.base.log import get_logger
from trireme.journal.records import Rollout
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.runner import RolloutKey, RolloutSpec
from trireme.orchestrator.session.session import RolloutFailed, cancel_all
from trireme.orchestrator.session.wire import Done, Split

log = get_logger("rollouts")

Value = TypeVar("Value")


def build_rollout(
    done: Done,
    environment: Environment,
    spec: RolloutSpec,
    *,
    num_sampled: int | None = None,
    num_tokens: int | None = None,
) -> Rollout:
    """Build a rollout from its environment's result alone, as no engine of ours sampled its turns."""
    return Rollout.of(
        done,
        env=environment.name,
        example=spec.example,
        attempt=spec.attempt,
        temperature=1.0,
        num_turns=sum(message.get("role") == "assistant" for message in done.completion),
        num_sampled=num_sampled,
        num_tokens=num_tokens,
    )


@dataclass(frozen=True)
class RolloutOutcome:
    """A rollout that ended: it was scored (`rollout`), or failed as often as it may (`failure`)."""

    spec: RolloutSpec
    seconds: float  # time since its first attempt began
    rollout: Rollout | None = None
    failure: RolloutFailed | None = None

    @property
    def reward(self) -> float | None:
        return None if self.rollout is None else self.rollout.reward


@dataclass(frozen=True)
class Extent:
    """The rollouts to make: some examples of a split, and the same number of rollouts of each."""

    split: Split
    examples: Sequence[int]
    rollouts_per_example: int

    @property
    def num_rollouts(self) -> int:
        return len(self.examples) * self.rollouts_per_example

    def specs(self, purpose: str, *, group_suffix: str = "") -> list[RolloutSpec]:
        """Return them by example.

        Args:
            purpose: begins their names.
            group_suffix: ends the names of their groups, so that groups of the same rollouts, made again, differ.
        """
        size = self.rollouts_per_example
        return [
            RolloutSpec(
                self.split,
                example,
                rollout,
                name=f"{purpose}-{example}-{rollout}",
                group=f"{purpose}-{example}{group_suffix}",
                group_size=size,
            )
            for example in self.examples
            for rollout in range(size)
        ]


def read_extent(
    environment: Environment,
    *,
    split: Split,
    num_examples: int | None,
    rollouts_per_example: int,
    is_spread: bool = False,
) -> Extent:
    """Return which rollouts of a loaded environment are to be made. A split without examples is replaced by the other.

    Args:
        num_examples: all of the split if None, or if it is more than the split has.
        is_spread: take examples from all over the split, which may be sorted; else its first ones.

    Raises: ConfigError if it has no examples, or its rewards compare another number of rollouts.
    """
    environment.check_group_size(rollouts_per_example)

    # many environments have examples in one split alone, so that one is read in place of an empty one
    sizes: dict[Split, int] = {"train": environment.num_train, "eval": environment.num_eval}
    split = split if sizes[split] else "eval" if split == "train" else "train"

    size = sizes[split]
    if not size:
        raise ConfigError(
            f"environment {environment.name!r} has no examples, neither to train on nor held out - expected at least "
            f"one - check what its `load_environment(**{environment.config.args!r})` makes its data set of."
        )
    if size == ENDLESS and num_examples is None:
        raise ConfigError(
            f"environment {environment.name!r} has endless tasks - expected a number of them to roll out - set "
            "`num_examples`, or add `select = { limit = 100 }` to its `args`."
        )

    # evenly spaced, as a split may be sorted by topic or difficulty; endless tasks have no end to spread over
    count = min(size, num_examples or size)
    examples = [i * size // count for i in range(count)] if is_spread and size != ENDLESS else range(count)
    return Extent(split, examples, rollouts_per_example)


def missing_specs(
    specs: Iterable[RolloutSpec], answered: Collection[RolloutKey], *, scored_together: bool
) -> list[RolloutSpec]:
    """Return the rollouts that have no result yet; of an incomplete group that is scored together, all of them."""
    specs = list(specs)
    missing = [spec for spec in specs if spec.key not in answered]
    if not scored_together:
        return missing

    # a reward that compares needs the whole group, so finished members of an incomplete one are made again
    examples = {spec.example for spec in missing}
    return [spec for spec in specs if spec.example in examples]


async def run_rollouts(
    specs: Sequence[RolloutSpec],
    roll_out: Callable[[RolloutSpec], Awaitable[Rollout]],
    on_outcome: Callable[[RolloutOutcome], Awaitable[None]],
    *,
    scored_together: bool,
    max_attempts: int = 1,
    max_concurrent: int | None = None,
) -> list[RolloutOutcome]:
    """Make all rollouts, and return their outcomes in the order of `specs`.

    Args:
        specs: the rollouts of one example are neighbours.
        roll_out: makes one attempt.
        on_outcome: is awaited once per rollout, as soon as its outcome is final.
        scored_together: rewards compare the rollouts of an example (`Environment.group_rewards`).
        max_concurrent: rollouts at once; at least one group if it is scored together. None leaves the limit to
            the environment.

    Raises: TriremeError if no other rollout could go better; the rollouts under way are cancelled first.
    """
    slots = asyncio.Semaphore(max_concurrent or max(1, len(specs)))

    async def run_one(spec: RolloutSpec) -> RolloutOutcome:
        began = time.monotonic()
        for attempt in range(max_attempts):
            try:
                rollout = await roll_out(replace(spec, attempt=attempt))
                return RolloutOutcome(spec, time.monotonic() - began, rollout)
            except RolloutFailed as error:
                failure = error
                # another attempt would get the same first prompt, which cannot be answered
                if error.is_final:
                    break
            # the engine is gone or the key is wrong: no other rollout could go better
            except TriremeError:
                raise
            # a bug in an environment costs one rollout, not the whole evaluation
            except Exception as error:
                log.exception("rollout %s broke", spec.name)
                failure = RolloutFailed("rollout", f"{type(error).__name__}: {error}")
            if attempt + 1 < max_attempts:
                log.warning("rollout %s failed, retry %d: %s", spec.name, attempt + 1, failure)
        return RolloutOutcome(spec, time.monotonic() - began, failure=failure)

    async def run_group(group: list[RolloutSpec]) -> list[RolloutOutcome]:
        ended: dict[RolloutSpec, RolloutOutcome] = {}

        async def run_member(spec: RolloutSpec) -> None:
            async with slots:
                ended[spec] = await run_one(spec)
            if (failure := ended[spec].failure) is not None:
                raise failure

        # one failure ends the whole group: without all of its rollouts, none can be compared
        try:
            await gather_or_cancel(run_member(spec) for spec in group)
        except RolloutFailed:
            words = "not scored, because another rollout of its group failed and rewards compare the whole group"
            for spec in group:
                # a member that failed by itself keeps its own reason
                if spec not in ended or ended[spec].failure is None:
                    ended[spec] = RolloutOutcome(spec, 0.0, failure=RolloutFailed("score", words))

        # reported only now, so that an interrupted evaluation has results of whole groups
        for spec in group:
            await on_outcome(ended[spec])
        return [ended[spec] for spec in group]

    async def run_alone(spec: RolloutSpec) -> RolloutOutcome:
        # the slot is held until the outcome is written: while results cannot be written, no new rollout starts
        async with slots:
            outcome = await run_one(spec)
            await on_outcome(outcome)
        return outcome

    if not scored_together:
        return await gather_or_cancel(map(run_alone, specs))
    # `groupby` joins neighbours only, which `specs` promises for the rollouts of an example
    groups = [list(group) for _, group in groupby(specs, lambda spec: spec.example)]
    return [outcome for group in await gather_or_cancel(map(run_group, groups)) for outcome in group]


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Run all at once and return their results in order. If one raises, cancel the others, then raise its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)
