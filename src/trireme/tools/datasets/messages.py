"""Messages as columns of a table: the same keys in each, and only those that some message of the run has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
OPTIONAL = {
    "reasoning_content": pa.string(),
    "tool_calls": pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", FUNCTION)])),
    "tool_call_id": pa.string(),
    "name": pa.string(),
}
"""Beside `role` and `content`. Chat templates ask whether a key is there, so what no message has must not be."""


@dataclass(frozen=True)
class MessageTypes:
    """Of lists of messages: those of prompts, of completions, and of both in one."""

    prompt: pa.DataType
    completion: pa.DataType
    both: pa.DataType


def optional_keys(messages: Iterable[dict[str, Any]]) -> set[str]:
    """Those that some message has."""
    return {key for message in messages for key in OPTIONAL if message.get(key)}


def message_types(prompt: set[str], completion: set[str]) -> MessageTypes:
    return MessageTypes(_list_of(prompt), _list_of(completion), _list_of(prompt | completion))


def _list_of(keys: set[str]) -> pa.DataType:
    fields = [("role", pa.string()), ("content", pa.string())]
    return pa.list_(pa.struct(fields + [(key, kind) for key, kind in OPTIONAL.items() if key in keys]))


def to_rows(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_to_row(message) for message in messages]


def _to_row(message: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"role": str(message.get("role", "")), "content": _content(message.get("content"))}
    row |= {key: str(message[key]) for key in ("reasoning_content", "tool_call_id", "name") if message.get(key)}
    if message.get("tool_calls"):
        row["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return row


def _content(content: Any) -> str:
    """Parts that are no text have no place in a column of texts, and are named."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
        return "\n".join(str(part.get("text") or f"[{part.get('type', 'part')}]") for part in parts)
    return content if isinstance(content, str) else json.dumps(content, default=str)


def _read(call: Any) -> dict[str, Any]:
    """Some write a call down as a text of JSON; what is none is kept as what was called with."""
    try:
        given = json.loads(call)
    except (TypeError, ValueError):
        given = None
    return given if isinstance(given, dict) else {"arguments": str(call)}


def _call(call: Any) -> dict[str, Any]:
    """Arguments as a text of JSON: as the model wrote them, and of one type, whatever the tool."""
    given = call if isinstance(call, dict) else _read(call)
    function = given.get("function") or given
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {
        "id": str(given.get("id") or ""),
        "type": "function",
        "function": {"name": str(function.get("name", "")), "arguments": text},
    }
