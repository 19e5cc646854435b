"""Error messages about the configuration: what was given, what was expected, and what to type instead."""

from __future__ import annotations

import textwrap
from difflib import get_close_matches
from typing import Any

from trireme.base.errors import ConfigError
from trireme.config.compatibility import KNOWN_ELSEWHERE, KNOWN_ELSEWHERE_SFT, NOT_A_KEY, NOT_A_VALUE
from trireme.config.files import toml_key, toml_value
from trireme.config.section import Field, Section, as_key, fields_of, walk
from trireme.config.values import read_words


def raise_together(problems: list[str]) -> None:
    """Raises: ConfigError with all of them, numbered, where there are any."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        numbered = (f"{number}. {problem}" for number, problem in enumerate(problems, 1))
        raise ConfigError(f"{len(problems)} problems in the configuration.\n" + "\n".join(numbered))


def unknown_key(
    root: type[Section],
    typed: str,
    path: tuple[str, ...],
    *,
    hidden: tuple[str, ...] = (),
    where: str = "",
    why: str = "",
) -> str:
    """`hidden` is the table whose name may be left out where this was typed: suggestions leave it out too."""
    flag = typed.startswith("--")
    prefix = ".".join([*hidden, ""])
    found = [key.removeprefix(prefix) for key in suggest(root, path)]
    ours = " or ".join(f"`{_as_typed(key, flag)}`" for key in found)
    what = f"{where}: unknown key `{typed}`" if where else f"unknown flag `{typed}`"
    advice = f"Did you mean {ours}?" if ours else "Remove it; `--help` lists all of them."
    if not any(key.rpartition(".")[2] == path[-1] for key in found):
        advice = NOT_A_KEY.get(path[-1], advice)
    return f"{what} - {why or 'no such key exists'}. {advice}"


def _as_typed(key: str, flag: bool) -> str:
    return "--" + key.replace("_", "-") if flag else key


def missing(field: Field, key: str, where: str) -> str:
    return f"{where}: `{key}` is missing - expected {field.words}. {field.doc}"


def wrong_value(field: Field, path: tuple[str, ...], value: Any, *, where: str, flag: str | None = None) -> str:
    """What to say of a value that its key cannot take.

    Args:
        path: the key as shown to whoever typed it.
        where: the file.
        flag: the flag as typed, where it came from the command line.
    """
    came = f"`{flag} {_plain(value)}`" if flag else f"{where}: `{as_key(path)} = {toml_value(value)}`"
    return f"{came} - expected {field.words}. {_advice(field, path, value, flag)}"


def _advice(field: Field, path: tuple[str, ...], value: Any, flag: str | None) -> str:
    if field.kind == "choice":
        if elsewhere := NOT_A_VALUE.get((*path[-2:], str(value))):
            return elsewhere
        near = get_close_matches(str(value), field.words.split(" | "), n=1, cutoff=0.7)
        return f"Did you mean `{near[0]}`?" if near else field.doc
    if field.section and field.kind == "section" and flag:
        return f"Write its keys one by one: `{flag}.{_example_key(field.section, value).name.replace('_', '-')} …`."
    if field.section and field.kind == "section":
        return f"Write a table:\n{_table_example(field.section, path, value)}"
    if field.section:
        return f"Write an array of tables:\n{_table_example(field.section, path, value, many=True)}"
    if isinstance(value, str) and field.accepts(unquoted := read_words(field, (value,))):
        return f"Leave the quotes out: `{path[-1]} = {toml_value(unquoted)}`."
    if field.default is None or field.required or flag:
        return field.doc
    return f"For example `{path[-1]} = {toml_value(field.default)}`. {field.doc}"


def _table_example(section: type[Section], path: tuple[str, ...], value: Any, many: bool = False) -> str:
    key = _example_key(section, value)
    example = value if isinstance(value, str) and key.accepts(value) else "…" if key.required else key.default
    header = ".".join(map(toml_key, path))
    brackets = f"[[{header}]]" if many else f"[{header}]"
    return textwrap.indent(f"{brackets}\n{key.name} = {toml_value(example)}  # {key.doc}", "    ")


def _example_key(section: type[Section], value: Any) -> Field:
    """Its name where a name was given instead of the table, its first plain key otherwise."""
    plain = [field for field in fields_of(section).values() if field.section is None]
    named = (field for field in plain if field.name in ("name", "id") and isinstance(value, str))
    return next(named, plain[0])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else toml_value(value)


_MOST = 3


def suggest(root: type[Section], path: tuple[str, ...]) -> list[str]:
    """Up to three existing dotted keys that the unknown one at `path` may stand for, likeliest first."""
    known = [key for key, _ in walk(root)]
    typed = tuple(part for part in path if not part.isdigit())
    return (
        _typo_among_neighbours(known, typed)
        or _known_from_elsewhere(known, typed)
        or _same_name_in_another_table(known, typed)
        or _looks_alike(known, typed)
    )[:_MOST]


def _typo_among_neighbours(known: list[str], typed: tuple[str, ...]) -> list[str]:
    table = ".".join(typed[:-1])
    neighbours = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == table}
    return [neighbours[name] for name in get_close_matches(typed[-1], neighbours, n=_MOST, cutoff=0.75)]


def _known_from_elsewhere(known: list[str], typed: tuple[str, ...]) -> list[str]:
    """Those that the root at hand has: `sft` has no `trainer` around its tables."""
    ours = (KNOWN_ELSEWHERE_SFT.get(typed[-1], ""), KNOWN_ELSEWHERE.get(typed[-1], ""))
    here = (key if key in known else key.removeprefix("trainer.") for key in ours)
    return [key for key in here if key in known][:1]


def _same_name_in_another_table(known: list[str], typed: tuple[str, ...]) -> list[str]:
    """Those that share most with what was typed first: `tokenizer.name` is nearer to `trainer.tokenizer.name`."""
    same = [key for key in known if key.split(".")[-1] == typed[-1]]
    return sorted(same, key=lambda key: (-len(set(key.split(".")) & set(typed)), key.count(".")))


def _looks_alike(known: list[str], typed: tuple[str, ...]) -> list[str]:
    whole = get_close_matches(".".join(typed), known, n=1, cutoff=0.8)
    names = {key.rpartition(".")[2]: key for key in reversed(known)}
    return whole + [names[name] for name in get_close_matches(typed[-1], names, n=1, cutoff=0.75)]
