"""Error messages about keys and values: what was given, what was expected, and what to type instead."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from trireme.base.errors import ConfigError
from trireme.config.compatibility import NOT_A_KEY, NOT_A_VALUE, keys_for
from trireme.config.files import toml_key, toml_value
from trireme.config.section import Field, Section, as_flag, as_key, fields_of, walk

KeyPath = tuple[str, ...]  # of a key, from the root

_LONGEST = 200  # characters of a value in a message
_MOST = 30  # problems that are shown together


@dataclass(frozen=True)
class Source:
    """The origin of a value, for messages."""

    label: str  # "a.toml", "TRIREME_MAX_STEPS", or the flag as typed
    hidden: KeyPath = ()  # the table that the file fills, which is left out of the keys in messages
    typed: str | None = None  # the words after a flag

    @property
    def is_flag(self) -> bool:
        return self.typed is not None

    def shown(self, path: KeyPath) -> KeyPath:
        """Return the path of a key as the user wrote it in this source."""
        inside = self.hidden and path[: len(self.hidden)] == self.hidden
        return path[len(self.hidden) :] if inside else path


def raise_together(found: Iterable[str]) -> None:
    """Raises: ConfigError with all problems, numbered, if there are any."""
    problems = list(dict.fromkeys(found))
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = [f"{number}. {problem}" for number, problem in enumerate(problems[:_MOST], 1)]
        lines += [f"… and {len(problems) - _MOST} more."] if len(problems) > _MOST else []
        raise ConfigError(f"{len(problems)} problems in the configuration.\n" + "\n".join(lines))


def explain(root: type[Section], error: dict[str, Any], path: KeyPath, found: Field | None, source: Source) -> str:
    """Put one of pydantic's errors into words.

    Args:
        error: one of `ValidationError.errors()`.
        path: the known key that it is about; for an unknown key, that key.
        found: the field at that path.
    """
    if found is None:
        return unknown_key(root, path, source)
    if error["type"] == "missing":
        return f"{source.label}: `{as_key(source.shown(path))}` is missing - expected {found.words}. {found.doc}"
    shown = source.shown(path)
    value = error["input"]
    if source.is_flag:
        given = f"`{source.label} {textwrap.shorten(source.typed or '', _LONGEST)}`"
    else:
        text = toml_value(value)
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
        given = f"{source.label}: `{as_key(shown)} = {text}`"
    finite = "finite " if error["type"] == "finite_number" else ""
    return f"{given} - expected {finite}{found.words}. {_advice(found, shown, value, source.is_flag)}"


def unknown_key(root: type[Section], path: KeyPath, source: Source, why: str = "no such key exists") -> str:
    prefix = ".".join([*source.hidden, ""])
    found = [key.removeprefix(prefix) for key in suggest(root, path)]
    typed = [as_flag((key,)) if source.is_flag else key for key in found]
    advice = f"Did you mean `{'` or `'.join(typed)}`?" if found else "Remove it; `--help` lists all of them."
    if not any(key.rpartition(".")[2] == path[-1] for key in found):
        advice = NOT_A_KEY.get(path[-1], advice)
    if source.is_flag:
        return f"unknown flag `{source.label}` - {why}. {advice}"
    return f"{source.label}: unknown key `{as_key(source.shown(path))}` - {why}. {advice}"


def _advice(field: Field, path: KeyPath, value: Any, is_flag: bool) -> str:
    if field.kind == "choice":
        if elsewhere := NOT_A_VALUE.get((*path[-2:], str(value))):
            return elsewhere
        near = get_close_matches(str(value), field.words.split(" | "), n=1, cutoff=0.7)
        return f"Did you mean `{near[0]}`?" if near else field.doc
    if field.section:
        key = next(key for key in fields_of(field.section).values() if key.section is None)  # often its name
        if is_flag and field.kind == "section":
            return f"Write its keys one by one: `{as_flag((*path, key.name))} …`."
        header = ".".join(toml_key(part) for part in path if not part.isdigit())  # of an item: its array's
        is_one = field.kind == "section"
        header, what = (f"[{header}]", "a table") if is_one else (f"[[{header}]]", "an array of tables")
        example = value if key.kind == "text" and isinstance(value, str) else "…" if key.required else key.default
        table = textwrap.indent(f"{header}\n{key.name} = {toml_value(example)}  # {key.doc}", "    ")
        return f"Write {what}:\n{table}"
    if field.default is None or field.required or is_flag:
        return field.doc
    return f"For example `{path[-1]} = {toml_value(field.default)}`. {field.doc}"


# suggestions


def suggest(root: type[Section], path: KeyPath) -> list[str]:
    """Return up to three existing dotted keys that the unknown one at `path` may stand for, likeliest first."""
    known = [key for key, _ in walk(root)]
    typed = tuple(part for part in path if not part.isdigit())
    table, name = ".".join(typed[:-1]), typed[-1]
    neighbours = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == table}
    if typos := [neighbours[near] for near in get_close_matches(name, neighbours, n=3, cutoff=0.75)]:
        return typos
    # Names from other systems. `sft` has no `trainer` around its tables.
    ours = (key if key in known else key.removeprefix("trainer.") for key in keys_for(name))
    if elsewhere := [key for key in ours if key in known][:1]:
        return elsewhere
    # The same name in another table: `tokenizer.name` is closer to `trainer.tokenizer.name` than to `model.name`.
    if same := [key for key in known if key.split(".")[-1] == name]:
        return sorted(same, key=lambda key: (-len(set(key.split(".")) & set(typed)), key.count(".")))[:3]
    names = {key.rpartition(".")[2]: key for key in reversed(known)}
    alike = get_close_matches(".".join(typed), known, n=1, cutoff=0.8)
    return alike + [names[near] for near in get_close_matches(name, names, n=1, cutoff=0.75)]
