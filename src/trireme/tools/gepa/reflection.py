"""Describe rollouts to the reflection model, and ask it one question at a time.

It answers through the same policy objects that answer rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from trireme.base.errors import PeerRefused
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.orchestrator.session.session import RolloutFailed
from trireme.tools.conversation import blocks, tool_calls
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.files import PromptRollout, Records, Reflection, name_of
from trireme.tools.policies.prompts import SYSTEM, TOO_LONG, OneQuestion
from trireme.tools.policies.selection import RolloutPolicy

MAX_CHARS, MIN_CHARS = 4000, 250
"""Longest text of an example in a first question, and the length below which texts are not shortened further."""


async def reflect(
    policy: RolloutPolicy, config: GepaConfig, records: Records[Reflection], render: Callable[[int], str]
) -> Reflection:
    """Ask what `render` makes of texts of at most so many characters, and of half as many while that does not fit.

    Raises: PeerRefused if the shortest question does not fit; TriremeError if no other question would get an answer.
    """
    chars = MAX_CHARS
    while True:
        question = render(chars)
        sampling = config.reflection_sampling.model_dump(mode="json")
        name, answer, error = name_of(config.reflection_model or config.model, sampling, question), "", None

        # Repeats of a question are numbered, so that a resumed search takes the recorded answers in their order.
        nth = records.next_time(name)
        if (name, nth) in records.lines:  # an earlier process asked it
            return records.lines[name, nth]

        spec = RolloutSpec("train", len(records.lines), 0, name=f"reflection-{len(records.lines)}")
        try:
            rollout = await policy.rollout(cast(Environment, OneQuestion(question)), spec)
            answer = str(rollout.completion[0]["content"])
        except RolloutFailed as failure:
            # Shorten texts instead of leaving examples out: the scores are of all of them.
            if failure.stage == TOO_LONG and chars > MIN_CHARS:
                chars //= 2
                continue
            if failure.stage == TOO_LONG:
                raise PeerRefused(
                    f"A question to {policy.name} does not fit into its context, even with texts of {chars} "
                    f"characters per example ({failure.error}) - expected room for `minibatch_size` examples. Name a "
                    "`--reflection-model` with a longer context, or lower `--minibatch-size`."
                ) from failure
            error = failure.error

        # A failure is an answer without text: the search continues with its next iteration.
        reflection = Reflection(name=name, nth=nth, question=question, answer=answer, error=error)
        records.add(reflection)
        return reflection


def feedback_on(rollout: PromptRollout, config: GepaConfig, *, chars: int) -> dict[str, Any]:
    """Return one record of the reflective data set. Its keys become headings.

    Args:
        chars: the longest text; of longer ones the middle is left out.

    Example:
        {"Inputs": "user: 2 + 2?", "Generated Outputs": "assistant: 5",
         "Feedback": {"Reward": "0 of 1", "Components of the reward": {"exact": "0"}, "Right answer": "4"}}
    """
    # A failed rollout has no conversation: its error is all there is to learn from.
    if rollout.error is not None:
        error = _shortened(rollout.error, chars)
        return {"Feedback": {"Reward": "0, because the rollout failed", "Error": error}}

    # The reflection model reads the keys as headings, so they are words and no field names.
    perfect = config.perfect_score
    feedback: dict[str, Any] = {"Reward": f"{rollout.score:.4g}" + (f" of {perfect:g}" if perfect is not None else "")}
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

    return {
        "Inputs": _shortened(_conversation(rollout.prompt), chars),
        "Generated Outputs": _shortened(_conversation(rollout.completion), chars),
        "Feedback": feedback,
    }


def _column(rollout: PromptRollout, name: str) -> str:
    """Return a field of the environment's state as text. `tool_calls` are read off the messages if it has none."""
    if name == "tool_calls" and name not in rollout.columns:
        value: Any = [call._asdict() for message in rollout.completion for call in tool_calls(message)]
    else:
        value = rollout.columns.get(name, "(not in the environment's state)")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _conversation(messages: Sequence[dict[str, Any]]) -> str:
    """Return the messages as text, without the system message: that is the prompt in question."""
    shown = blocks([message for message in messages if message.get("role") not in SYSTEM])
    return "\n\n".join(f"{block.heading}: {block.text}" for block in shown)


def _shortened(text: str, chars: int) -> str:
    """Return the beginning and the end of a text that is too long."""
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
