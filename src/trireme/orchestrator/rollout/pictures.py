"""Pictures of conversations as they enter a run: a data URI becomes a file, and the message names its digest.

{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,…"}}    as a worker or an agent program asks
{"type": "image_url", "image_url": {"url": "picture:9f…"}}                 in trajectories and in the journal
{"type": "image"}                                                         as a chat template is given it
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trireme.algo.pictures import PictureRules
from trireme.config.model.vision import MOST_PICTURES
from trireme.journal.message_text import PREFIX, content_text, picture_url, picture_urls
from trireme.journal.pictures import PictureFiles, from_data_uri, size_of, to_data_uri, to_png
from trireme.messages import Picture

Message = dict[str, Any]

LARGEST_SUM = 64 << 20  # bytes of one conversation's pictures, as PNG files
DECODERS = 4
"""Threads that decode pictures. Each may hold one of 64 million pixels, which takes half a gigabyte."""

KEPT_URIS = 4096  # data URIs whose digests are known


@dataclass(eq=False)
class ConversationPictures:
    """The pictures of all rollouts of a run, or of an evaluation."""

    rules: PictureRules
    files: PictureFiles
    write: Callable[[Callable[[], str]], str] = lambda add: add()  # calls what writes a picture, once there is room

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(DECODERS, "pictures")
        self._known: dict[bytes, asyncio.Future[str]] = {}  # digests of pictures by the hash of their data URI
        self.grid = lru_cache(1 << 16)(self._grid)

    async def read(self, messages: list[Message], urls: list[str]) -> list[Message]:
        """Return messages that name the digests of these of their pictures, which are on disk by then.

        Raises:
            ValueError: one is no picture or has no data URI, or there are too many or too large ones.
            DeadlineExceeded: the disk was full for too long.
        """
        if len(urls) > MOST_PICTURES:
            raise ValueError(
                f"a conversation with {len(urls)} pictures - expected at most {MOST_PICTURES}. Show fewer."
            )
        digests = {url: await self._digest_of(url) for url in urls}
        if (size := sum(self.files.path(digest).stat().st_size for digest in digests.values())) > LARGEST_SUM:
            raise ValueError(
                f"a conversation with pictures of {size} bytes - expected at most {LARGEST_SUM}. Scale them down."
            )
        return [_with_digests(message, digests) for message in messages]

    async def _digest_of(self, url: str) -> str:
        """Decode a picture and write it to disk, once for all rollouts that show it."""
        # a conversation sends its pictures again with each turn, and the rollouts of a group show the same ones
        key = hashlib.sha256(url.encode()).digest()
        if key not in self._known:
            # the URI that came first makes room; its picture stays on disk
            if len(self._known) >= KEPT_URIS:
                del self._known[next(iter(self._known))]
            self._known[key] = asyncio.get_running_loop().run_in_executor(self._threads, self._keep, url)
        try:
            # shielded: other rollouts wait for the same picture, though this one may be cancelled
            return await asyncio.shield(self._known[key])
        except Exception as error:
            # a ValueError is kept: the same bytes would be no usable picture the next time either
            if not isinstance(error, ValueError):
                self._known.pop(key, None)
            raise

    def _keep(self, url: str) -> str:
        png = to_png(from_data_uri(url))
        # raises ValueError for a shape that the model cannot take, before anything is written
        self.rules.grid(*size_of(png))
        return self.write(lambda: self.files.add(png))

    def _grid(self, digest: str) -> tuple[int, int]:
        """Return rows and columns of a picture's image tokens."""
        return self.rules.grid(*size_of(self.files.read(digest)))

    async def content_parts(self, pictures: Sequence[Picture]) -> list[dict[str, str]]:
        """Return the pictures of a prompt as an engine is sent them."""
        run = asyncio.get_running_loop().run_in_executor
        files = [await run(self._threads, self.files.read, picture.digest) for picture in pictures]
        return [{"type": "image_url", "url": to_data_uri(file)} for file in files]


async def read_messages(messages: list[Message], pictures: ConversationPictures | None) -> list[Message]:
    """Return messages with text for a content that has only text parts, and with digests for pictures.

    Raises: ValueError as `ConversationPictures.read`, or if the run has no pictures.
    """
    if not any(isinstance(message.get("content"), list) for message in messages):
        return messages
    # text parts alone become one text, the form that every chat template can render
    messages = [
        message | {"content": content_text(message["content"])}
        if isinstance(message.get("content"), list) and not picture_urls([message])
        else message
        for message in messages
    ]
    if not (urls := picture_urls(messages)):
        return messages
    if pictures is None:
        raise ValueError(
            f"a conversation with {len(urls)} pictures, and the model's vision encoder is not in use - expected text "
            "alone. Set `[model.vlm]` for a model that sees, or leave the pictures out."
        )
    return await pictures.read(messages, urls)


async def read_transcript(messages: list[Message], pictures: ConversationPictures | None) -> list[Message]:
    """Return what an environment reports of a conversation, with digests for the pictures in its data URIs.

    Raises: ValueError as `ConversationPictures.read`.
    """
    if pictures is None:
        return messages
    urls = [url for url in picture_urls(messages) if url.startswith("data:")]
    return await pictures.read(messages, urls) if urls else messages


def _with_digests(message: Message, digests: dict[str, str]) -> Message:
    if not isinstance(parts := message.get("content"), list):
        return message
    named = [digests.get(picture_url(part) or "") for part in parts]
    return message | {
        "content": [
            {"type": "image_url", "image_url": {"url": PREFIX + digest}} if digest else part
            for part, digest in zip(parts, named, strict=True)
        ]
    }
