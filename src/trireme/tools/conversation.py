"""What was said in a rollout, in order: text, reasoning, calls of tools and what they returned. Pure.

Messages are as chat APIs have them: `content` is a text or a list of parts, `tool_calls` hold a name and arguments,
reasoning comes as a key of its own or between `<think>` tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

BlockKind = Literal["text", "reasoning", "call", "result", "other"]
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
KNOWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", *REASONING_KEYS}
THINK = re.compile(r"\s*<think>(?P<inside>.*?)(?:</think>\s*|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A piece of a conversation, with its own heading.

    Example:
        Block("call", "assistant", "python", '{"code": "print(1)"}')
    """

    kind: BlockKind
    role: str
    name: str  # of the tool; otherwise empty
    text: str


def messages_of(value: Any, role: str) -> list[dict[str, Any]]:
    """A list of messages, whatever was written down; a text alone is a message of `role`."""
    if value is None or value == "":
        return []
    items = value if isinstance(value, list) else [value]
    return [
        item if isinstance(item, dict) else {"role": role, "content": item if isinstance(item, str) else _json(item)}
        for item in items
    ]


def text_of(message: dict[str, Any]) -> str:
    """Of its content; parts that are no text (an image) are named."""
    return _content(message.get("content"))


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return _json(content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("text")
        return text if isinstance(text, str) else f"[{part.get('type', 'part')}]"
    return _json(part)


def last_said(completion: Sequence[dict[str, Any]]) -> str:
    """The model's last words, or its last call of a tool."""
    for message in reversed(completion):
        if message.get("role") == "assistant":
            return next((block.text or block.name for block in reversed(list(blocks_of(message)))), "")
    return text_of(completion[-1]) if completion else ""


def blocks(messages: Sequence[dict[str, Any]]) -> list[Block]:
    """Of a whole conversation. Results of tools get the name of the call that they answer."""
    names: dict[str, str] = {}
    found: list[Block] = []
    for message in messages:
        names |= {str(call.get("id")): _call_name(call) for call in _calls(message)}
        found += blocks_of(message, names)
    return found


def blocks_of(message: dict[str, Any], names: dict[str, str] | None = None) -> Iterator[Block]:
    role = str(message.get("role", "?"))
    text = text_of(message)
    for key in REASONING_KEYS:
        if message.get(key):
            yield Block("reasoning", role, "", _content(message[key]))
    if role == "assistant" and (thought := THINK.match(text)):
        yield Block("reasoning", role, "", thought["inside"].strip("\n"))
        text = text[thought.end() :]
    if role in ("tool", "function"):
        answers = (names or {}).get(str(message.get("tool_call_id")), "")
        yield Block("result", role, str(message.get("name") or answers), text)
    elif text or not (_calls(message) or any(message.get(key) for key in REASONING_KEYS)):
        yield Block("text", role, "", text)
    for call in _calls(message):
        yield Block("call", role, _call_name(call), _arguments(call))
    if rest := {key: value for key, value in message.items() if key not in KNOWN_KEYS and value not in (None, "", [])}:
        yield Block("other", role, "", _json(rest))


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Some write each call down as a text of JSON."""
    calls = message.get("tool_calls")
    found = calls if isinstance(calls, list) else [calls] if calls else []
    return [call if isinstance(call, dict) else _read_call(call) for call in found]


def _read_call(text: Any) -> dict[str, Any]:
    try:
        call = json.loads(text)
    except (TypeError, ValueError):
        call = None
    return call if isinstance(call, dict) else {"name": "?", "arguments": text}


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _call_name(call: dict[str, Any]) -> str:
    return str(_function(call).get("name", "?"))


def _arguments(call: dict[str, Any]) -> str:
    """As lines `name: value` where they are an object, so that a program stands there as it was written."""
    given = _function(call).get("arguments")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return given
    if isinstance(given, dict):
        return "\n".join(_argument(str(name), value) for name, value in given.items())
    return "" if given is None else _json(given)


def _argument(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else _json(value)
    return f"{name}:\n{text}" if "\n" in text else f"{name}: {text}"


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def searchable(messages: Sequence[dict[str, Any]]) -> str:
    """All text of a conversation, for searching."""
    return "\n".join(f"{block.name} {block.text}" for block in blocks(messages))
