"""What users type becomes a configuration: defaults < files, left to right < flags.

Keys are checked one source at a time, so each problem names the file or flag it came from; all are shown together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field as Documented
from pydantic import ValidationError

from trireme.base.errors import ConfigError
from trireme.config.arguments import HELP, TypedFile, TypedFlag, parse_arguments
from trireme.config.compatibility import ALIASES, SFT_ALIASES, SHORT_FLAGS, belongs_elsewhere, kind_of
from trireme.config.files import NONE, PROCESSES, ProcessName, read_run, read_table
from trireme.config.problems import missing, raise_together, unknown_key, wrong_value
from trireme.config.reference import manual
from trireme.config.run import RunConfig
from trireme.config.section import Field, Section, as_flag, as_key, fields_of, find
from trireme.config.values import read_free, read_words

AnyConfig = TypeVar("AnyConfig", bound=Section)
Path_ = tuple[str, ...]  # of a key, from the root


class Invocation(Section):
    """Flags of the command itself; no part of the configuration, and not allowed in files."""

    dry_run: bool = False
    """Show what would be started and write the resolved configuration; start nothing."""
    run: Path | None = Documented(default=None)
    """A resolved `configs/run.json`: load exactly that. This is how `rl` starts its processes."""
    node: int | None = None
    """Which address of its table in `[hosts]` this machine is, counted from 0; found out where not given."""


@dataclass(frozen=True)
class _Source:
    """Where values come from, for messages."""

    label: str  # "a.toml", or the flag as typed
    hidden: Path_ = ()  # the table that the file fills: left out where its keys are shown
    is_flag: bool = False

    def key(self, path: Path_) -> str:
        return as_key(self.shown(path))

    def shown(self, path: Path_) -> Path_:
        inside = self.hidden and path[: len(self.hidden)] == self.hidden
        return path[len(self.hidden) :] if inside else path


def load_run_config(
    argv: list[str], *, section: ProcessName | None = None, program: str
) -> tuple[RunConfig, Invocation]:
    """The run as typed. Nothing is derived yet: see `trireme.config.resolve`.

    Args:
        argv: the words after the program's name.
        section: for a process's own command, whose files and flags may leave its table's name out.
        program: its name, for `--help`.

    Raises: ConfigError with all problems together; SystemExit(0) after `--help`.
    """
    return load_config(argv, RunConfig, section=section, program=program)


def load_config(
    argv: list[str], root: type[AnyConfig], *, section: ProcessName | None = None, program: str
) -> tuple[AnyConfig, Invocation]:
    if any(word in HELP for word in argv):
        print(manual(root, Invocation, section=section, program=program))
        raise SystemExit(0)
    arguments = parse_arguments(argv)
    reading = _Reading(root, section)
    own = [argument for argument in arguments if _is_own(argument)]
    invocation = _read_invocation([argument for argument in own if isinstance(argument, TypedFlag)])
    if invocation.run:
        _refuse_more(invocation.run, [argument for argument in arguments if argument not in own])
        return read_run(root, invocation.run), invocation
    for argument in arguments:
        if isinstance(argument, TypedFile):
            reading.take_file(argument)
    for argument in arguments:
        if isinstance(argument, TypedFlag) and argument not in own:
            reading.take_flag(argument)
    return reading.finish(), invocation


def read_as(root: type[AnyConfig], table: dict[str, Any], *, where: str, flags: Sequence[TypedFlag] = ()) -> AnyConfig:
    """A table that was read already, as a section.

    Args:
        where: what to call it in messages.
        flags: typed on top of it.

    Raises: ConfigError with all problems together.
    """
    reading = _Reading(root, None)
    reading.origins[()] = _Source(where)
    reading.take_table(table, reading.origins[()])
    for flag in flags:
        reading.take_flag(flag)
    config: AnyConfig = reading.finish()
    return config


def knows(root: type[Section], flag: TypedFlag) -> bool:
    """Whether a flag is of this configuration; `--no-x` is of that which has `x`."""
    positive = tuple(part.removeprefix("no_") for part in flag.path)
    return any(find(root, _unfold(root, path)) is not None for path in (flag.path, positive))


def _is_own(argument: TypedFile | TypedFlag) -> bool:
    names = Invocation.model_fields
    return isinstance(argument, TypedFlag) and (
        argument.path[0] in names or argument.path[0].removeprefix("no_") in names
    )


def _read_invocation(flags: list[TypedFlag]) -> Invocation:
    reading = _Reading(Invocation, None)
    for flag in flags:
        reading.take_flag(flag)
    return reading.finish()


def _refuse_more(run: Path, others: list[TypedFile | TypedFlag]) -> None:
    if others:
        names = ", ".join(f"`{other.name}`" for other in others)
        raise ConfigError(
            f"`--run {run}` came with {names} - expected nothing beside it, the file is a whole run. "
            f"Leave them out, or type `@ {run}` instead to change values of it."
        )


@dataclass
class _Reading:
    """The tree of values so far, where each came from, and what was wrong on the way."""

    root: type[Section]
    section: ProcessName | None
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path_, _Source] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    whole_run_given: bool = False

    def take_file(self, typed: TypedFile) -> None:
        try:
            table = read_table(Path(typed.name))
        except ConfigError as error:
            self.problems.append(str(error))
            return
        if self.root is RunConfig and not self.section and not typed.scope and (kind := kind_of(table)) != "run":
            self.problems.append(belongs_elsewhere(typed.name, kind))
            return
        scope = self._scope(typed)
        if scope is None:
            return
        is_room = len(scope) == 1 and scope[0] in PROCESSES
        table = self._split(table, scope[0]) if is_room else _nest(table, scope)
        self.take_table(table, _Source(typed.name, hidden=scope))

    def take_table(self, table: dict[str, Any], source: _Source) -> None:
        _merge(self.tree, self._clean(table, self.root, (), source))

    def _scope(self, typed: TypedFile) -> Path_ | None:
        """The table that a file fills."""
        if not typed.scope:
            return (self.section,) if self.section else ()
        scope = self._place(typed.scope)
        found = find(self.root, scope)
        if found and found.kind == "section":
            return scope
        self.problems.append(
            unknown_key(self.root, as_flag(typed.scope), scope, why="a file can fill a table only")
            if found is None
            else f"`{as_flag(typed.scope)} @ {typed.name}`: a file can fill a table, this takes {found.words}. "
            f"Write `{as_flag(typed.scope)} value`."
        )
        return None

    def _split(self, table: dict[str, Any], room: str) -> dict[str, Any]:
        """A process's own file: what its table knows goes there, the rest belongs to the run."""
        if any(name in table for name in PROCESSES):
            self.whole_run_given = True
            return table
        whole: dict[str, Any] = {}
        for key, value in table.items():
            placed = _place_in_room(self.root, room, (key,))
            (whole.setdefault(room, {}) if len(placed) > 1 else whole)[key] = value
        return whole

    def take_flag(self, flag: TypedFlag) -> None:
        source = _Source(flag.name, is_flag=True)
        path, negated = self._flag_path(flag)
        found = find(self.root, path)
        if found is None and not _inside_free_table(self.root, path):
            hidden: Path_ = (self.section,) if self.section and path[0] == self.section else ()
            self.problems.append(unknown_key(self.root, flag.name, path, hidden=hidden))
            return
        if negated:
            self._take_negated(flag, path)
            return
        if found and not flag.values and found.kind not in ("bool", "section"):
            self.problems.append(f"`{flag.name}` came without a value - expected {found.words}. {found.doc}")
            return
        if (array := self._array_without_number(path)) is not None:
            self.problems.append(
                f"`{flag.name}`: `{as_key(array)}` is an array of tables - expected the number of one, counted from 0. "
                f"Write `{as_flag((*array, '0', *path[len(array) :]))}`."
            )
            return
        value = read_words(found, flag.values) if found else read_free(flag.values)
        self._set(path, self._clean_value(found, value, path, source) if found else value, source)

    def _flag_path(self, flag: TypedFlag) -> tuple[Path_, bool]:
        """Where the flag points, and whether it is one of `--no-x`, `--a.no-x`, `--no-a.x`."""
        path = self._place(flag.path)
        if find(self.root, path) is not None:
            return path, False
        for index in {0, len(flag.path) - 1}:
            if flag.path[index].startswith("no_"):
                positive = (*flag.path[:index], flag.path[index].removeprefix("no_"), *flag.path[index + 1 :])
                placed = self._place(positive)
                if find(self.root, placed):
                    return placed, True
        return path, False

    def _array_without_number(self, path: Path_) -> Path_ | None:
        for depth in range(1, len(path)):
            above = find(self.root, path[:depth])
            if above and above.kind == "sections" and not path[depth - 1].isdigit() and not path[depth].isdigit():
                return path[:depth]
        return None

    def _take_negated(self, flag: TypedFlag, path: Path_) -> None:
        """`--no-resume` is `--resume false`; `--no-wandb` takes the whole table away."""
        found = find(self.root, path)
        assert found is not None, path
        if flag.values or not (found.kind == "bool" or found.optional):
            self.problems.append(
                f"`{flag.name}` {' '.join(flag.values)}: `no-` takes no value and switches off what can be off. "
                f"Write `{as_flag(path)} value`; it takes {found.words}."
            )
            return
        self._set(path, False if found.kind == "bool" else None, _Source(flag.name, is_flag=True))

    def _place(self, typed: Path_) -> Path_:
        """From a flag as typed to the root's path, by the rule of a process's own command."""
        path = typed = _unfold(self.root, typed)
        if self.section and not (self.whole_run_given and typed[0] in fields_of(self.root)):
            path = _place_in_room(self.root, self.section, typed)
            unknown = len(path) == len(typed) and typed[0] not in fields_of(self.root)
            path = (self.section, *typed) if unknown else path
        return _without_alias(path)

    def _set(self, path: Path_, value: Any, source: _Source) -> None:
        """Puts one flag's value into the tree; numbers pick items of an array. One more begins with a key that it must
        have (`id`)."""
        if value is _BAD:
            return
        here: Any = self.tree
        for depth, part in enumerate(path[:-1]):
            step = _item(here, part)
            if step is None and isinstance(here, dict):
                found = find(self.root, path[: depth + 1])
                step = here[part] = [] if found and found.kind == "sections" else {}
            elif step is None and part == str(len(here)) and self._begins_item(path, depth):
                here.append(step := {})
            if not isinstance(step, dict | list):
                self.problems.append(_no_such_item(source.label, path[: depth + 1], here))
                return
            here = step
        if isinstance(here, list):
            self.problems.append(_no_such_item(source.label, path, here))
        elif isinstance(value, dict) and isinstance(here.get(path[-1]), dict):
            _merge(here[path[-1]], value)
        else:
            here[path[-1]] = value
        self.origins[path] = source

    def _begins_item(self, path: Path_, depth: int) -> bool:
        found = find(self.root, path)
        return len(path) == depth + 2 and found is not None and found.required

    def _clean(self, table: dict[str, Any], section: type[Section], above: Path_, source: _Source) -> dict[str, Any]:
        """The table with only what the schema can take; the rest becomes problems."""
        cleaned: dict[str, Any] = {}
        for key, value in table.items():
            path = _without_alias((*above, key))
            found = fields_of(section).get(path[-1])
            if found is None:
                self.problems.append(self._unknown(source, path))
            elif isinstance(value, dict) and _is_opened(path):
                cleaned |= self._clean(value, section, path, source)
            elif path[-1] in cleaned:
                self.problems.append(
                    f"{source.label}: `{source.key((*above, key))}` and `{source.key(path)}` are two names of one key "
                    "- expected one of them. Remove the first."
                )
            elif (value := self._clean_value(found, value, path, source)) is not _BAD:
                cleaned[path[-1]] = value
                self.origins[path] = source
        return cleaned

    def _clean_value(self, found: Field, value: Any, path: Path_, source: _Source) -> Any:
        if found.kind == "sections" and isinstance(value, dict):
            value = [value]  # `[orchestrator.env]` for a single environment
        if value == NONE and found.optional and found.kind != "text":
            value = None
        if not found.accepts(value):
            self.problems.append(self._wrong(source, path, found, value))
            return _BAD
        if found.section and isinstance(value, dict):
            return self._clean(value, found.section, path, source)
        if found.section and isinstance(value, list):
            return [self._clean(item, found.section, (*path, str(i)), source) for i, item in enumerate(value)]
        return value

    def _unknown(self, source: _Source, path: Path_) -> str:
        name = as_flag(path) if source.is_flag else source.key(path)
        return unknown_key(self.root, name, path, hidden=source.hidden, where="" if source.is_flag else source.label)

    def _wrong(self, source: _Source, path: Path_, found: Field, value: Any) -> str:
        shown = source.shown(path)
        return wrong_value(found, shown, value, flag=source.label if source.is_flag else None, where=source.label)

    def finish(self) -> Any:
        """Raises: ConfigError with everything that was wrong, here and on the way."""
        config = None
        try:
            config = self.root.model_validate(self.tree)
        except ValidationError as error:
            self.problems += [self._explain(dict(problem)) for problem in error.errors()]
        raise_together(self.problems)
        return config

    def _explain(self, error: dict[str, Any]) -> str:
        """One of pydantic's errors, in our words and with its source."""
        path = tuple(map(str, error["loc"]))
        while path and find(self.root, path) is None:
            path = path[:-1]
        found, source = find(self.root, path), self._origin(path)
        if found is None:
            return f"{error['msg']}: {error['loc']}"
        if error["type"] == "missing" and found.required:
            return missing(found, source.key(path), source.label)
        return self._wrong(source, path, found, _value_at(self.tree, path))

    def _origin(self, path: Path_) -> _Source:
        """The source of the value itself, or of the nearest table around it."""
        around = (path[:depth] for depth in range(len(path), -1, -1))
        return next((self.origins[place] for place in around if place in self.origins), _Source("the defaults"))


_ALIASES = ALIASES | SFT_ALIASES

_BAD = object()  # a value that was reported and is left out


def _place_in_room(root: type[Section], room: str, typed: Path_) -> Path_:
    """Its own table first, then the run: `optim.lr` is `trainer.optim.lr`, `max_steps` is the run's."""
    own = find(root, _without_alias((room, typed[0])))
    return (room, *typed) if own or typed[0] not in fields_of(root) else typed


def _unfold(root: type[Section], typed: Path_) -> Path_:
    """What a short flag stands for, where the root has it: `--no-restart` for `--no-supervisor.restart`."""
    meant = tuple(SHORT_FLAGS.get(".".join(typed), "").split("."))
    return meant if find(root, meant) else typed


def _without_alias(path: Path_) -> Path_:
    """The path under our own names."""
    for depth in range(len(path), 0, -1):
        if (ours := _ALIASES.get(".".join(path[:depth]))) is not None:
            return (*ours.split("."), *path[depth:])
    return path


def _is_opened(path: Path_) -> bool:
    """Whether others have a table where we have a key: `[data] path` is `data`."""
    return any(alias.startswith(f"{'.'.join(path)}.") for alias in SFT_ALIASES)


def _inside_free_table(root: type[Section], path: Path_) -> bool:
    """Whether some table around the key takes any key: `args` of an environment."""
    around = (find(root, path[:depth]) for depth in range(1, len(path)))
    return any(found is not None and found.kind == "table" for found in around)


def _nest(table: dict[str, Any], scope: Path_) -> dict[str, Any]:
    for part in reversed(scope):
        table = {part: table}
    return table


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    """Tables merge, key by key; anything else, lists too, is replaced."""
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


def _item(container: Any, part: str) -> Any:
    if isinstance(container, list):
        return container[int(part)] if part.isdigit() and int(part) < len(container) else None
    return container.get(part)


def _value_at(tree: Any, path: Path_) -> Any:
    for part in path:
        tree = _item(tree, part) if isinstance(tree, dict | list) else None
    return tree


def _no_such_item(flag: str, path: Path_, container: Any) -> str:
    if not isinstance(container, list):
        return f"`{flag}`: `{as_key(path)}` is no table in what was given - expected one. Set it in a file."
    name, count = as_key(path[:-1]), len(container)
    have = f"there {'is' if count == 1 else 'are'} {count}, counted from 0" if count else "there are none"
    return (
        f"`{flag}` points to `{as_key(path)}` - {have}. "
        f"Write `{as_flag(path[:-1])}.0.…` for the first, or add a `[[{name}]]` to the file."
    )
