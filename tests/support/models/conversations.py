"""Conversations to fine-tune on, as dictionaries and as lines of a file."""

import json
from pathlib import Path
from typing import Any

from trireme.trainer.sft.conversations import Completion, Conversation


def user(content: Any, **more: object) -> dict[str, Any]:
    return {"role": "user", "content": content} | more


def answer(content: Any, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


GREETING = [user("hi"), answer("yo")]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def call_of(name: str, arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CALL = call_of("f", {"x": 1})


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def chat(asked: str, answered: str) -> dict[str, Any]:
    return {"messages": [user(asked), answer(answered)]}


def messages(found: list[Conversation | Completion]) -> list[list[Any]]:
    return [list(one.messages) for one in found if isinstance(one, Conversation)]
