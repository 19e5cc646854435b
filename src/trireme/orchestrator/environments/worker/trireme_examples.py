"""The examples of a plain environment, checked when it is loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

Example = Mapping[str, Any]


def read_examples(source: Any, *, args: dict, name: str) -> list[Example]:
    """Args:
    source: a list, a function that returns one for these `args`, or None.
    """
    examples = list(source(**args) if callable(source) else source or [])
    for number, example in enumerate(examples):
        if not isinstance(example, Mapping) or "prompt" not in example:
            raise ValueError(
                f"Example {number} of {name} is {example!r:.120} - expected a dict with a `prompt` (text or chat "
                "messages) and usually an `answer` - name its fields so."
            )
        to_messages(example["prompt"])
    return examples


def to_messages(said: str | Mapping | Sequence[Mapping]) -> list[dict]:
    """Text, a chat message or several of them, as chat messages."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    messages = [said] if isinstance(said, Mapping) else said
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ValueError(
                f"A message of a prompt is {message!r:.120} - expected a dict with a `role` and text as `content` - "
                "leave out images, sound and other parts that are not text."
            )
    return [dict(message) for message in messages]
