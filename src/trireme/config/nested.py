"""Nested tables of a configuration, and paths of keys in them.

Example:
    value_at(nested({("env", "0", "id"): "a"}), ("env", "0", "id"))  # "a"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KeyPath = tuple[str, ...]  # the parts of a key's path, from the root; items of an array are numbers


def nested(settings: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Return paths with values as nested tables. Numbers make arrays.

    Example:
        nested({("env", "0", "id"): "a", ("seed",): 1})  # {"env": [{"id": "a"}], "seed": 1}
    """
    table = _Made()
    for path, value in settings.items():
        here = table
        for name in path[:-1]:
            if not isinstance(step := here.get(name), _Made):
                step = here[name] = _Made(step if isinstance(step, dict) else {})
            here = step
        if not (value == {} and isinstance(here.get(path[-1]), _Made)):
            here[path[-1]] = value
    return {name: _with_arrays(value) for name, value in table.items()}


class _Made(dict[str, Any]):
    """A table that was made here; others are values."""


def _with_arrays(value: Any) -> Any:
    if not isinstance(value, _Made):
        return value
    if value and all(name.isdigit() for name in value):
        return [_with_arrays(value.get(str(number), {})) for number in range(max(map(int, value)) + 1)]
    return {name: _with_arrays(each) for name, each in value.items()}


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return two tables as one. Tables are merged key by key; anything else of the second replaces the first's."""
    both = {
        key: merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return below | both


def without(table: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a table without the keys of another one."""
    return {
        key: without(value, other[key]) if key in other else value
        for key, value in table.items()
        if key not in other or (isinstance(value, dict) and isinstance(other[key], dict))
    }


def with_value(table: dict[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    """Return a copy of nested tables with another value at a path, which may lead into arrays."""
    name, below = path[0], path[1:]
    inside = table.get(name, {})
    if not below:
        return table | {name: value}
    if isinstance(inside, list) and below[0].isdigit():
        items = [*inside, {}][: max(len(inside), int(below[0]) + 1)]
        if int(below[0]) < len(items):
            item = items[int(below[0])]
            items[int(below[0])] = with_value(item, below[1:], value) if below[1:] else value
        return table | {name: items}
    return table | {name: with_value(inside if isinstance(inside, dict) else {}, below, value)}


def value_at(table: Any, path: KeyPath, default: Any = None) -> Any:
    """Return the value at a path of nested tables and arrays, or the default."""
    for part in path:
        if isinstance(table, list) and part.isdigit() and int(part) < len(table):
            table = table[int(part)]
        elif isinstance(table, dict) and part in table:
            table = table[part]
        elif isinstance(table, dict) and part == "0":  # a single table in the place of an array
            continue
        else:
            return default
    return table
