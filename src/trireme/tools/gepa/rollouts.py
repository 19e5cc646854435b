"""Prompts are tried on examples, each rollout at most once: what is in the journal is read from there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from trireme.orchestrator.environments.open_rollout import RolloutFailed, cancel_all
from trireme.orchestrator.environments.pool import Environment
from trireme.tools.environments.check_rollouts import CheckPolicy, Turned, Which
from trireme.tools.gepa.examples import Example
from trireme.tools.gepa.journal import Journal, Scored, key_of, name_of
from trireme.tools.gepa.prompted import Messages, PromptedEnvironment


class Trials:
    """Runs rollouts of one environment with one policy, and keeps count of how often each prompt met each example."""

    def __init__(
        self,
        environment: Environment,
        policy: CheckPolicy,
        journal: Journal,
        *,
        columns: Sequence[str] = (),
    ) -> None:
        self._environment = environment
        self._policy = policy
        self._journal = journal
        self._columns = tuple(columns)
        self._times: Counter[tuple[Any, ...]] = Counter()
        self.calls: Counter[str] = Counter()
        """Rollouts that were wanted, by purpose: run now, or found in the journal."""

    async def run(self, prompt: str, examples: Sequence[Example]) -> list[Scored]:
        """In order of the examples. A rollout that fails has a line too.

        Raises: TriremeError where no other rollout could go better: the key is wrong, the engine is gone.
        """
        numbered = [(example, self._next_time(prompt, example)) for example in examples]
        trials = [asyncio.create_task(self._one(prompt, example, nth)) for example, nth in numbered]
        try:
            return list(await asyncio.gather(*trials))
        finally:
            await cancel_all(trials)

    def _next_time(self, prompt: str, example: Example) -> int:
        self._times[key := key_of(name_of(prompt), example, 0)] += 1
        return self._times[key] - 1

    async def _one(self, prompt: str, example: Example, nth: int) -> Scored:
        known = self._journal.rollouts.get(key_of(name_of(prompt), example, nth))
        if known is not None:
            self.calls[example.purpose] += 1
            return known
        which = Which(example.split, example.index, nth, 1)
        tried = PromptedEnvironment(self._environment, prompt, columns=self._columns)
        try:
            scored = _scored(await self._policy.rollout(cast(Environment, tried), which), prompt, example, nth)
        except RolloutFailed as failure:
            scored = _failed(failure, prompt, example, nth, asked=tried.asked)
        self._journal.add_rollout(scored)
        self.calls[example.purpose] += 1
        return scored


def _scored(turned: Turned, prompt: str, example: Example, nth: int) -> Scored:
    done = turned.done
    return Scored.of(
        done,
        example=example.index,
        rollout=nth,
        tokens=turned.num_sampled or 0,
        turns=turned.num_turns,
        truncated=turned.truncated,
        stop=turned.stop,
        purpose=example.purpose,
        split=example.split,
        prompt_name=name_of(prompt),
        nth=nth,
        columns=done.columns,
        state_keys=done.state_keys,
    )


def _failed(failure: RolloutFailed, prompt: str, example: Example, nth: int, *, asked: Messages) -> Scored:
    return Scored(
        example_id=example.index,
        reward=None,
        prompt=asked,
        example=example.index,
        rollout=nth,
        error=str(failure),
        traceback=failure.traceback,
        purpose=example.purpose,
        split=example.split,
        prompt_name=name_of(prompt),
        nth=nth,
    )
