"""Translate the keys of another system's files and flags into ours, by a table of rows.

Example:
    rows = (Row("ckpt", "trainer.ckpt"), Row("clean", None, "files of an earlier run are moved aside"))
    translate({"ckpt": {"interval": 5}, "clean": True}, rows)
    # settings {("trainer", "ckpt", "interval"): 5}, and a line for each of the two keys
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from trireme.base.errors import ConfigError
from trireme.config.files import given_values, to_toml, toml_value, without_secrets
from trireme.config.nested import KeyPath, merged, nested, value_at, with_value, without
from trireme.config.section import Field, Section, as_key, find

Settings = dict[str, Any]  # our dotted key -> value
Made = Settings | tuple[Settings, str] | str  # a rule's answer
Rule = Callable[[Any, dict[str, Any]], Made]
"""A function of a key's value and of all that was given in their keys. It returns our keys with their values (and a
note of its own), or why the key has no effect, and raises `Refused` for a value that has no counterpart."""

_MOST_SHOWN = 60  # characters of a value in a line
_MOST_NAMES = 5  # times that tables around a key are renamed
DEFAULT = "the default"
UNSUPPORTED = "not supported here"
_MOST_LINES = 12  # keys without effect that are named at the start of a run


class Refused(ValueError):
    """A value that has no counterpart here. The message says what comes nearest."""


@dataclass(frozen=True)
class Row:
    """A key of another system, and what becomes of it here.

    A row may have several keys, with blanks between them: `spread` makes a row of each. `a.{b c}` is `a.b a.c`, and
    `{}` in `ours` stands for what the braces hold, or for the key. In both, `[]` behind an array means its items, and
    `*` a part that may be anything; a key that begins with `*.` is meant in every table. A row of a table holds for all
    keys below that have no row.

    Attributes:
        theirs: their dotted key.
        ours: our dotted key, which takes the value as it is; a rule; or None for a key without effect here.
        note: why it has no effect, or how it differs; of a refused key, what to do instead.
        refused: refuse every value, before anything starts.
        since: the first version of the system with this key.
    """

    theirs: str
    ours: str | Rule | None
    note: str = ""
    refused: bool = False
    since: str = ""


def spread(*rows: Row | Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows of a table, or of several, with one key each.

    Example:
        spread(Row("a.{b c} d", "x.{}"))  # (Row("a.b", "x.b"), Row("a.c", "x.c"), Row("d", "x.{}"))
    """
    found = []
    for row in rows:
        for one in (row,) if isinstance(row, Row) else row:
            if " " not in one.theirs and "{" not in one.theirs:
                found.append(one)
                continue
            for before, inside, behind, plain in re.findall(r"([^\s{]*)\{([^}]*)\}(\S*)|(\S+)", one.theirs):
                for name in inside.split() or [""]:
                    ours = one.ours.replace("{}", name or plain) if isinstance(one.ours, str) else one.ours
                    found.append(replace(one, theirs=plain or f"{before}{name}{behind}", ours=ours))
    return tuple(found)


def refused(theirs: str, words: str, since: str = "") -> Row:
    """Return the row of a key that is refused with every value."""
    return Row(theirs, None, words, refused=True, since=since)


@dataclass(frozen=True)
class Line:
    """A translated key, and what became of it.

    Example:
        Line(("ckpt", "interval"), 5, {("trainer", "ckpt", "interval"): 5}, "")
    """

    theirs: KeyPath
    value: Any  # `...` for what the system sets without a key, and `theirs` is its name
    ours: dict[KeyPath, Any]  # empty for a key without effect
    note: str
    where: str = ""  # the file; of a flag, the flag

    @property
    def has_effect(self) -> bool:
        return bool(self.ours)

    @property
    def is_same(self) -> bool:
        """Return whether the key and its value are ours already."""
        return self.ours == {self.theirs: self.value} and not self.note

    @property
    def given(self) -> str:
        """The key with its value, as a file has it; without secrets."""
        name = self.theirs[-1]
        if self.value is ...:
            return name
        return f"{as_key(self.theirs)} = {_short(without_secrets({name: self.value})[name])}"

    @property
    def written(self) -> str:
        """The key as the user wrote it, for messages."""
        return f"`{self.where}` here" if self.where.startswith("--") else f"`{as_key(self.theirs)}` in {self.where}"

    def __str__(self) -> str:
        given = self.given
        if self.is_same:
            return given
        shown = without_secrets({path[-1]: value for path, value in self.ours.items()})
        made = ", ".join(f"{as_key(path)} = {_short(shown[path[-1]])}" for path in self.ours)
        return f"{given} -> {made or 'no effect'}{f': {self.note}' if self.note else ''}"


@dataclass
class Translated:
    """A table, or several, in our keys.

    Attributes:
        settings: our key's path -> value, of all tables that have an effect.
        lines: one for each key that was given.
        origins: our key's path -> the line that it comes from.
        tables: the path of each table that was renamed -> its own.
        unknown: paths of keys that have no row.
        problems: why keys were refused, or contradict each other.
    """

    settings: dict[KeyPath, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    origins: dict[KeyPath, Line] = field(default_factory=dict)
    tables: dict[KeyPath, KeyPath] = field(default_factory=dict)
    unknown: list[KeyPath] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def table(self) -> dict[str, Any]:
        """The settings as nested tables, as TOML is read."""
        return nested(self.settings)


def translate(
    table: dict[str, Any],
    rows: tuple[Row, ...],
    *,
    where: str = "the file",
    root: type[Section] | None = None,
    given: dict[str, Any] | None = None,
    is_flag: bool = False,
) -> Translated:
    """Translate a table that was read already.

    Args:
        rows: the first of two for the same key counts.
        where: the name of the file, for messages; of a flag, the flag.
        root: our configuration; keys that it has and no row names are taken as they are, and so are unknown ones. Keys
            without a row are only listed if it is not given.
        given: all that was given in their keys, this table included; rules look at it.
        is_flag: the table holds one flag, whose key has the number of each item.
    """
    walk = _Walk(_index(rows), root, table if given is None else given, where, is_flag)
    for name, value in table.items():
        walk.visit(((name,),), value, None)
    return walk.result


def translate_over(
    defaults: dict[str, Any],
    given: dict[str, Any],
    rows: tuple[Row, ...],
    *,
    where: str,
    system: str,
    root: type[Section] | None = None,
) -> Translated:
    """Translate a table on top of its system's defaults: rules see both, and what is given counts more.

    Args:
        system: its name, for the lines of defaults that set something. Other defaults have no line.
    """
    whole = merged(defaults, given)
    made = translate(given, rows, where=where, root=root, given=whole)
    below = translate(without(defaults, given), rows, where=where, root=root, given=whole)
    if root is None:
        made.lines = [replace(line, note=UNSUPPORTED) if line.theirs in made.unknown else line for line in made.lines]
    typed = {*made.settings}
    for line in below.lines:
        if ours := {path: value for path, value in line.ours.items() if path not in typed}:
            note = f"{DEFAULT} of {system}{f'; {line.note}' if line.note else ''}"
            made.lines.append(replace(line, ours=ours, note=note))
            made.settings |= ours
    made.problems += below.problems
    return made


def renamed(path: KeyPath, rows: tuple[Row, ...], root: type[Section]) -> KeyPath | None:
    """Return our name of a key, its own if that is ours; None if there is none, or if its value has to be known."""
    mark = object()
    found = translate(
        with_value({}, path, mark), tuple(row for row in rows if not callable(row.ours)), root=root, is_flag=True
    )
    for ours, value in found.settings.items() if not found.unknown else ():
        field = find(root, ours)
        if value is not mark and field is not None and field.kind != "table":
            return None
        while isinstance(value, dict) and value:  # inside of a table that takes any key
            ((name, value),) = value.items()
            ours = (*ours, name)
        return ours if value is mark else None
    return None


def is_known(path: KeyPath, rows: tuple[Row, ...], root: type[Section]) -> bool:
    """Return whether a key is ours, or one that is translated or refused by name, or a table of such."""
    if find(root, path) is not None or names_below(path, rows):
        return True
    return bool(rows) and not translate(with_value({}, path, ""), rows, root=root, is_flag=True).unknown


def names_below(path: KeyPath, rows: tuple[Row, ...]) -> list[str]:
    """Return the names of keys in a table of theirs."""
    return [name for node, _ in _nodes_of(_index(rows), path) for name in node.below if name != "*"]


@contextmanager
def their_keys_named(lines: Iterable[Line]) -> Iterator[None]:
    """Add to an error that names a key of ours the key that the user wrote."""
    try:
        yield
    except ConfigError as error:
        # The last one that gave a key counts. A key must not match inside of a longer one, as `name` in `model.name`.
        givers = {path: line for line in lines for path in line.ours}
        found = {
            f"\n`{key}` is {line.written}."
            for path, line in givers.items()
            if path != line.theirs and re.search(rf"(?<![\w.]){re.escape(key := _plain(path))}(?!\w)", str(error))
        }
        raise type(error)(f"{error}{''.join(sorted(found))}") from None


def describe_without_effect(lines: Iterable[Line]) -> str:
    """Return a paragraph about the keys without effect; empty if there are none."""
    idle = [line for line in lines if not line.has_effect and line.note]
    if not idle:
        return ""
    shown = [f"`{line.given}` ({line.note})" for line in idle[:_MOST_LINES]]
    more = f"; and {len(idle) - _MOST_LINES} more" if len(idle) > _MOST_LINES else ""
    return f"without effect here: {'; '.join(shown)}{more}. `--print-config` shows what became of each key."


def with_comments(config: Section, lines: Iterable[Line | str]) -> str:
    """Return what the user gave as a TOML file of ours, with a comment on what became of each key."""
    comments = "".join(f"# {text}\n" for line in lines for text in str(line).splitlines())
    return f"{comments}\n{to_toml(given_values(config))}"


# The walk through a table.


@dataclass
class _Node:
    """Rows by the parts of their keys."""

    row: Row | None = None
    below: dict[str, _Node] = field(default_factory=dict)
    anywhere: dict[str, Row] = field(default_factory=dict)  # in the top node: rows of names that every table may have


@cache
def _index(rows: tuple[Row, ...]) -> _Node:
    top = _Node()
    for row in rows:
        if row.theirs.startswith("*."):
            top.anywhere.setdefault(row.theirs[2:], row)
            continue
        here = top
        for part in _parts(row.theirs):
            here = here.below.setdefault(part, _Node())
        here.row = here.row or row
    return top


def _parts(key: str) -> list[str]:
    return key.replace("[]", "").split(".")


def _nodes_of(top: _Node, path: KeyPath) -> Iterator[tuple[_Node, list[str]]]:
    """Yield the nodes of a path, and the parts of it that stood for `*`. A name itself comes before `*`."""
    if not path:
        yield top, []
        return
    name, rest = path[0], path[1:]
    if name in top.below:
        yield from _nodes_of(top.below[name], rest)
    elif name.isdigit():
        yield from _nodes_of(top, rest)
    if "*" in top.below:
        yield from ((node, [name, *wild]) for node, wild in _nodes_of(top.below["*"], rest))


class _Found(NamedTuple):
    """A row for a key."""

    row: Row | None
    path: KeyPath  # the name of the key that the row is for
    wild: list[str]  # the parts of it that stood for `*`


@dataclass
class _Walk:
    """One translation under way."""

    rows: _Node
    root: type[Section] | None
    given: dict[str, Any]
    where: str
    is_flag: bool
    result: Translated = field(default_factory=Translated)

    def visit(self, names: tuple[KeyPath, ...], value: Any, above: Row | None) -> None:
        """Translate a key and all below it.

        Args:
            names: the key as it was written, then as it is called after each table around it was renamed; the last is
                its name here, unless a row says otherwise.
            above: the row of a table around it that has no effect or is refused.
        """
        found = self._find(names)
        while found.row is not None and isinstance(found.row.ours, str):
            above = None
            moved = _filled(found.row.ours, found.path, len(_parts(found.row.theirs)), found.wild)
            names = (*names, self._placed(moved))
            self.result.tables[names[-1]] = names[0]
            # A table may be renamed several times: its new name is looked up again.
            if (further := self._find(names[-1:])).row is None or len(names) > _MOST_NAMES:
                break
            found = further
        row, here, ours = found.row, names[-1], self._field(names[-1])
        renames = row is not None and isinstance(row.ours, str)
        has_rows = any(node.below for path in names for node, _ in _nodes_of(self.rows, path))
        is_ours = ours is not None or self._is_in_free_table(here)

        # A file may write a single table where ours is an array of tables.
        if ours and ours.kind == "sections" and isinstance(value, dict) and not (self.is_flag or here[-1].isdigit()):
            value = [value]
        inside = list(_inside(value))

        # Tables are walked through unless a rule takes them whole, or they are free tables of ours.
        if inside and not (row and callable(row.ours)) and (has_rows or renames or (ours and ours.section)):
            for name, below in inside:
                self.visit(tuple((*path, name) for path in names), below, above if row is None or renames else row)
        elif row is not None and not renames:
            self._apply(row, names[0], value, found)
        elif row is not None or is_ours:
            self._set(names[0], {here: value}, row.note if row else "")
        elif row := self.rows.anywhere.get(here[-1]) or above:
            self._apply(row, names[0], value, found)
        elif has_rows and value == {}:
            self._set(names[0], {}, "")
        else:
            self.result.unknown.append(names[0])
            self._set(names[0], {here: value} if self.root else {}, "")

    def _find(self, names: tuple[KeyPath, ...]) -> _Found:
        """Return the row of the first name that has one."""
        for path in dict.fromkeys(names):
            for node, wild in _nodes_of(self.rows, path):
                if node.row:
                    return _Found(node.row, path, wild)
        return _Found(None, names[-1], [])

    def _field(self, path: KeyPath) -> Field | None:
        return find(self.root, path) if self.root else None

    def _is_in_free_table(self, path: KeyPath) -> bool:
        """Return whether our configuration has a table around a key that takes any."""
        around = (self._field(path[:depth]) for depth in range(1, len(path)))
        return any(each and each.kind == "table" for each in around)

    def _apply(self, row: Row, theirs: KeyPath, value: Any, found: _Found) -> None:
        written = f"{self.where}: `{as_key(theirs)} = {_short(value)}`"
        if row.refused:
            self.result.problems.append(f"{written} - {row.note}")
            return
        if row.ours is None:
            self._set(theirs, {}, row.note)
            return

        # A rule sees the value with what earlier files and flags gave of the same table.
        assert callable(row.ours), row
        try:
            made = row.ours(value_at(self.given, theirs, value), self.given)
        except Refused as refused:
            self.result.problems.append(f"{written} - {refused}")
            return
        # A value of a wrong type makes a rule raise an error of Python.
        except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError) as error:
            self.result.problems.append(
                f"{written} - it, or a key that it is computed with, has a wrong value ({error}). Correct it."
            )
            return
        if isinstance(made, str):
            self._set(theirs, {}, made)
            return
        made, note = made if isinstance(made, tuple) else (made, row.note)
        depth = len(_parts(row.theirs))
        settings = {_filled(key, found.path, depth, found.wild, rest=False): each for key, each in made.items()}
        self._set(theirs, settings, note)

    def _placed(self, ours: KeyPath) -> KeyPath:
        """Return the place of a key of ours: `sft` has the trainer's at its top."""
        is_at_top = self.root is not None and ours[0] == "trainer" and find(self.root, ("trainer",)) is None
        return ours[1:] if is_at_top else ours

    def _set(self, theirs: KeyPath, ours: dict[KeyPath, Any], note: str) -> None:
        ours = {self._placed(path): each for path, each in ours.items()}
        line = Line(theirs, value_at(self.given, theirs), ours, note, self.where)
        self.result.lines.append(line)
        for path, value in ours.items():
            # Two names of one key would silently replace each other's value.
            before = self.result.origins.setdefault(path, line)
            if before is not line and self.result.settings[path] != value:
                self.result.problems.append(
                    f"{self.where}: `{before.given}` and `{line.given}` are two names of one key, "
                    f"`{as_key(path)}` - expected one of them, or equal values. Remove one."
                )
            self.result.settings[path] = value


def _filled(ours: str, path: KeyPath, depth: int, wild: list[str], *, rest: bool = True) -> KeyPath:
    """Return our key for a path that a row matched: with its numbers in the place of `[]` and its parts for `*`.

    Args:
        depth: parts of the path, without numbers, that the row names.
        rest: what follows of the path is added.
    """
    names = [place for place, part in enumerate(path) if not part.isdigit()]
    end = names[depth - 1] + 1 if depth <= len(names) else len(path)
    numbers, parts = iter([part for part in path[:end] if part.isdigit()]), iter(wild)
    filled: list[str] = []
    for part in ours.split("."):
        filled.append(next(parts, part) if part == "*" else part.removesuffix("[]"))
        if part.endswith("[]") and (number := next(numbers, None)) is not None:
            filled.append(number)
    return (*filled, *path[end:]) if rest else tuple(filled)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a table, or the tables of an array by their numbers."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        yield from ((str(number), item) for number, item in enumerate(value))


def _plain(path: KeyPath) -> str:
    """Return a key as messages about a configuration write it, without numbers of items."""
    return ".".join(part for part in path if not part.isdigit())


def _short(value: Any) -> str:
    text = toml_value(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"
