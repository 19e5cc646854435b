"""The reflection model: asked one question at a time, through whatever answers rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from trireme.base.errors import ConfigError, Refused
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.open_rollout import AskPolicy, RolloutFailed
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, RunTask
from trireme.orchestrator.rollout.driver import RolloutSpec
from trireme.tools.environments.policy import RolloutPolicy
from trireme.tools.gepa.journal import Journal, Reflected, name_of

SHORTEST = 250
"""Characters of a text of an example below which a question is not shortened any more."""


class TooLong(RolloutFailed):
    """The question does not fit into the reflection model's context."""


class OneQuestion:
    """The smallest environment: asks one question, and the answer is its completion."""

    name = "reflection"
    group_rewards = False

    def __init__(self, question: str) -> None:
        self.config = EnvironmentConfig(id=self.name)
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": question}]

    async def run(self, task: RunTask, ask: AskPolicy, *, restart_deadline: Callable[[], None] = lambda: None) -> Done:
        """Raises: RolloutFailed where there is no answer."""
        reply = await ask(Ask(task=task.task, call="1", messages=self._messages, sampling={}))
        if reply.error is not None:
            raise (TooLong if reply.error_kind == "overlong_prompt" else RolloutFailed)("rollout", reply.error)
        said = {"role": "assistant", "content": reply.content or ""}
        is_cut = reply.finish_reason == "length"
        shown = self._messages
        return Done(
            task=task.task, reward=0.0, metrics={}, prompt=shown, completion=[said], example_id=0, truncated=is_cut
        )


async def ask_once(policy: RolloutPolicy, question: str, *, number: int = 0) -> str:
    """Raises: RolloutFailed where there is no answer; TriremeError where there will be none."""
    asked = cast(Environment, OneQuestion(question))
    finished = await policy.rollout(asked, RolloutSpec("train", number, 0))
    return str(finished.done.completion[0]["content"])


async def greet(policy: RolloutPolicy, *, flag: str) -> None:
    """Found out now and not after an hour: a wrong key, a model that is not there.

    Raises: ConfigError.
    """
    try:
        await ask_once(policy, "Answer with one word: ready.")
    except RolloutFailed as failure:
        raise ConfigError(
            f"{policy.name} gives no answer to a first question ({failure.error}) - expected some. Correct `{flag}`, "
            "or the address and key that belong to it."
        ) from failure


class Teacher:
    """Asks, and remembers in the journal."""

    def __init__(self, policy: RolloutPolicy, journal: Journal) -> None:
        self._policy = policy
        self._journal = journal
        self._times: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self._policy.name

    async def answer(self, render: Callable[[int], str], *, longest: int) -> Reflected:
        """Asks what `render` makes of the longest text that it may show, and of less where that does not fit.

        Raises: Refused where the shortest question is still too long.
        """
        while True:
            question = render(longest)
            reflected = await self._ask(question)
            if reflected.error is None or not reflected.error.startswith(_TOO_LONG):
                return reflected
            longest //= 2
            if longest < SHORTEST:
                raise Refused(
                    f"A question to {self.name} does not fit into its context, even with texts of {2 * longest} "
                    f"characters per example ({reflected.error}) - expected room for `minibatch_size` examples. Name a "
                    "`--reflection-model` with a longer context, or lower `--minibatch-size`."
                )

    async def _ask(self, question: str) -> Reflected:
        name = name_of(question)
        nth = self._times[name] = self._times.get(name, -1) + 1
        known = self._journal.reflections.get((name, nth))
        if known is not None:
            return known
        reflected = await self._asked(question, name, nth)
        self._journal.add_reflection(reflected)
        return reflected

    async def _asked(self, question: str, name: str, nth: int) -> Reflected:
        answer, error = "", None
        try:
            answer = await ask_once(self._policy, question, number=len(self._journal.reflections))
        except TooLong as failure:
            error = f"{_TOO_LONG}: {failure.error}"
        except RolloutFailed as failure:
            error = failure.error
        return Reflected(question_name=name, nth=nth, question=question, answer=answer, error=error)


_TOO_LONG = "too long"
