"""Ask the reflection model one question at a time, through the same policy objects that answer rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from trireme.base.errors import ConfigError, Refused
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.open_rollout import AskPolicy, RolloutFailed
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, RunTask
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.tools.environments.policy import RolloutPolicy
from trireme.tools.gepa.records import Records, Reflection, name_of

MIN_FEEDBACK_CHARS = 250
"""A question whose texts are shorter than this is not shortened further."""
TOO_LONG = "too long"


class OneQuestion:
    """An environment whose rollouts ask one question; the answer is the completion."""

    name = "reflection"
    group_rewards = False

    def __init__(self, question: str) -> None:
        self.config = EnvironmentConfig(id=self.name)
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": question}]

    async def run(self, task: RunTask, ask: AskPolicy, *, on_retry: Callable[[], None] = lambda: None) -> Done:
        """Raises: RolloutFailed where there is no answer, with stage `TOO_LONG` where the question does not fit."""
        reply = await ask(Ask(task=task.task, call="1", messages=self._messages, sampling={}))
        if reply.error is not None:
            raise RolloutFailed(TOO_LONG if reply.error_kind == "overlong_prompt" else "rollout", reply.error)
        answer = {"role": "assistant", "content": reply.content or ""}
        return Done(
            task=task.task,
            reward=0.0,
            metrics={},
            prompt=self._messages,
            completion=[answer],
            example_id=0,
            truncated=reply.finish_reason == "length",
        )


async def ask_once(policy: RolloutPolicy, question: str, *, number: int = 0) -> str:
    """Raises: RolloutFailed where there is no answer; TriremeError where no other question would get one."""
    asked = cast(Environment, OneQuestion(question))
    rollout = await policy.rollout(asked, RolloutSpec("train", number, 0, name=f"reflection-{number}"))
    return str(rollout.completion[0]["content"])


async def check_answers(policy: RolloutPolicy, *, flag: str) -> None:
    """Ask one word, so that a wrong key or a missing model shows before the first rollout.

    Raises: ConfigError.
    """
    try:
        await ask_once(policy, "Answer with one word: ready.")
    except RolloutFailed as failure:
        raise ConfigError(
            f"{policy.name} did not answer a first question ({failure.error}) - expected an answer. Correct `{flag}`, "
            "or the address and key that belong to it."
        ) from failure


async def reflect(policy: RolloutPolicy, records: Records, render: Callable[[int], str], *, chars: int) -> Reflection:
    """Ask what `render` makes of texts of at most `chars` characters, and of half as many while that does not fit.

    Raises: Refused where the shortest question does not fit; TriremeError where no other question would get an answer.
    """
    while True:
        reflection = await _ask_recorded(policy, records, render(chars))
        if reflection.error is None or not reflection.error.startswith(TOO_LONG):
            return reflection
        chars //= 2
        if chars < MIN_FEEDBACK_CHARS:
            raise Refused(
                f"A question to {policy.name} does not fit into its context, even with texts of {2 * chars} "
                f"characters per example ({reflection.error}) - expected room for `minibatch_size` examples. Name a "
                "`--reflection-model` with a longer context, or lower `--minibatch-size`."
            )


async def _ask_recorded(policy: RolloutPolicy, records: Records, question: str) -> Reflection:
    """Return the recorded answer, where this question was asked in an earlier process."""
    name, answer, error = name_of(question), "", None
    nth = records.next_time(name)
    known = records.reflections.get((name, nth))
    if known is not None:
        return known
    try:
        answer = await ask_once(policy, question, number=len(records.reflections))
    except RolloutFailed as failure:
        error = f"{TOO_LONG}: {failure.error}" if failure.stage == TOO_LONG else failure.error
    reflection = Reflection(question_name=name, nth=nth, question=question, answer=answer, error=error)
    records.add_reflection(reflection)
    return reflection
