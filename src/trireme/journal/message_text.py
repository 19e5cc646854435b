"""Chat messages: what a chat template is given of them, and their content (a text, or a list of parts of which some are
pictures) as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

PREFIX = "picture:"
"""The beginning of a URL that stands for a picture in the journal's messages; its digest follows."""

_URL = re.compile(rf"{PREFIX}([0-9a-f]{{64}})")
_LETTERS = 8  # of a digest that are shown


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it, in rollouts and in supervised training: with content, if only an
    empty text, and with the arguments of tool calls as objects."""
    out = dict(message)
    if out.get("content") is None:
        out["content"] = ""
    if calls := out.get("tool_calls"):
        out["tool_calls"] = []
        for call in calls:
            function = dict(call.get("function", call))
            if isinstance(arguments := function.get("arguments"), str):
                with suppress(ValueError, RecursionError):  # a model wrote it
                    function["arguments"] = json.loads(arguments)
            out["tool_calls"].append({"type": "function", "id": call.get("id"), "function": function})
    return out


def content_text(content: Any) -> str:
    """Return the text of a message's `content`. Parts that are no text become what they are: "[audio]".

    Example:
        content_text([{"type": "image_url", "image_url": {"url": "picture:9f3a…"}}, {"type": "text", "text": "Which?"}])
        # "[picture 64x64 9f3a1c2b…]\\nWhich?" if the part has its `size`, else "[picture 9f3a1c2b…]\\nWhich?"
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return as_text(content)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else as_text(part)
        if not isinstance(text, str):
            text = f"[{part.get('type', 'part')}]"
            if digest := picture_of(part):
                size = part["image_url"].get("size")
                text = " ".join(filter(None, ("[picture", size, f"{digest[:_LETTERS]}…]")))
        texts.append(text)
    return "\n".join(texts)


def picture_url(part: Any) -> str | None:
    """Return the URL of the picture that a part of a message shows; None for any other part."""
    image = part.get("image_url") if isinstance(part, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else None
    return url if isinstance(url, str) else None


def picture_urls(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the URLs of the pictures that messages show, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [url for part in parts if (url := picture_url(part)) is not None]


def picture_of(part: Any) -> str | None:
    """Return the digest of the picture that a part of the journal's messages shows; None for any other."""
    found = _URL.fullmatch(picture_url(part) or "")
    return found[1] if found else None


def pictures_in(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the digests of the pictures that messages of the journal show, in order."""
    return [found[1] for url in picture_urls(messages) if (found := _URL.fullmatch(url))]


def as_text(value: Any) -> str:
    """Return a text as it is, and anything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
