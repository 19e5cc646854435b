"""Sessions of an agent program in a check: why its conversations branch, and whether its turns are token-exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from trireme.journal.turns import TurnRecord, compare_turns, prompt_digest
from trireme.orchestrator.environments.open_rollout import AskPolicy
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, Reply, RunTask
from trireme.orchestrator.rollout.driver import RolloutOutcome


@dataclass(frozen=True)
class SessionReport:
    """The findings of a check about the sessions of an agent program."""

    turns: int
    branches: dict[str, int]  # conversations, by why each began
    continuing: int  # turns that continue a conversation and were compared
    drift: int  # of these, those that do not reproduce the tokens that were sampled


class SessionWatch:
    """An environment whose turns are kept, to be compared with the samples that a rollout would be trained on.

    Everything else is as in the environment that it is given.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._turns: dict[str, list[TurnRecord]] = {}  # by rollout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def run(
        self, task: RunTask, ask: AskPolicy, *, on_retry: Callable[[], None] = lambda: None, **more: Any
    ) -> Done:
        """Run a rollout, see `Environment.run`."""
        turns = self._turns[task.task] = []

        def restart() -> None:
            nonlocal turns
            turns = self._turns[task.task] = []
            on_retry()

        async def answer(question: Ask) -> Reply:
            reply = await ask(question)
            if reply.prompt_ids and reply.error is None and not question.only_counts:
                given: dict[str, Any] = {"ids": reply.completion_ids, "logprobs": reply.logprobs}
                prompt = prompt_digest(reply.prompt_ids)
                turns.append(TurnRecord(prompt=prompt, versions=[], finish_reason="", message={}, **given))
            return reply

        return await self._environment.run(task, answer, on_retry=restart, **more)

    def report(self, outcomes: Sequence[RolloutOutcome]) -> SessionReport | None:
        """Report on the rollouts that were scored; None where none had a turn, or the policy answers in text."""
        branches: Counter[str] = Counter()
        num_turns = continuing = drift = 0
        for outcome in outcomes:
            turns = self._turns.get(f"{outcome.spec.name}.{outcome.spec.attempt}")
            if outcome.rollout is None or not turns:
                continue
            num_turns += len(turns)
            branches.update(branch.why for branch in outcome.rollout.branches)
            # replies do not say which pictures their prompts had
            samples = [msgspec.structs.replace(sample, pictures=[]) for sample in outcome.rollout.samples]
            compared, _ = compare_turns(samples, turns, ("ids", "logprobs"))
            for before, turn in pairwise(compared):
                if not turn.is_first:
                    continuing += 1
                    drift += bool(before.difference or turn.difference)
        return SessionReport(num_turns, dict(branches.most_common()), continuing, drift) if num_turns else None
