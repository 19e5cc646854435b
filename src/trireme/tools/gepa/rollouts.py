"""Prompts are tried on examples, each rollout at most once: what is in the journal is read from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.driver import Outcome, RolloutSpec, run_rollouts
from trireme.orchestrator.rollout.runner import Finished
from trireme.tools.environments.policy import RolloutPolicy
from trireme.tools.gepa.examples import Example
from trireme.tools.gepa.journal import Journal, Scored, key_of, name_of
from trireme.tools.gepa.prompted import PromptedEnvironment


class Trials:
    """Runs rollouts of one environment with one policy, and keeps count of how often each prompt met each example."""

    def __init__(
        self,
        environment: Environment,
        policy: RolloutPolicy,
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
        """Return one line per example, in order. A rollout that fails has a line too.

        Raises: TriremeError where no other rollout could go better: the key is wrong, the engine is gone.
        """
        name = name_of(prompt)
        tried = {
            RolloutSpec(example.split, example.index, self._next_time(prompt, example)): example for example in examples
        }
        prompted = {
            spec: PromptedEnvironment(self._environment, prompt, columns=self._columns)
            for spec, example in tried.items()
            if key_of(name, example, spec.rollout) not in self._journal.rollouts
        }

        async def roll_out(spec: RolloutSpec) -> Finished:
            return await self._policy.rollout(cast(Environment, prompted[spec]), spec)

        async def keep(outcome: Outcome) -> None:
            spec = outcome.spec
            more: dict[str, Any] = {"purpose": tried[spec].purpose, "split": spec.split}
            more |= {"prompt_name": name, "nth": spec.rollout}
            if outcome.finished is not None:
                more |= {"columns": outcome.finished.done.columns, "state_keys": outcome.finished.done.state_keys}
            elif outcome.failure is not None:
                more |= {"prompt": prompted[spec].asked, "traceback": outcome.failure.traceback}
            self._journal.add_rollout(Scored.of(outcome, **more))
            self.calls[tried[spec].purpose] += 1

        for spec, example in tried.items():
            self.calls[example.purpose] += spec not in prompted
        await run_rollouts(list(prompted), roll_out, keep, scored_together=False)
        return [self._journal.rollouts[key_of(name, example, spec.rollout)] for spec, example in tried.items()]

    def _next_time(self, prompt: str, example: Example) -> int:
        self._times[key := key_of(name_of(prompt), example, 0)] += 1
        return self._times[key] - 1
