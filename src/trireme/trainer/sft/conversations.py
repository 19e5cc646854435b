"""What supervised data sets hold, in the forms that people have them in, made into one.

Which form an entry has, its keys say: `messages`, `conversations` (with `from` and `value`), or `prompt` and
`completion`, which are messages too, or texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trireme.base.errors import ConfigError

Message = Mapping[str, Any]

ASSISTANT = "assistant"
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "assistant": ASSISTANT,
    "bot": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_EXPECTED = (
    'expected {"messages": [{"role": "user", "content": "…"}, …]}, {"prompt": …, "completion": …}, or '
    '{"conversations": [{"from": "human", "value": "…"}, …]}. Correct it, or leave it out'
)


@dataclass(frozen=True)
class Conversation:
    """Messages, which the chat template renders."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    marks: tuple[bool | None, ...] = ()  # per message: whether it is to be learned from; None leaves that to its role
    where: str = ""

    def is_learned(self, index: int, roles: tuple[str, ...]) -> bool:
        mark = self.marks[index] if self.marks else None
        return self.messages[index]["role"] in roles if mark is None else mark


@dataclass(frozen=True)
class Completion:
    """Texts, taken as they are: no template is applied. The second is learned, and that it ends there."""

    prompt: str
    completion: str
    where: str = ""


def to_conversation(entry: Any, where: str) -> Conversation | Completion:
    """
    Args:
        where: the entry's place, for messages.

    Raises:
        ConfigError: it has none of the forms.
    """
    try:
        return _read(entry, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refused(where, f"is not a conversation ({_in_words(error)})") from error


def _read(entry: Any, where: str) -> Conversation | Completion:
    if "messages" in entry:
        return _from_messages(entry["messages"], entry, where)
    if "conversations" in entry:
        return _from_sharegpt(entry, where)
    if "prompt" in entry and "completion" in entry:
        return _from_pair(entry, where)
    raise ValueError(f"its keys are {', '.join(map(str, entry)) or 'none'}")


def _from_pair(entry: Mapping[str, Any], where: str) -> Conversation | Completion:
    prompt, completion = entry["prompt"], entry["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise _refused(where, "has an empty completion, so nothing to learn")
        return Completion(prompt, completion, where)
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    completion = [{"role": ASSISTANT, "content": completion}] if isinstance(completion, str) else completion
    return _from_messages([*prompt, *completion], entry, where, num_given=len(prompt))


def _from_sharegpt(entry: Mapping[str, Any], where: str) -> Conversation:
    messages = [_sharegpt_message(message) for message in entry["conversations"]]
    if isinstance(entry.get("system"), str) and entry["system"]:
        messages = [{"role": "system", "content": entry["system"]}, *messages]
    return _from_messages(messages, entry, where)


def _sharegpt_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if "role" in message:
        return dict(message)
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    if message["from"] == "function_call":
        return rest | {"role": ASSISTANT, "content": "", "tool_calls": _called(message["value"])}
    if message["from"] not in _SHAREGPT_ROLES:
        raise ValueError(f'"from": "{message["from"]}", one of {", ".join(_SHAREGPT_ROLES)} was expected')
    return rest | {"role": _SHAREGPT_ROLES[message["from"]], "content": message["value"]}


def _called(text: str) -> list[dict[str, Any]]:
    calls = json.loads(text)
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in (calls if isinstance(calls, list) else [calls])
    ]


def _from_messages(messages: Any, entry: Mapping[str, Any], where: str, *, num_given: int = 0) -> Conversation:
    """
    Args:
        num_given: how many of the first are not learned from, unless they say so themselves.
    """
    marks = [_mark(message) for message in messages]
    roles = [message["role"] for message in messages]
    for message in messages:
        if message.get("content") is None and not message.get("tool_calls") and message["role"] != "tool":
            raise _refused(where, f"has a message without content ({dict(message)})")
    if ASSISTANT not in roles[num_given:] and True not in marks:
        raise _refused(where, "has no assistant message, so nothing to learn")
    given = [False if mark is None and index < num_given else mark for index, mark in enumerate(marks)]
    return Conversation(tuple(map(_without_mark, messages)), _tools(entry), tuple(given), where)


def _mark(message: Message) -> bool | None:
    """`train` is true or false, `weight` 1 or 0: both are in use."""
    for key in ("train", "weight"):
        value = message.get(key)
        if value is not None and value not in (0, 1):
            raise ValueError(f'"{key}": {value!r}, one of true, false, 0 and 1 was expected')
        if value is not None:
            return bool(value)
    return None


def _without_mark(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in ("train", "weight")}


def _tools(entry: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Some data sets have them as text, since their columns can hold one shape of table only."""
    tools = entry.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else None
    return tuple(tools) if tools else None


def _refused(where: str, problem: str) -> ConfigError:
    return ConfigError(f"{where} {problem} - {_EXPECTED}.")


def _in_words(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
