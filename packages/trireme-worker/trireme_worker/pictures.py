"""Parts of messages that show pictures, as OpenAI's API has them: `image_url`, with the picture in a data URI.

A file of the environment's own folder becomes a data URI here. No other file is read, and nothing is fetched: a data
set that came from elsewhere decides what is in its messages, and must not reach what else is on this machine.
"""

import base64
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif", ".bmp": "bmp"}
"""The type of each picture file that is read, by the end of its name."""

LARGEST = 32 << 20  # bytes of the pictures of one conversation: they travel in one line
ALLOWED = "expected data:image/...;base64,..., or the path of a picture in the environment's folder"


def content_of(content: Any, *, number: int) -> str | list[dict] | None:
    """Return the content of the `number`th message as text, or as text and pictures if it has any.

    Raises: ValueError if it has parts of another kind.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"The content of message {number} is {content!r:.80} - expected text, or a list of parts.")
    parts = [_part(part, number) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, number: int) -> dict:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    # what a data set's columns add to a part (`"text": None`) is left out
    source = part.get("image_url") if kind == "image_url" else None
    url = source.get("url") if isinstance(source, Mapping) else source
    if not isinstance(url, str):
        raise ValueError(
            f"Message {number} has a part of type {kind!r} - expected "
            '{"type": "text", "text": ...} or {"type": "image_url", "image_url": {"url": ...}} - use an environment '
            "without sound, video and files: no model trained here reads them."
        )
    return {"type": "image_url", "image_url": {"url": url}}


def text_of(content: str | list[dict] | None) -> str:
    """Return the content of a message as text, with a word in the place of each picture."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] if part["type"] == "text" else "[picture]" for part in content)


def with_pictures(messages: list[dict], folder: Path) -> list[dict]:
    """Return messages whose pictures are all in them. They may show files of `folder`.

    Raises:
        ValueError: a picture is somewhere else, is none by its name, or they are too large together.
        OSError: a file cannot be read.
    """
    if not any(isinstance(message.get("content"), list) for message in messages):
        return messages
    messages, left = copy.deepcopy(messages), LARGEST
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if part["type"] == "image_url":
                uri = _data_uri(part["image_url"]["url"], folder, left)
                part["image_url"], left = {"url": uri}, left - len(uri) * 3 // 4
    return messages


def _data_uri(url: str, folder: Path, most: int) -> str:
    if url.startswith("picture:"):  # the orchestrator's name for one that it has, in a transcript of its gateway
        return url
    if not url.startswith("data:"):
        path = _allowed_file(url, folder)
        if (size := path.stat().st_size) <= most:
            return f"data:image/{TYPES[path.suffix.lower()]};base64,{base64.b64encode(path.read_bytes()).decode()}"
    elif not (url.startswith("data:image/") and ";base64," in url[:80]):
        raise ValueError(f"A picture is at {url[:80]!r} - {ALLOWED} - give it as one of these.")
    elif (size := len(url) * 3 // 4) <= most:
        return url
    raise ValueError(
        f"The pictures of a conversation have more than {LARGEST} bytes (one has {size}) - expected less - scale them "
        "down: models read far smaller ones."
    )


def _allowed_file(url: str, folder: Path) -> Path:
    """Return the path of a picture. Raises: ValueError if it is none of the folder, links resolved."""
    address, folder = urlsplit(url), folder.resolve()
    is_path = address.scheme in ("", "file") and not address.netloc
    # an absolute path replaces the folder, and links and `..` are resolved, so the check below sees the real file
    path = (folder / (unquote(address.path) if address.scheme else url)).resolve()
    if not is_path or not path.is_relative_to(folder) or path.suffix.lower() not in TYPES:
        raise ValueError(
            f"A picture is at {url[:200]!r} - {ALLOWED} ({folder}; {', '.join(TYPES)}) - copy it there, or put it into "
            "the message: nothing is fetched, and no other file is read."
        )
    return path
