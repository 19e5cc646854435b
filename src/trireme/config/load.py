"""Read a command's configuration: defaults < environment variables < files, left to right < flags.

pydantic-settings reads the environment (`TRIREME_MAX_STEPS`, `TRIREME_TRAINER__OPTIM__LR`) and pydantic validates the
whole. Files and flags are merged here, because flags may point into arrays of files (`--orchestrator.env.0.id x`) and
each problem names the file or flag that it came from. All problems are shown together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field as Documented
from pydantic import ValidationError

from trireme.base.errors import ConfigError
from trireme.config.arguments import HELP, TypedFile, TypedFlag, parse_arguments
from trireme.config.compatibility import ALIASES, SFT_ALIASES, SHORT_FLAGS, belongs_elsewhere, kind_of
from trireme.config.files import PROCESSES, ProcessName, read_run, read_table, toml_value
from trireme.config.problems import KeyPath, Source, explain, raise_together, unknown_key
from trireme.config.reference import help_text
from trireme.config.run import RunConfig
from trireme.config.section import NONE, Field, Section, as_flag, as_key, fields_of, find, read_structure

AnyConfig = TypeVar("AnyConfig", bound=Section)

MOST_LEVELS = 64  # of tables and arrays inside one value


class Invocation(Section):
    """Flags of the command itself; no part of the configuration, and not allowed in files."""

    dry_run: bool = False
    """Show what would be started and write the resolved configuration; start nothing."""
    run: Path | None = Documented(default=None)
    """A resolved `configs/run.json`: load exactly that. This is how `rl` starts its processes."""
    node: int | None = None
    """Number of this machine's address in its table of `[hosts]`, counted from 0; found by the addresses if not set."""


def load_run_config(
    argv: list[str], *, section: ProcessName | None = None, program: str
) -> tuple[RunConfig, Invocation]:
    """Return the run as typed. Nothing is derived yet: see `trireme.config.resolve`.

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
        print(help_text(root, Invocation, section=section, program=program))
        raise SystemExit(0)
    arguments = parse_arguments(argv)
    own = [flag for flag in arguments if isinstance(flag, TypedFlag) and knows(Invocation, flag, exactly=False)]
    invocation = read_as(Invocation, {}, where=program, flags=own)
    others = [argument for argument in arguments if argument not in own]
    if invocation.run:
        if others:
            names = ", ".join(f"`{other.name}`" for other in others)
            raise ConfigError(
                f"`--run {invocation.run}` came with {names} - expected nothing else, as the file is a whole run. "
                f"Leave them out, or type `@ {invocation.run}` instead to change values of it."
            )
        return read_run(root, invocation.run), invocation
    reading = _Reading(root, section)
    reading.take_environment()
    for argument in others:
        if isinstance(argument, TypedFile):
            reading.take_file(argument)
    for argument in others:
        if isinstance(argument, TypedFlag):
            reading.take_flag(argument)
    return reading.validate(), invocation


def read_as(root: type[AnyConfig], table: dict[str, Any], *, where: str, flags: Sequence[TypedFlag] = ()) -> AnyConfig:
    """Return a table that was read already, as a section.

    Args:
        where: the table's name in messages.
        flags: typed on top of it.

    Raises: ConfigError with all problems together.
    """
    reading = _Reading(root, None)
    if root is RunConfig:
        reading.take_environment()
    reading.take_table(table, Source(where))
    for flag in flags:
        reading.take_flag(flag)
    config: AnyConfig = reading.validate()
    return config


def knows(root: type[Section], flag: TypedFlag, *, exactly: bool = True) -> bool:
    """Return whether a flag belongs to this configuration. `--no-x` belongs to the one that has `x`.

    Args:
        exactly: the whole key must exist; otherwise its first part.
    """
    path = _without_short_form(root, flag.path) if exactly else flag.path[:1]
    positive = tuple(part.removeprefix("no_") for part in path)
    return find(root, path) is not None or find(root, _without_short_form(root, positive)) is not None


def read_environment(root: type[Section]) -> dict[str, Any]:
    """Return what environment variables say about a configuration, as pydantic-settings finds it.

    Example:
        read_environment(RunConfig)  # {"trainer": {"optim": {"lr": "1e-5"}}} for TRIREME_TRAINER__OPTIM__LR=1e-5
    """
    from pydantic_settings import BaseSettings, EnvSettingsSource  # takes 0.1 s, which `--help` need not wait for

    settings = type("Settings", (root, BaseSettings), {"model_config": {"enable_decoding": False}})
    found = EnvSettingsSource(settings, env_prefix="TRIREME_", env_nested_delimiter="__", env_ignore_empty=True)
    return found()  # texts, which `Section` reads like those of flags


class _Reading:
    """The merged values of all sources, where each came from, and the problems on the way."""

    def __init__(self, root: type[Section], section: ProcessName | None) -> None:
        self.root = root
        self.section = section
        self.tree: dict[str, Any] = {}
        self.origins: dict[KeyPath, Source] = {}
        self.problems: list[str] = []
        self.whole_run_given = False

    def take_environment(self) -> None:
        for path, value in _leaves(read_environment(self.root)):
            self._set(path, value, Source("TRIREME_" + "__".join(path).upper()))

    def take_file(self, typed: TypedFile) -> None:
        try:
            table = read_table(Path(typed.name))
        except ConfigError as error:
            self.problems.append(str(error))
            return
        if self.root is RunConfig and not self.section and not typed.scope and (kind := kind_of(table)) != "run":
            self.problems.append(belongs_elsewhere(typed.name, kind))
            return
        scope = self._place(typed.scope) if typed.scope else (self.section,) if self.section else ()
        found = find(self.root, scope)
        if scope and found is None:
            self.problems.append(
                unknown_key(self.root, scope, Source(as_flag(typed.scope), typed=""), "a file can fill a table only")
            )
        elif found is not None and found.kind != "section":
            self.problems.append(
                f"`{as_flag(typed.scope)} @ {typed.name}`: a file can fill a table, this takes {found.words}. "
                f"Write `{as_flag(typed.scope)} value`."
            )
        elif scope in [(name,) for name in PROCESSES]:
            self._take_process_file(table, scope, Source(typed.name, hidden=scope))
        else:
            self.take_table(table, Source(typed.name, hidden=scope), scope)

    def _take_process_file(self, table: dict[str, Any], scope: KeyPath, source: Source) -> None:
        """Take a process's own file: keys of its table go there, the others belong to the run."""
        if any(name in table for name in PROCESSES):
            self.whole_run_given = True
            self.take_table(table, source)
            return
        own = {key: value for key, value in table.items() if len(_place_in_process(self.root, scope[0], (key,))) > 1}
        self.take_table(own, source, scope)
        self.take_table({key: value for key, value in table.items() if key not in own}, source)

    def take_table(self, table: dict[str, Any], source: Source, above: KeyPath = ()) -> None:
        self.origins.setdefault(above, source)
        given: dict[KeyPath, KeyPath] = {}
        for typed, value in _leaves(table, above, self.root):
            path = _without_alias(typed)
            if typed != given.setdefault(path, typed):
                self.problems.append(
                    f"{source.label}: `{as_key(source.shown(given[path]))}` and `{as_key(source.shown(typed))}` are "
                    "two names of one key - expected one of them. Remove the first."
                )
            self._set(path, value, source)

    def take_flag(self, flag: TypedFlag) -> None:
        source = Source(flag.name, typed=" ".join(flag.values))
        path, is_negated = self._flag_path(flag)
        found = find(self.root, path)
        around = [above for depth in range(1, len(path)) if (above := find(self.root, path[:depth]))]
        if found is None and not any(above.kind == "table" for above in around):
            hidden: KeyPath = (self.section,) if self.section and path[0] == self.section else ()
            self.problems.append(unknown_key(self.root, path, Source(flag.name, hidden, typed="")))
            return
        for depth in range(1, len(path)):
            above = find(self.root, path[:depth])
            if above and above.kind == "sections" and not path[depth - 1].isdigit() and not path[depth].isdigit():
                array = path[:depth]
                self.problems.append(
                    f"`{flag.name}`: `{as_key(array)}` is an array of tables - expected the number of one, counted "
                    f"from 0. Write `{as_flag((*array, '0', *path[depth:]))}`."
                )
                return
        if found is None:
            self._set(path, _free_value(source.typed or "true"), source)
        elif is_negated:
            self._take_negated(flag, path, found)
        elif not flag.values and found.kind not in ("bool", "section"):
            self.problems.append(f"`{flag.name}` came without a value - expected {found.words}. {found.doc}")
        else:
            self._set(path, _flag_value(found, flag.values), source)

    def _flag_path(self, flag: TypedFlag) -> tuple[KeyPath, bool]:
        """Return the key of a flag, and whether the flag is one of `--no-x`, `--a.no-x`, `--no-a.x`."""
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

    def _take_negated(self, flag: TypedFlag, path: KeyPath, found: Field) -> None:
        """Take `--no-resume` as `--resume false`; `--no-wandb` removes the whole table."""
        if flag.values or not (found.kind == "bool" or found.optional):
            self.problems.append(
                f"`{flag.name}` {' '.join(flag.values)}: `no-` takes no value and switches off what can be off. "
                f"Write `{as_flag(path)} value`; it takes {found.words}."
            )
        else:
            self._set(path, False if found.kind == "bool" else None, Source(flag.name, typed=""))

    def _place(self, typed: KeyPath) -> KeyPath:
        """Return the key in the root that a typed one stands for, by the rule of a process's own command."""
        path = typed = _without_short_form(self.root, typed)
        if self.section and not (self.whole_run_given and typed[0] in fields_of(self.root)):
            path = _place_in_process(self.root, self.section, typed)
            unknown = len(path) == len(typed) and typed[0] not in fields_of(self.root)
            path = (self.section, *typed) if unknown else path
        return _without_alias(path)

    def _set(self, path: KeyPath, value: Any, source: Source) -> None:
        """Merge one value: tables merge key by key; anything else, lists too, is replaced."""
        here: Any = self.tree
        for depth, part in enumerate(path[:-1]):
            above, step = find(self.root, path[: depth + 1]), _item(here, part)
            if step is None and isinstance(here, dict):
                step = here[part] = [] if above and above.kind == "sections" else {}
            elif step is None and part == str(len(here)) and self._begins_item(path, depth):
                here.append(step := {})
            if step is None and above and above.kind == "sections":
                self._refuse_item(source.label, path[: depth + 1], here)
                return
            if not isinstance(step, dict | list):
                if above is None:  # in a table that takes any key; elsewhere pydantic refuses the wrong value
                    self.problems.append(
                        f"`{source.label}`: `{as_key(path[: depth + 1])}` is {toml_value(step)} - expected a table. "
                        "Remove one of the two."
                    )
                return
            here = step
        if isinstance(here, list):
            self._refuse_item(source.label, path, here)
            return
        found = find(self.root, path)
        value = found.read(value) if found else value
        if _is_too_deep(value):
            self.problems.append(
                f"{source.label}: the value of `{as_key(source.shown(path))}` is more than {MOST_LEVELS} levels deep - "
                "expected fewer. Remove some of them."
            )
            return
        before = here.get(path[-1])
        here[path[-1]] = _merged(before, value) if isinstance(value, dict) and isinstance(before, dict) else value
        self.origins[path] = source

    def _begins_item(self, path: KeyPath, depth: int) -> bool:
        """Return whether a flag may add a table to an array: it must set the key that each table must have (`id`)."""
        found = find(self.root, path)
        return len(path) == depth + 2 and found is not None and found.required

    def _refuse_item(self, flag: str, path: KeyPath, array: list[Any]) -> None:
        name, count = as_key(path[:-1]), len(array)
        have = f"there {'is' if count == 1 else 'are'} {count}, counted from 0" if count else "there are none"
        self.problems.append(
            f"`{flag}` points to `{as_key(path)}` - {have}. "
            f"Write `{as_flag(path[:-1])}.0.…` for the first, or add a `[[{name}]]` to the file."
        )

    def validate(self) -> Any:
        """Raises: ConfigError with the problems of all sources and of pydantic."""
        config = None
        try:
            config = self.root.model_validate(self.tree)
        except ValidationError as error:
            self.problems += [self._explain(dict(problem)) for problem in error.errors(include_url=False)]
        raise_together(list(dict.fromkeys(self.problems)))
        return config

    def _explain(self, error: dict[str, Any]) -> str:
        path = whole = tuple(map(str, error["loc"]))
        while path and find(self.root, path) is None:
            path = path[:-1]
        around = (whole[:depth] for depth in range(len(whole), -1, -1))
        source = next((self.origins[place] for place in around if place in self.origins), Source("the defaults"))
        if error["type"] == "extra_forbidden" or not path:
            return explain(self.root, error, whole, None, source)
        if len(path) < len(whole):  # within a list or a free table: the whole of it is shown
            error |= {"input": _value_at(self.tree, path), "type": "value_error"}
        return explain(self.root, error, path, find(self.root, path), source)


def _leaves(
    table: dict[str, Any], above: KeyPath = (), root: type[Section] | None = None
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the values of nested tables with their paths; with `root`, only of tables that are tables there."""
    for key, value in table.items():
        path = (*above, key)
        found = find(root, _without_alias(path)) if root else None
        is_table = root is None or (found is not None and found.kind == "section") or _has_aliases_below(path)
        if isinstance(value, dict) and value and is_table:
            yield from _leaves(value, path, root)
        else:
            yield path, value


def _flag_value(found: Field, words: tuple[str, ...]) -> Any:
    if not words:
        return {"bool": True, "section": {}}[found.kind]
    if found.kind == "text" and found.optional and len(words) == 1 and words[0].lower() in (NONE, "null"):
        return None
    return (" " if found.kind != "list" else ",").join(words)


def _free_value(text: str) -> Any:
    """Return a value of a table that takes any key (`args` of an environment): JSON or TOML, text otherwise."""
    return (
        None
        if text.lower() in (NONE, "null")
        else read_structure(text.lower() if text.lower() in ("true", "false") else text)
    )


def _place_in_process(root: type[Section], process: str, typed: KeyPath) -> KeyPath:
    """Return a key of the process's own table first, then of the run: `optim.lr` is `trainer.optim.lr`."""
    own = find(root, _without_alias((process, typed[0])))
    return (process, *typed) if own or typed[0] not in fields_of(root) else typed


def _without_short_form(root: type[Section], typed: KeyPath) -> KeyPath:
    """Return the key of a short flag, if the root has it: `--no-restart` is `--no-supervisor.restart`."""
    long = tuple(SHORT_FLAGS.get(".".join(typed), "").split("."))
    return long if find(root, long) else typed


_ALIASES = ALIASES | SFT_ALIASES


def _without_alias(path: KeyPath) -> KeyPath:
    """Return the path under our own names."""
    for depth in range(len(path), 0, -1):
        if (ours := _ALIASES.get(".".join(path[:depth]))) is not None:
            return (*ours.split("."), *path[depth:])
    return path


def _has_aliases_below(path: KeyPath) -> bool:
    """Return whether other systems have a table where we have a key: `[data] path` is `data`."""
    return any(alias.startswith(f"{'.'.join(path)}.") for alias in SFT_ALIASES)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return below | both


def _is_too_deep(value: Any) -> bool:
    """Return whether functions that call themselves for each level of a value might not end."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _item(container: Any, part: str) -> Any:
    if isinstance(container, list):
        return container[int(part)] if part.isdigit() and int(part) < len(container) else None
    return container.get(part)


def _value_at(tree: Any, path: KeyPath) -> Any:
    for part in path:
        tree = _item(tree, part) if isinstance(tree, dict | list) else None
    return tree
