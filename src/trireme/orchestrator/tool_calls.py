"""Tool calls out of a model's text, in the hermes form: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
import re

from trireme.orchestrator.environments.wire import ToolCall

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def split_tool_calls(text: str, prefix: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls. A call that is no JSON stays text: the environment will see it.

    Args:
        prefix: makes the ids of the calls unique within a rollout.
    """
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match.group(1))
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError):
            return match.group(0)
        text_arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(ToolCall(id=f"{prefix}-{len(calls)}", name=str(name), arguments=text_arguments))
        return ""

    return _CALL.sub(take, text).strip() if "<tool_call>" in text else text, calls
