"""Tool calls out of a model's text, in the hermes form: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from trireme.orchestrator.environments.wire import ToolCall

BEGIN, END = "<tool_call>", "</tool_call>"


def split_tool_calls(text: str, turn: int) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls. A call that is no JSON stays text: the environment will see it.

    Args:
        turn: its number makes the ids of the calls unique within a rollout.
    """
    if BEGIN not in text:
        return text, []
    calls: list[ToolCall] = []
    said = []
    for before, written in _parts(text):
        said.append(before)
        if written is None:
            continue
        try:
            name, arguments = _read_call(written.strip())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            said.append(f"{BEGIN}{written}{END}")
        else:
            calls.append(ToolCall(id=call_id(turn, len(calls)), name=name, arguments=arguments))
    return "".join(said).strip(), calls


def _parts(text: str) -> Iterator[tuple[str, str | None]]:
    """(text before a call, what stands between its tags); last the text after all.

    One walk over the text, whatever a model writes: a pattern that backtracks takes hours over a tag that nothing
    closes, with blanks after it.
    """
    place = 0
    while (begin := text.find(BEGIN, place)) >= 0 and (end := text.find(END, begin + len(BEGIN))) >= 0:
        yield text[place:begin], text[begin + len(BEGIN) : end]
        place = end + len(END)
    yield text[place:], None


def _read_call(written: str) -> tuple[str, str]:
    call = json.loads(written)
    name, arguments = str(call["name"]), call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    (name + text).encode()  # half a surrogate pair can be written in JSON, and cannot be sent
    return name, text


def call_id(turn: int, place: int) -> str:
    """Nine letters and digits, which is what the strictest chat templates (Mistral's) want. The same in each replay."""
    return f"call{turn:03d}{place:02d}"
