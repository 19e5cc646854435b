"""What the reflection model is told of a rollout: what was asked, what was said, what it earned, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trireme.tools.gepa.journal import Scored
from trireme.tools.gepa.prompted import SYSTEM

SHOWN_TRACEBACK = 6  # lines


def feedback_on(scored: Scored, *, columns: Sequence[str], perfect_score: float | None, longest: int) -> dict[str, Any]:
    """One record of the reflective data set; its keys become headings.

    Args:
        longest: characters of each text.

    Example:
        {"Inputs": "user: 2 + 2?", "Generated Outputs": "assistant: 5",
         "Feedback": {"Reward": "0 of 1", "Components of the reward": {"exact": "0"}, "Right answer": "4"}}
    """
    if scored.error is not None:
        inputs = {"Inputs": _shown(_conversation(scored.prompt), longest)} if scored.prompt else {}
        return inputs | {"Feedback": _of_failure(scored, longest)}
    return {
        "Inputs": _shown(_conversation(scored.prompt), longest),
        "Generated Outputs": _shown(_conversation(scored.completion), longest),
        "Feedback": _of_reward(scored, columns, perfect_score, longest),
    }


def _of_failure(scored: Scored, longest: int) -> dict[str, str]:
    tail = "\n".join(scored.traceback.strip().splitlines()[-SHOWN_TRACEBACK:])
    said = {"Reward": "0, because the rollout failed", "Error": _shown(str(scored.error), longest)}
    return said | ({"Where": _shown(tail, longest)} if tail else {})


def _of_reward(scored: Scored, columns: Sequence[str], perfect: float | None, longest: int) -> dict[str, Any]:
    told: dict[str, Any] = {"Reward": f"{scored.score:.4g}" + (f" of {perfect:g}" if perfect is not None else "")}
    if scored.metrics:
        told["Components of the reward"] = {name: f"{value:.4g}" for name, value in scored.metrics.items()}
    if scored.answer is not None:
        told["Right answer"] = _shown(scored.answer, longest)
    if scored.truncated:
        told["Cut off"] = "the assistant ran out of tokens, or the conversation no longer fit"
    if scored.stop:
        told["Ended by"] = scored.stop
    return told | {name: _shown(_text(state_column(scored, name)), longest) for name in columns}


def state_column(scored: Scored, name: str) -> Any:
    """The environment's own, else what of that name can be seen from outside: its calls of tools, or its facts."""
    if name in scored.columns:
        return scored.columns[name]
    if name == "tool_calls":
        return [call for message in scored.completion for call in message.get("tool_calls") or []]
    seen = {"answer": scored.answer, "info": scored.info, "metrics": scored.metrics, "stop": scored.stop}
    return seen.get(name, "(not in the environment's state)")


def has_column(scored: Scored, name: str) -> bool:
    return name in scored.columns or name in ("tool_calls", "answer", "info", "metrics", "stop")


def _conversation(messages: Sequence[dict[str, Any]]) -> str:
    """Without its system message, which is the prompt in question."""
    return "\n\n".join(_said(message) for message in messages if message.get("role") not in SYSTEM)


def _said(message: dict[str, Any]) -> str:
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    called = [f"[calls {call.get('name')}({call.get('arguments')})]" for call in calls]
    content = [_text(message["content"])] if message.get("content") else []
    return f"{message.get('role')}: " + "\n".join([*content, *called])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _shown(text: str, longest: int) -> str:
    """Its beginning and its end, where it is too long."""
    if len(text) <= longest:
        return text
    half = max(1, longest // 2)
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
