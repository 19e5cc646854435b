"""Describe a rollout to the reflection model: the question, the answer, the reward, and its reasons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.prompts import SYSTEM
from trireme.tools.gepa.records import PromptRollout

SHOWN_TRACEBACK = 6  # lines
VISIBLE = ("tool_calls", "answer", "info", "metrics", "stop")
"""State columns that every rollout has, as they can be seen from outside of the environment."""


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
        feedback[name] = _shortened(_text(_column(rollout, name)), chars)
    outputs = _shortened(_conversation(rollout.completion), chars)
    return inputs | {"Generated Outputs": outputs, "Feedback": feedback}


def has_column(rollout: PromptRollout, name: str) -> bool:
    return name in rollout.columns or name in VISIBLE


def _column(rollout: PromptRollout, name: str) -> Any:
    """Return the environment's own column, else what can be seen of it from outside."""
    if name in rollout.columns:
        return rollout.columns[name]
    if name == "tool_calls":
        return [call for message in rollout.completion for call in message.get("tool_calls") or []]
    return getattr(rollout, name) if name in VISIBLE else "(not in the environment's state)"


def _conversation(messages: Sequence[dict[str, Any]]) -> str:
    """Return the messages as text, without the system message: that is the prompt in question."""
    shown = []
    for message in messages:
        if message.get("role") not in SYSTEM:
            calls = [call.get("function", call) for call in message.get("tool_calls") or []]
            lines = [_text(message["content"])] if message.get("content") else []
            lines += [f"[calls {call.get('name')}({call.get('arguments')})]" for call in calls]
            shown.append(f"{message.get('role')}: " + "\n".join(lines))
    return "\n\n".join(shown)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _shortened(text: str, chars: int) -> str:
    """Return the beginning and the end of a text that is too long."""
    if len(text) <= chars:
        return text
    half = max(1, chars // 2)
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
