"""Chat messages: what a chat template is given of them, and their content (a text, or a list of parts of which some are
pictures) as text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

PREFIX = "picture:"
"""The beginning of a URL that stands for a picture in the journal's messages; its digest follows."""

_URL = re.compile(rf"{PREFIX}([0-9a-f]{{64}})")
_LETTERS = 8  # letters of a digest that are shown
_PROBE = "probe0001"  # name and id of a call: some templates write the id only, some want nine letters and digits
_ARGUMENT = "probe0002"
_CALL = {"id": _PROBE, "function": {"name": _PROBE, "arguments": {_ARGUMENT: 1}}}


def form_for(render: Callable[[list[dict[str, Any]]], str]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the `for_template` with which `render` shows a tool call: the usual one if it does, or if none does.

    Templates of DeepSeek append arguments as text. With an empty content some of them show no call, or add an empty
    turn to it, and others show None as a word. So of the unusual forms it is the one with the shortest result.
    """

    def length(form: Callable[[Mapping[str, Any]], dict[str, Any]]) -> float:
        with suppress(Exception):  # a template may raise anything
            text = render([{"role": "user", "content": "?"}, form({"role": "assistant", "tool_calls": [_CALL]})])
            if _PROBE in text and _ARGUMENT in text:
                return len(text)
        return math.inf

    # Most templates take the usual form; the others are tried only if it shows no call.
    if length(for_template) < math.inf:
        return for_template
    forms = [partial(for_template, empty=empty, as_objects=parsed) for empty in ("", None) for parsed in (True, False)]
    return min(forms, key=length)


def for_template(message: Mapping[str, Any], *, empty: str | None = "", as_objects: bool = True) -> dict[str, Any]:
    """Return a message in a form that chat templates expect, in rollouts and in supervised training.

    Args:
        empty: the content of a message that has tool calls and no text. Other messages without one have an empty text.
        as_objects: the arguments of tool calls are objects, and not JSON as text.
    """
    out = dict(message)
    if out.get("content") in (None, ""):
        out["content"] = empty if out.get("tool_calls") else ""

    # Copied, never changed in place: the journal keeps the message as the environment gave it.
    if calls := out.get("tool_calls"):
        out["tool_calls"] = []
        for call in calls:
            function = dict(call.get("function", call))
            arguments = function.get("arguments")
            if as_objects and isinstance(arguments, str):
                with suppress(ValueError, RecursionError):  # the model wrote no JSON: text stays
                    function["arguments"] = json.loads(arguments)
            elif not as_objects:
                function["arguments"] = as_text(arguments or {})
            out["tool_calls"].append({"type": "function", "id": call.get("id"), "function": function})
    return out


def content_text(content: Any) -> str:
    """Return the text of a message's `content`. Parts that are no text become what they are: "[audio]".

    Example:
        content_text([{"type": "image_url", "image_url": {"url": "picture:9f3a…"}}, {"type": "text", "text": "Which?"}])
        # "[picture 9f3a1c2b…]\\nWhich?"
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
                text = f"[picture {digest[:_LETTERS]}…]"
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
