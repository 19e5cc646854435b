"""The pictures of conversations: from data URIs, files or a data set's columns into PNG files in the run's folder."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from trireme.algo.pictures import PictureRules
from trireme.base.errors import ConfigError
from trireme.journal.pictures import LARGEST_FILE, from_data_uri, size_of, to_png

Message = Mapping[str, Any]
Grid = tuple[str, int, int]  # digest of a picture, and rows and columns of its tokens

KINDS = ("image_url", "image")  # types of parts that show a picture
TAG = "<image>"  # in texts


@dataclass(frozen=True)
class PictureReader:
    """Reads the pictures of a run's data."""

    keep: Callable[[bytes], str]  # writes a PNG file and returns its digest
    rules: PictureRules

    def read(
        self, messages: Sequence[Message], images: Sequence[Any], folder: Path | None, where: str
    ) -> tuple[list[Message], list[tuple[Grid, ...]]]:
        """Return messages whose parts are as a template knows them, and the pictures of each.

        Args:
            images: the column of a data set. Each part `{"type": "image"}` without a picture takes the next one, and
                each `<image>` in a text.
            folder: the only one whose files are read; None if the data are no files.
            where: the place of the conversation, for error messages.

        Raises:
            ConfigError: a picture cannot be read, or `images` has another number than the messages show.
        """
        # Pictures are taken from the column in the order in which messages mention them.
        rest = iter(images)
        read, pictures = [], []
        try:
            for message in messages:
                parts, grids = self._parts(message.get("content"), rest, folder, has_images=bool(images))
                read.append({**message, "content": parts} if grids else message)
                pictures.append(tuple(grids))
            if left := len(list(rest)):
                raise ValueError(f'{left} of its `images` are in no message - expected {{"type": "image"}} for each')
        except ValueError as error:
            raise ConfigError(f"{where}: {error}. Correct the conversation, or leave it out.") from error
        return read, pictures

    def _parts(
        self, content: Any, rest: Iterator[Any], folder: Path | None, *, has_images: bool
    ) -> tuple[list[Any], list[Grid]]:
        grids: list[Grid] = []
        parts: list[Any] = []

        # A text is split at its tags only if there are pictures for them: it may be a text about HTML.
        if isinstance(content, str):
            content = _split(content) if has_images else []
        for part in content or []:
            if is_picture(part):
                given = next((part[kind] for kind in KINDS if part.get(kind)), None)
                png = to_png(_read(next(rest, None) if given is None else given, folder))
                grids.append((self.keep(png), *self.rules.grid(*size_of(png))))
                part = {"type": "image"}
            parts.append(part)
        return parts, grids


def _split(text: str) -> list[dict[str, str]]:
    """
    Example:
        _split("<image>Which?")  # [{"type": "image"}, {"type": "text", "text": "Which?"}]
    """
    first, *rest = text.split(TAG)
    parts = [{"type": "text", "text": first}]
    for each in rest:
        parts += [{"type": "image"}, {"type": "text", "text": each}]
    return [part for part in parts if part.get("text") != ""]


def is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def refuse_pictures(messages: Sequence[Message], images: Sequence[Any], where: str) -> None:
    """Refuse a conversation with pictures in a run without them, or whose prompt and completion are texts.

    Raises:
        ConfigError: it has one.
    """
    contents = [message.get("content") for message in messages]
    if images or any(is_picture(part) for content in contents if isinstance(content, list) for part in content):
        raise ConfigError(
            f"{where} shows a picture - expected messages, and the table `[model.vlm]`. Add the table to train a model "
            "that sees with pictures, or leave the conversation out."
        )


def _read(given: Any, folder: Path | None) -> bytes:
    """Return the file of a picture: given as a URL or path, as `{"url": …}`, `{"bytes": …}` or `{"path": …}`, or as
    the library of data sets decodes it.

    Raises:
        ValueError: it is none of these, or a file elsewhere, or one that cannot be read.
    """
    if isinstance(given, Mapping):
        given = next((given[key] for key in ("bytes", "url", "path") if given.get(key)), None)
    if isinstance(given, bytes):
        return given
    if isinstance(given, Image.Image):
        file = io.BytesIO()
        given.save(file, "PNG")
        return file.getvalue()
    if not isinstance(given, str):
        raise ValueError(f"{given!r} in place of a picture - expected a data URI or the path of a file")
    if given.lower().startswith("data:") or "://" in given:
        return from_data_uri(given)

    # Only files within the data's folder: an entry must not read others of this machine.
    path = (folder / given).resolve() if folder else None
    if not (folder and path and path.is_relative_to(folder.resolve()) and path.is_file()):
        raise ValueError(f"the picture {given[:200]!r} is no file - expected one in {folder or 'the data set itself'}")

    try:
        with open(path, "rb") as opened:
            return opened.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ValueError(f"the picture {path} cannot be read ({error.strerror})") from error
