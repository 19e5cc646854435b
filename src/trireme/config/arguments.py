"""Words of the command line: files with `@`, flags with their values, and types for `argparse`.

Example:
    rl @ a.toml --trainer @ t.toml --max-steps 20 --resume
    # TypedFile("a.toml"), TypedFile("t.toml", scope=("trainer",)), TypedFlag(("max_steps",), ("20",)), …
"""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trireme.base.errors import ConfigError

HELP = ("--help", "-h")


@dataclass(frozen=True)
class TypedFile:
    name: str
    scope: tuple[str, ...] = ()  # the table that the file fills; the whole run where empty


@dataclass(frozen=True)
class TypedFlag:
    path: tuple[str, ...]
    values: tuple[str, ...]  # the words after it, up to the next flag or file
    name: str  # as typed, for messages


FILE_ENDINGS = (".toml", ".json", ".yaml", ".yml")


def mark_file(words: list[str]) -> list[str]:
    """Put `@` before the one file of a command that takes it without, wherever it stands among flags.

    Example:
        mark_file(["--resume", "run.toml", "--max-steps", "20"])  # ["--resume", "@", "run.toml", "--max-steps", "20"]
    """
    if any(word.startswith("@") for word in words):
        return words
    bare = [place for place, word in enumerate(words) if not word.startswith("-")]
    named = [place for place in bare if words[place].endswith(FILE_ENDINGS)]
    alone = [place for place in named if not _takes_values(words[place - 1 : place])]
    found = [*alone, *(place for place in bare if place == 0), *named][:1]
    return [*words[: found[0]], "@", *words[found[0] :]] if found else words


def _takes_values(before: list[str]) -> bool:
    return any(word.startswith("--") and "=" not in word for word in before)


def parse_arguments(argv: list[str]) -> list[TypedFile | TypedFlag]:
    return list(_parse(list(argv)))


def _parse(left: list[str]) -> Iterator[TypedFile | TypedFlag]:
    scope: tuple[str, ...] = ()
    while left:
        word = left.pop(0)
        if word.startswith("@"):
            yield TypedFile(word[1:] or _file_name(left), scope)
        elif not word.startswith("--"):
            raise ConfigError(_stray(word))
        elif left and left[0].startswith("@") and "=" not in word:
            scope = _to_path(word)  # and of the files right after this one
        else:
            yield _parse_flag(word, left)
            scope = ()


def _file_name(left: list[str]) -> str:
    if not left or left[0].startswith("--"):
        raise ConfigError("`@` is the last word - expected a file after it. Write `@ config.toml`.")
    return left.pop(0)


def _parse_flag(word: str, left: list[str]) -> TypedFlag:
    name, equals, value = word.partition("=")
    values = [value] if equals else list(_take_values(left))
    return TypedFlag(_to_path(name), tuple(values), name)


def _take_values(left: list[str]) -> Iterator[str]:
    while left and not left[0].startswith(("--", "@")) and left[0] not in HELP:
        yield left.pop(0)


def _to_path(name: str) -> tuple[str, ...]:
    return tuple(name.removeprefix("--").replace("-", "_").split("."))


def _stray(word: str) -> str:
    if re.match(r"-\w", word):
        return f"`{word}` is no flag that exists - flags begin with two dashes. See `--help` for all of them."
    return f"`{word}` stands alone - expected `@ file` or `--key value`. If it is a file, write `@ {word}`."


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive(text: str) -> float:
    if (value := not_negative(text)) == 0:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def not_negative(text: str) -> float:
    if not 0 <= (value := _number(text)) < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def share(text: str) -> float:
    if not 0 < (value := _number(text)) <= 1:
        raise ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def json_table(example: str) -> Callable[[str], dict[str, Any]]:
    """
    Args:
        example: of what to write.
    """

    def read(text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is no JSON ({error}); write '{example}'") from None
        if not isinstance(value, dict):
            raise ArgumentTypeError(f"{text!r} is no JSON object; write '{example}'")
        return value

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
