"""Tool calls out of a model's text, in the hermes form: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
import re

from trireme.orchestrator.environments.wire import ToolCall

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def split_tool_calls(text: str, turn: int) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls. A call that is no JSON stays text: the environment will see it.

    Args:
        turn: its number makes the ids of the calls unique within a rollout.
    """
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        try:
            name, arguments = _read_call(match.group(1))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return match.group(0)
        calls.append(ToolCall(id=call_id(turn, len(calls)), name=name, arguments=arguments))
        return ""

    return _CALL.sub(take, text).strip() if "<tool_call>" in text else text, calls


def _read_call(written: str) -> tuple[str, str]:
    call = json.loads(written)
    name, arguments = str(call["name"]), call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    (name + text).encode()  # half a surrogate pair can be written in JSON, and cannot be sent
    return name, text


def call_id(turn: int, place: int) -> str:
    """Nine letters and digits, which is what the strictest chat templates (Mistral's) want. The same in each replay."""
    return f"call{turn:03d}{place:02d}"
