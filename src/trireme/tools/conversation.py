"""Messages of a rollout as blocks to read: text, reasoning, tool calls and tool results, in order. Pure.

Messages have the form of chat APIs: `content` is a text or a list of parts, `tool_calls` hold a name and arguments,
reasoning is a key of its own or is enclosed in `<think>` tags. Files of other tools deviate from that in every possible
way, so a value of an unexpected type is shown as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from trireme.journal.message_text import as_text, content_text, pictures_in

BlockKind = Literal["text", "reasoning", "call", "result", "other"]
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
KNOWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", *REASONING_KEYS}
THINK = re.compile(r"\s*<think>(?P<inside>.*?)(?:</think>\s*|\Z)", re.DOTALL)

KIND_WORDS = {"reasoning": "reasoning", "call": "calls", "result": "returned", "other": "also"}

Message = dict[str, Any]


class Block(NamedTuple):
    """A piece of a conversation with a heading of its own.

    Example:
        Block("call", "assistant", "python", 'code: print(1)')
    """

    kind: BlockKind
    role: str
    name: str  # name of the tool; empty in blocks of text
    text: str
    pictures: tuple[str, ...] = ()  # digests of those that the text names, in order

    @property
    def heading(self) -> str:
        """The actor and what it did: "assistant calls python", "tool returned python", "user"."""
        return " ".join(filter(None, (self.role, KIND_WORDS.get(self.kind), self.name)))


class ToolCall(NamedTuple):
    """A call of a tool as the model wrote it."""

    id: str
    name: str
    arguments: Any  # usually JSON as text

    def lines(self) -> str:
        """Return the arguments as lines `name: value`, so that a program keeps its line breaks."""
        given = _parse_json(self.arguments) if isinstance(self.arguments, str) else self.arguments
        if not isinstance(given, dict):
            return "" if self.arguments is None else as_text(self.arguments)
        texts = {str(name): as_text(value) for name, value in given.items()}
        return "\n".join(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}" for name, text in texts.items())


def messages_of(value: Any, role: str) -> list[Message]:
    """Return a list of messages for any `value`; a text alone becomes a message of `role`."""
    if value is None or value == "":
        return []
    items = value if isinstance(value, list) else [value]
    return [item if isinstance(item, dict) else {"role": role, "content": as_text(item)} for item in items]


def tool_calls(message: Message) -> list[ToolCall]:
    """Return the calls of a message. Some files hold each call as a text of JSON."""
    calls = message.get("tool_calls")
    found = []
    # some files hold one call instead of a list
    for given in calls if isinstance(calls, list) else [calls] if calls else []:
        call = given if isinstance(given, dict) else _parse_json(given)
        if not isinstance(call, dict):
            call = {"arguments": as_text(given)}
        function = call["function"] if isinstance(call.get("function"), dict) else call
        found.append(ToolCall(str(call.get("id") or ""), str(function.get("name", "")), function.get("arguments")))
    return found


def blocks(messages: Sequence[Message]) -> list[Block]:
    """Split a conversation into blocks. A tool's result gets the name of the call that it answers."""
    names: dict[str, str] = {}  # tool call id -> tool
    found: list[Block] = []
    for message in messages:
        role, text, calls = str(message.get("role", "?")), content_text(message.get("content")), tool_calls(message)
        pictures = tuple(pictures_in([message]))
        names |= {call.id: call.name for call in calls}
        # reasoning has a key of its own, or is at the beginning of the text
        thoughts = [content_text(message[key]) for key in REASONING_KEYS if message.get(key)]
        if role == "assistant" and (thought := THINK.match(text)):
            thoughts.append(thought["inside"].strip("\n"))
            text = text[thought.end() :]

        found += [Block("reasoning", role, "", thought) for thought in thoughts]
        # a tool's result names its call by id only
        if role in ("tool", "function"):
            name = message.get("name") or names.get(str(message.get("tool_call_id")), "")
            found.append(Block("result", role, str(name), text, pictures))
        elif text or not (calls or thoughts):
            found.append(Block("text", role, "", text, pictures))
        found += [Block("call", role, call.name or "?", call.lines()) for call in calls]
        # whatever else a message has is shown as it is
        rest = {key: value for key, value in message.items() if key not in KNOWN_KEYS and value not in (None, "", [])}
        if rest:
            found.append(Block("other", role, "", as_text(rest)))
    return found


def last_message_text(completion: Sequence[Message]) -> str:
    """Return the model's last text, or the name of the tool that it called last."""
    # a turn may end with a call and no text
    for message in reversed(completion):
        if message.get("role") == "assistant":
            return next((block.text or block.name for block in reversed(blocks([message]))), "")
    return content_text(completion[-1].get("content")) if completion else ""


def _parse_json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
