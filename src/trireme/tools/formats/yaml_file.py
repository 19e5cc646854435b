"""Read YAML files and Hydra's overrides as plain tables: nothing in them is executed, and their size is bounded.

Example:
    read_overrides(["a.b=1e-3", "+c=[x, y]", "~d"])  # sets a.b and c, and removes d
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from trireme.base.errors import ConfigError
from trireme.config.arguments import OVERRIDE
from trireme.config.nested import merged, nested, value_at

MOST_BYTES = 1 << 20
MOST_STEPS = 8  # interpolations that lead to others

_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")


class _Loader(yaml.SafeLoader):
    """Reads numbers such as `1e-6`, which YAML 1.1 takes for text, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key `{twice}` is there twice", node.start_mark)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: Any, index: Any) -> Any:
        # A few aliases of aliases expand to more than fits into memory.
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases (`*name`) are not read", mark)
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the table of a file. Raises: ConfigError if it is missing, too large, or no YAML of plain values."""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ConfigError(f"{path} has {size} bytes - expected a configuration of at most {MOST_BYTES}. Cut it.")
        table = load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}) - expected a YAML file. Correct the path.") from None
    except (yaml.YAMLError, RecursionError) as error:
        words = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path}: not YAML of plain values ({words}) - expected such. Correct it.") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} holds {type(table).__name__} - expected keys with values. Correct it.")
    return table


def load(text: str) -> Any:
    """Return the value of a text. Tags of Python are refused, as in every `SafeLoader`. Raises: yaml.YAMLError."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_overrides(words: list[str], below: dict[str, Any]) -> dict[str, Any]:
    """Return a table with Hydra's overrides applied, in the order in which they were typed.

    Raises: ConfigError for a word that is none, or a value that is no YAML.
    """
    table = below
    for word in words:
        match = OVERRIDE.fullmatch(word)
        assert match, word
        if match[4]:
            *above, last = match[5].split(".")
            inside = value_at(table, tuple(above))
            if not isinstance(inside, dict) or last not in inside:
                raise ConfigError(f"`{word}` removes a key that is not there - expected one that is. Leave it out.")
            del inside[last]
            continue
        try:
            value = load(match[3]) if match[3] else ""
        except yaml.YAMLError as error:
            what = " ".join(str(error).split())[:200]
            raise ConfigError(f"`{word}`: {what} - expected a value: 1e-6, true or [a, b]. Correct it.") from None
        table = merged(table, nested({tuple(match[2].split(".")): value}))
    return table


def resolve_interpolations(table: dict[str, Any], defaults: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a table with the values that `${a.b}`, `${oc.env:NAME}` and `${oc.select:a.b,1}` stand for.

    Raises: ConfigError for others, and for those that lead nowhere or in a circle.
    """
    known = merged(defaults, table)

    def text(value: str, path: tuple[str, ...], depth: int) -> Any:
        if depth > MOST_STEPS:
            raise ConfigError(f"{where}: `{'.'.join(path)}` leads in a circle ({value}) - expected a value. Write it.")
        if whole := _INTERPOLATION.fullmatch(value):
            found = look_up(whole[1], path)
            return text(found, path, depth + 1) if isinstance(found, str) else found
        new = _INTERPOLATION.sub(lambda each: str(look_up(each[1], path)), value)
        return new if new == value else text(new, path, depth + 1)

    def look_up(name: str, path: tuple[str, ...]) -> Any:
        """Return the value of the expression between the braces, seen from a key."""
        kind, colon, rest = name.partition(":")
        key, comma, fallback = (rest if colon else name).partition(",")
        key = key.strip()
        missing = object()

        # A variable of the shell, or a key: an absolute one, or one that is counted from here with dots.
        if colon and kind == "oc.env":
            found: Any = os.environ.get(key, missing)
        elif not colon or kind == "oc.select":
            dots = len(key) - len(key.lstrip("."))
            above = path[: len(path) - dots] if dots else ()
            found = value_at(known, (*above, *key.lstrip(".").split(".")), missing)
        else:
            found, comma = missing, ""

        if found is missing and comma:
            found = load(fallback)
        if found is missing:
            raise ConfigError(
                f"{where}: `{'.'.join(path)}` is ${{{name}}}, which is not in the file - expected a value, or a key "
                f"that is there. Write the value, or `{'.'.join(path)}=VALUE` behind the file."
            )
        return found

    def visit(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {key: visit(each, (*path, str(key))) for key, each in value.items()}
        if isinstance(value, list):
            return [visit(each, path) for each in value]
        return text(value, path, 0) if isinstance(value, str) and "${" in value else value

    return {key: visit(value, (str(key),)) for key, value in table.items()}
