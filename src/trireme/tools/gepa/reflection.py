"""Describe rollouts to the reflection model, and ask it one question at a time.

It answers through the same policy objects that answer rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from trireme.base.errors import ConfigError, Refused
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.journal.message_text import content_text
from trireme.orchestrator.environments.open_rollout import AskPolicy, RolloutFailed
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, RunTask
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.tools.conversation import tool_calls
from trireme.tools.environments.policy import RolloutPolicy
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.prompts import SYSTEM
from trireme.tools.gepa.records import PromptRollout, Records, Reflection, name_of

MIN_FEEDBACK_CHARS = 250
"""A question whose texts are shorter than this is not shortened further."""
TOO_LONG = "too long"
SHOWN_TRACEBACK = 6  # lines
VISIBLE = ("tool_calls", "answer", "info", "metrics", "stop")
"""State columns that every rollout has, as they can be seen from outside of the environment."""


class OneQuestion:
    """An environment whose rollouts ask one question; the answer is the completion."""

    name = "reflection"
    group_rewards = uses_gateway = False

    def __init__(self, question: str) -> None:
        self.config = EnvironmentConfig(id=self.name)
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": question}]

    async def run(
        self, task: RunTask, ask: AskPolicy, *, on_retry: Callable[[], None] = lambda: None, **more: Any
    ) -> Done:
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


async def reflect(
    policy: RolloutPolicy, records: Records[Reflection], render: Callable[[int], str], *, chars: int
) -> Reflection:
    """Ask what `render` makes of texts of at most `chars` characters, and of half as many while that does not fit.

    Raises: Refused where the shortest question does not fit; TriremeError where no other question would get an answer.
    """
    while True:
        question = render(chars)
        name, answer, error = name_of(question), "", None
        nth = records.next_time(name)
        reflection = records.lines.get((name, nth))  # where an earlier process asked it
        if reflection is None:
            try:
                answer = await ask_once(policy, question, number=len(records.lines))
            except RolloutFailed as failure:
                error = f"{TOO_LONG}: {failure.error}" if failure.stage == TOO_LONG else failure.error
            reflection = Reflection(question_name=name, nth=nth, question=question, answer=answer, error=error)
            records.add(reflection)
        if reflection.error is None or not reflection.error.startswith(TOO_LONG):
            return reflection
        chars //= 2
        if chars < MIN_FEEDBACK_CHARS:
            raise Refused(
                f"A question to {policy.name} does not fit into its context, even with texts of {2 * chars} "
                f"characters per example ({reflection.error}) - expected room for `minibatch_size` examples. Name a "
                "`--reflection-model` with a longer context, or lower `--minibatch-size`."
            )


# feedback


def feedback_on(rollout: PromptRollout, config: GepaConfig, *, chars: int) -> dict[str, Any]:
    """Return one record of the reflective data set. Its keys become headings.

    Args:
        chars: the longest text; of longer ones the middle is left out.

    Example:
        {"Inputs": "user: 2 + 2?", "Generated Outputs": "assistant: 5",
         "Feedback": {"Reward": "0 of 1", "Components of the reward": {"exact": "0"}, "Right answer": "4"}}
    """
    inputs = {"Inputs": _shortened(_conversation(rollout.prompt), chars)}
    feedback: dict[str, Any] = {}
    if rollout.error is not None:
        feedback["Reward"] = "0, because the rollout failed"
        feedback["Error"] = _shortened(rollout.error, chars)
        if tail := "\n".join(rollout.traceback.strip().splitlines()[-SHOWN_TRACEBACK:]):
            feedback["Where"] = _shortened(tail, chars)
        return (inputs if rollout.prompt else {}) | {"Feedback": feedback}
    perfect = config.perfect_score
    feedback["Reward"] = f"{rollout.score:.4g}" + (f" of {perfect:g}" if perfect is not None else "")
    if rollout.metrics:
        feedback["Components of the reward"] = {name: f"{value:.4g}" for name, value in rollout.metrics.items()}
    if rollout.answer is not None:
        feedback["Right answer"] = _shortened(rollout.answer, chars)
    if rollout.truncated:
        feedback["Cut off"] = "the assistant ran out of tokens, or the conversation no longer fit"
    if rollout.stop:
        feedback["Ended by"] = rollout.stop
    for name in config.state_columns:
        feedback[name] = _shortened(_column(rollout, name), chars)
    outputs = _shortened(_conversation(rollout.completion), chars)
    return inputs | {"Generated Outputs": outputs, "Feedback": feedback}


def has_column(rollout: PromptRollout, name: str) -> bool:
    return name in rollout.columns or name in VISIBLE


def _column(rollout: PromptRollout, name: str) -> str:
    """Return the environment's own column as text, else what can be seen of it from outside."""
    if name in rollout.columns:
        value = rollout.columns[name]
    elif name == "tool_calls":
        value = [call for message in rollout.completion for call in message.get("tool_calls") or []]
    else:
        value = getattr(rollout, name) if name in VISIBLE else "(not in the environment's state)"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _conversation(messages: Sequence[dict[str, Any]]) -> str:
    """Return the messages as text, without the system message: that is the prompt in question."""
    shown = []
    for message in messages:
        if message.get("role") not in SYSTEM:
            lines = [content_text(message["content"])] if message.get("content") else []
            lines += [f"[calls {call.name}({call.arguments})]" for call in tool_calls(message)]
            shown.append(f"{message.get('role')}: " + "\n".join(lines))
    return "\n\n".join(shown)


def _shortened(text: str, chars: int) -> str:
    """Return the beginning and the end of a text that is too long."""
    if len(text) <= chars:
        return text
    half = max(1, chars // 2)
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
