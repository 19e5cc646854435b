"""Words of the command line: verbs, files with `@`, flags with their values, and types for `argparse`.

Example:
    rl @ a.toml --trainer @ t.toml --max-steps 20 --resume
    # TypedFile("a.toml"), TypedFile("t.toml", scope=("trainer",)), TypedFlag(("max_steps",), ("20",)), …
"""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from trireme.base.errors import ConfigError

HELP = ("--help", "-h")

OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_][\w@-]*(?:\.[\w@-]+)+)=(.*)|(~)([A-Za-z_][\w.@-]*)(?:=.*)?", re.DOTALL)
"""A word of Hydra: `a.b=value`, `+a.b=value`, `++a.b=value`, `~a.b`."""


def is_yaml_run(argv: list[str]) -> bool:
    """Return whether words name a YAML file, or are overrides of Hydra."""
    if any(word in HELP for word in argv):
        return False
    return any(word.removeprefix("@").endswith((".yaml", ".yml")) or OVERRIDE.fullmatch(word) for word in argv)


def choose_verb(program: str, lines: Mapping[str, str], argv: list[str], advice: str = "") -> str:
    """Return the verb that was typed. With `--help`, or without any, print the list of verbs and end.

    Args:
        lines: what each verb does.
        advice: for a word that is like none of them.

    Raises: ConfigError if there is no such verb.
    """
    if not argv or argv[0] in HELP:
        width = max(map(len, lines))
        shown = [f"  {name:{width}}  {line}" for name, line in lines.items()]
        print(f"usage: {program} VERB ...", "", *shown, "", f"`{program} VERB --help` describes each.", sep="\n")
        raise SystemExit(0 if argv else ConfigError.exit_code)
    if argv[0] in lines:
        return argv[0]

    near = get_close_matches(argv[0], lines, n=1)
    hint = f"Did you mean `{program} {near[0]}`?" if near else advice or f"See `{program} --help`."
    raise ConfigError(f"there is no `{program} {argv[0]}` - expected one of {', '.join(lines)}. {hint}")


@dataclass(frozen=True)
class TypedFile:
    name: str
    scope: tuple[str, ...] = ()  # the table that the file fills; the whole run if empty


@dataclass(frozen=True)
class TypedFlag:
    path: tuple[str, ...]
    values: tuple[str, ...]  # the words after it, up to the next flag or file
    name: str  # the flag as the user typed it, for messages


FILE_ENDINGS = (".toml", ".json", ".yaml", ".yml")


def mark_file(words: list[str]) -> list[str]:
    """Put `@` before the one file of a command that takes it without, at any place among the flags.

    Example:
        mark_file(["--resume", "run.toml", "--max-steps", "20"])  # ["--resume", "@", "run.toml", "--max-steps", "20"]
    """
    if any(word.startswith("@") for word in words):
        return words
    bare = [place for place, word in enumerate(words) if not word.startswith("-")]
    named = [place for place in bare if words[place].endswith(FILE_ENDINGS)]
    # A word right after a flag may be its value.
    alone = [place for place in named if place == 0 or not words[place - 1].startswith("--") or "=" in words[place - 1]]
    # Take what can only be the file, else the first word, else a value that looks like a file.
    found = [*alone, *(place for place in bare if place == 0), *named][:1]
    return [*words[: found[0]], "@", *words[found[0] :]] if found else words


def parse_arguments(argv: list[str]) -> list[TypedFile | TypedFlag]:
    """Return files and flags in the order in which they were typed. A flag takes the words up to the next one.

    Raises: ConfigError if a word is neither.
    """
    left, found = list(argv), list[TypedFile | TypedFlag]()

    # The table named before `@`, as in `--trainer @ t.toml`: it holds for the files that follow, up to the next flag.
    scope: tuple[str, ...] = ()

    while left:
        word = left.pop(0)
        if word.startswith("@"):
            if word == "@" and (not left or left[0].startswith("--")):
                raise ConfigError("`@` is the last word - expected a file after it. Write `@ config.toml`.")
            found.append(TypedFile(word[1:] or left.pop(0), scope))
        elif re.match(r"-\w", word):
            raise ConfigError(f"`{word}` is no flag - flags begin with two dashes. See `--help` for all of them.")
        elif not word.startswith("--"):
            raise ConfigError(
                f"`{word}` stands alone - expected `@ file` or `--key value`. If it is a file, write `@ {word}`."
            )
        elif left and left[0].startswith("@") and "=" not in word:
            scope = _to_path(word)
        else:
            # `--key=value` has one value. Otherwise all words up to the next flag or file are its values.
            name, equals, value = word.partition("=")
            values = [value] if equals else []
            while left and not equals and not left[0].startswith(("--", "@")) and left[0] not in HELP:
                values.append(left.pop(0))
            found.append(TypedFlag(_to_path(name), tuple(values), name))
            scope = ()
    return found


def _to_path(name: str) -> tuple[str, ...]:
    return tuple(name.removeprefix("--").replace("-", "_").split("."))


# Types for `argparse`.


Number = TypeVar("Number", int, float)


def _number(read: Callable[[str], Number], is_allowed: Callable[[Number], bool], words: str) -> Callable[[str], Number]:
    def convert(text: str) -> Number:
        with suppress(ValueError):
            if is_allowed(value := read(text)):
                return value
        raise ArgumentTypeError(f"{text!r} is not {words}")

    return convert


positive_int = _number(int, lambda value: value >= 1, "a whole number of at least 1")
count = _number(int, lambda value: value >= 0, "a whole number of at least 0")
positive = _number(float, lambda value: 0 < value < math.inf, "a number above 0")


def json_table(example: str) -> Callable[[str], dict[str, Any]]:
    """Return a type that reads a JSON object. Its error message shows the example."""

    def read(text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentTypeError(f"{text!r} is no JSON ({error}); write '{example}'") from None
        if not isinstance(value, dict):
            raise ArgumentTypeError(f"{text!r} is no JSON object; write '{example}'")
        return value

    return read
