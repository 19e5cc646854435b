"""Read a command's configuration: defaults < environment variables < files, left to right < flags.

pydantic-settings reads the environment (`TRIREME_MAX_STEPS`, `TRIREME_TRAINER__OPTIM__LR`) and pydantic validates the
whole. Files and flags are merged here, because flags may point into arrays of files (`--orchestrator.env.0.id x`) and
each problem names the file or flag that it came from. All problems are shown together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import Field as Documented
from pydantic import PrivateAttr, ValidationError

from trireme.base.errors import ConfigError
from trireme.config.arguments import HELP, TypedFile, TypedFlag, parse_arguments
from trireme.config.compatibility import belongs_elsewhere, kind_of
from trireme.config.files import PROCESSES, ProcessName, read_run, read_table, toml_value
from trireme.config.nested import KeyPath, merged, with_value
from trireme.config.problems import Source, explain, raise_together, unknown_key
from trireme.config.reference import help_text
from trireme.config.rows.by_command import rows_for
from trireme.config.run import RunConfig
from trireme.config.section import NONE, AnySection, Section, as_flag, as_key, fields_of, find, read_structure, walk
from trireme.config.translation import (
    Line,
    Translated,
    describe_without_effect,
    is_known,
    names_below,
    renamed,
    their_keys_named,
    translate,
    with_comments,
)

MOST_LEVELS = 64  # levels of tables and arrays inside one value
NEARLY = 0.9  # share of a variable's letters that a key has in the same order, from which on it is a slip

_OF_A_SERVICE = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|PORT(?==\w+://))="
)
"""Variables, with the beginning of their values, that Kubernetes sets in every pod for a service: for
`trireme-inference`, `TRIREME_INFERENCE_PORT=tcp://…` and others."""


class Invocation(Section):
    """Flags of the command itself; no part of the configuration, and not allowed in files."""

    dry_run: bool = False
    """Show what would be started and write the resolved configuration; start nothing."""
    run: Path | None = Documented(default=None)
    """A resolved `configs/run.json`: load exactly that. This is how `rl` starts its processes."""
    print_config: bool = False
    """Print the configuration in our own keys, with a comment on what became of each key; start nothing."""
    node: int | None = None
    """Number of this machine's address in its table of `[hosts]`, counted from 0; found by the addresses if not set."""
    join: str | None = None
    """`inference` alone: join the running run whose orchestrator is at this address, with `ports.batches` as port."""

    _lines: tuple[Line, ...] = PrivateAttr(default=())

    @property
    def lines(self) -> tuple[Line, ...]:
        """Each translated key of the files and flags, with what became of it."""
        return self._lines

    @property
    def without_effect(self) -> str:
        """A paragraph about keys without effect; empty without any."""
        return describe_without_effect(self._lines)

    @contextmanager
    def their_keys_named(self) -> Iterator[None]:
        """Add to an error that names a key of ours the one that the user wrote."""
        with their_keys_named(self._lines):
            yield


def load_run_config(
    argv: list[str], *, section: ProcessName | None = None, program: str, beneath: dict[str, Any] | None = None
) -> tuple[RunConfig, Invocation]:
    """Return the run as typed. Nothing is derived yet: see `trireme.config.resolve`.

    Args:
        argv: the words after the program's name.
        section: for a process's own command, whose files and flags may leave its table's name out.
        program: its name, for `--help`.
        beneath: values under all others, of a run that an engine joins.

    Raises: ConfigError with all problems together; SystemExit(0) after `--help` and `--print-config`.
    """
    return load_config(argv, RunConfig, section=section, program=program, beneath=beneath)


def load_config(
    argv: list[str],
    root: type[AnySection],
    *,
    section: ProcessName | None = None,
    program: str,
    beneath: dict[str, Any] | None = None,
) -> tuple[AnySection, Invocation]:
    if any(word in HELP for word in argv):
        print(help_text(root, Invocation, section=section, program=program))
        raise SystemExit(0)

    # The command's own flags, such as `--dry-run`, are no part of the configuration.
    arguments = parse_arguments(argv)
    own = [flag for flag in arguments if isinstance(flag, TypedFlag) and knows(Invocation, flag, exactly=False)]
    invocation = read_as(Invocation, {}, where=program, flags=own)
    others = [argument for argument in arguments if argument not in own]

    # A resolved run is loaded exactly as it was written, so nothing may be merged into it.
    if invocation.run:
        if others:
            names = ", ".join(f"`{other.name}`" for other in others)
            raise ConfigError(
                f"`--run {invocation.run}` came with {names} - expected nothing else, as the file is a whole run. "
                f"Leave them out, or type `@ {invocation.run}` instead to change values of it."
            )
        return read_run(root, invocation.run), invocation

    if invocation.join is not None and section != "inference":
        raise ConfigError(
            f"`{program} --join` - expected it of `inference` alone, whose engine joins a run. Leave `--join` out."
        )

    reading = _Reading(root, section)
    if beneath:
        reading.take_table(beneath, Source("the run"))
    reading.take_environment()
    reading.take_all(others)
    config = reading.validate()
    invocation._lines = tuple(reading.lines)
    if invocation.print_config:
        print(with_comments(config, reading.lines), end="")
        raise SystemExit(0)
    return config, invocation


def read_as(
    root: type[AnySection], table: dict[str, Any], *, where: str, flags: Sequence[TypedFlag] = ()
) -> AnySection:
    """Return a table that was read already, as a section.

    Args:
        where: the table's name in messages.
        flags: typed on top of it.

    Raises: ConfigError with all problems together.
    """
    return read_with_lines(root, table, where=where, flags=flags)[0]


def read_with_lines(
    root: type[AnySection], table: dict[str, Any], *, where: str, flags: Sequence[TypedFlag] = ()
) -> tuple[AnySection, list[Line]]:
    """Return the same, and what became of each key."""
    reading = _Reading(root, None)
    if root is RunConfig:
        reading.take_environment()
    reading.take_table(table, Source(where))
    reading.take_all(flags)
    return reading.validate(), reading.lines


def knows(root: type[Section], flag: TypedFlag, *, exactly: bool = True) -> bool:
    """Return whether a flag belongs to this configuration. `--no-x` belongs to the one that has `x`.

    Args:
        exactly: the whole key must exist; otherwise its first part.
    """
    path = flag.path if exactly else flag.path[:1]
    positive = tuple(part.removeprefix("no_") for part in path)
    # A table that takes any key does not know one.
    rows = rows_for(root)
    return any(
        find(root, each) is not None or (is_known(each, rows, root) and renamed(each, rows, root) != each)
        for each in (path, positive)
    )


class _Reading:
    """The merged values of all sources, where each came from, and the problems on the way."""

    def __init__(self, root: type[Section], section: ProcessName | None) -> None:
        self.root = root
        self.section = section
        self.tree: dict[str, Any] = {}
        self.origins: dict[KeyPath, Source] = {}
        self.problems: list[str] = []
        self.given: dict[str, Any] = {}  # values of files and flags, as they were written
        self.lines: list[Line] = []
        self.whole_run_given = False
        self.refused: list[tuple[dict[str, Any], Source, list[str]]] = []  # tables, and why keys of them are refused

    @contextmanager
    def _collect_problem(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self.problems.append(str(error))

    def take_environment(self) -> None:
        """Take `TRIREME_TRAINER__OPTIM__LR=1e-5` as {"trainer": {"optim": {"lr": "1e-5"}}}."""
        from pydantic_settings import BaseSettings, EnvSettingsSource  # takes 0.1 s, which `--help` need not wait for

        settings = type("Settings", (self.root, BaseSettings), {"model_config": {"enable_decoding": False}})
        found = EnvSettingsSource(settings, env_prefix="TRIREME_", env_nested_delimiter="__", env_ignore_empty=True)

        # The values are texts, which `Section` reads like those of flags.
        for path, value in _leaves(found()):
            self._set(path, value, Source(_variable(path)))

        # Warn of variables that look like a misspelt key. The others are ours, or another command's.
        keys = {key.replace(".", "_"): tuple(key.split(".")) for key, _ in walk(self.root)}
        for name, value in os.environ.items():
            typed = name.removeprefix("TRIREME_").lower()
            if "__" not in name and _OF_A_SERVICE.match(f"{name}={value}"):
                continue
            if name.startswith("TRIREME_") and value and typed.split("__")[0] not in fields_of(self.root):
                for near in get_close_matches(typed.replace("__", "_"), keys, n=1, cutoff=NEARLY):
                    self.problems.append(
                        f"{name}: no key has that name - expected one, with `__` after each table. Did you mean "
                        f"`{_variable(keys[near])}`? If not, unset it."
                    )

    def take_all(self, arguments: Sequence[TypedFile | TypedFlag]) -> None:
        """Take files, then flags."""
        for typed in sorted(arguments, key=lambda typed: isinstance(typed, TypedFlag)):
            with self._collect_problem():
                self._take_file(typed) if isinstance(typed, TypedFile) else self._take_flag(typed)

    def _take_file(self, typed: TypedFile) -> None:
        table = read_table(Path(typed.name))
        # Files of other systems are told apart only if the command takes a whole run.
        if self.root is RunConfig and not self.section and not typed.scope and (kind := kind_of(table)) != "run":
            raise ConfigError(belongs_elsewhere(typed.name, kind))

        # The table that the file fills: the one typed before it, else that of the process's own command.
        scope = self._place(typed.scope) if typed.scope else (self.section,) if self.section else ()
        found, flag = find(self.root, scope), as_flag(typed.scope)
        if scope and found is None:
            raise ConfigError(unknown_key(self.root, scope, Source(flag, typed=""), "a file can fill a table only"))
        if found is not None and found.kind != "section":
            raise ConfigError(
                f"`{flag} @ {typed.name}`: a file can fill a table, this takes {found.words}. Write `{flag} value`."
            )

        # The file of a process may be a table of that process, a whole run, or keys of both together.
        source = Source(typed.name, hidden=scope)
        if scope not in [(name,) for name in PROCESSES]:
            self.take_table(table, source, scope)
        elif any(name in table for name in PROCESSES):
            self.whole_run_given = True
            self.take_table(table, source)
        else:  # keys of the process's table go there, the others belong to the run
            own = {key: value for key, value in table.items() if self._is_of_process(scope[0], key)}
            self.take_table(own, source, scope)
            self.take_table({key: value for key, value in table.items() if key not in own}, source)

    def take_table(self, table: dict[str, Any], source: Source, above: KeyPath = ()) -> None:
        self.origins.setdefault(above, source)
        whole = with_value({}, above, table) if above else table
        self.given = merged(self.given, whole)
        found = translate(whole, rows_for(self.root), where=source.label, root=self.root, given=self.given)
        for path, value in _leaves(found.table, self.root):
            self._set(path, value, source)
        self._note(found, source)
        if found.problems:
            self.refused.append((whole, source, found.problems))

    def retry_refused(self) -> None:
        """Take back each refusal that no longer holds with what came after it: flags follow the files."""
        given = merged(self.given, self.tree)
        for whole, source, before in self.refused:
            found = translate(whole, rows_for(self.root), where=source.label, root=self.root, given=given)
            if {*before} <= {*found.problems}:
                continue

            self.problems = [problem for problem in self.problems if problem not in before]
            for path, value in _leaves(found.table, self.root):
                if path not in self.origins:
                    self._set(path, value, source)
            known = [line.theirs for line in self.lines]
            self._note(replace(found, lines=[line for line in found.lines if line.theirs not in known]), source)

    def _note(self, found: Translated, source: Source) -> None:
        """Keep what became of each key, so that messages name the keys as they were written."""
        self.problems += [problem for problem in found.problems if problem not in self.problems]
        self.lines += found.lines
        for ours, theirs in found.tables.items():
            self.origins[ours] = replace(source, line=Line(theirs, None, {}, ""), ours=ours)
        for ours, line in found.origins.items():
            if ours != line.theirs:
                self.origins[ours] = replace(source, line=line, ours=ours)

    def _take_flag(self, flag: TypedFlag) -> None:
        path, is_negated = self._flag_path(flag)
        if (moved := self._translate_flag(flag, path, is_negated)) is None:
            return
        path = moved
        found = find(self.root, path)
        around = (find(self.root, path[:depth]) for depth in range(1, len(path)))

        # A key that no field has is allowed only inside a table that takes any key.
        if found is None and not any(above and above.kind == "table" for above in around):
            hidden: KeyPath = (self.section,) if self.section and path[0] == self.section else ()
            raise ConfigError(unknown_key(self.root, path, Source(flag.name, hidden, typed="")))

        # The kind of the field decides what the words stand for. Pydantic converts and checks the value.
        words = " ".join(flag.values)
        if found is None:
            lower = words.lower() or "true"  # a table that takes any key (`args` of an environment): JSON, TOML or text
            value = None if lower in (NONE, "null") else read_structure(lower if lower in ("true", "false") else words)
        elif is_negated:  # `--no-resume` is `--resume false`; `--no-wandb` removes the whole table
            if flag.values or not (found.kind == "bool" or found.optional):
                raise ConfigError(
                    f"`{flag.name}` {words}: `no-` takes no value and switches off what can be off. "
                    f"Write `{as_flag(path)} value`; it takes {found.words}."
                )
            value = False if found.kind == "bool" else None
        elif not flag.values:
            if found.kind not in ("bool", "section"):
                raise ConfigError(f"`{flag.name}` came without a value - expected {found.words}. {found.doc}")
            value = True if found.kind == "bool" else {}
        elif found.kind == "text" and found.optional and words.lower() in (NONE, "null"):
            value = None
        elif found.is_text_list and len(flag.values) > 1:
            value = list(flag.values)  # a word of the shell stays whole: `sh -c "echo one, two"`
        else:
            value = ",".join(flag.values) if found.kind == "list" else words

        self._set(path, value, Source(flag.name, typed=words))

    def _translate_flag(self, flag: TypedFlag, path: KeyPath, is_negated: bool) -> KeyPath | None:
        """Return our key for that of a flag; None if it was set here, or has no effect."""
        rows = rows_for(self.root)
        # A table of ours may be a text there (`--model NAME` of evaluations), which a rule takes.
        has_rule = any(callable(row.ours) for row in rows if row.theirs == ".".join(path))
        is_table = (field := find(self.root, path)) is not None and field.kind == "section" and not field.optional
        ours = None if has_rule and is_table and flag.values else renamed(path, rows, self.root)
        if ours == path or not is_known(path, rows, self.root):
            return path
        words = " ".join(flag.values)
        value: Any = False if is_negated else read_structure(words) if flag.values else True
        before = self.given
        self.given = with_value(before, path, value)
        table = with_value({}, path, value)
        found = translate(table, rows, where=flag.name, root=self.root, given=self.given, is_flag=True)
        source = Source(flag.name, typed=words)
        self._note(found, source)
        if ours is not None and not found.problems:
            return ours

        # A rule of a whole table gives keys that it gave before, which another flag may have changed since.
        earlier = translate(table, rows, root=self.root, given=before, is_flag=True)
        said = {key: each for line in earlier.lines if line.value is not None for key, each in line.ours.items()}
        for key, each in found.settings.items():
            if key not in said or said[key] != each:
                self._set(key, each, source)
        return None

    def _flag_path(self, flag: TypedFlag) -> tuple[KeyPath, bool]:
        """Return the key of a flag, and whether the flag is one of `--no-x`, `--a.no-x`, `--no-a.x`."""
        path, rows = self._place(flag.path), rows_for(self.root)
        if is_known(path, rows, self.root):
            return path, False
        # The `no-` may be at the first part or at the last one.
        for index in {0, len(flag.path) - 1}:
            if flag.path[index].startswith("no_"):
                positive = (*flag.path[:index], flag.path[index].removeprefix("no_"), *flag.path[index + 1 :])
                if is_known(placed := self._place(positive), rows, self.root):
                    return placed, True
        return path, False

    def _place(self, typed: KeyPath) -> KeyPath:
        """Return the key in the root that a typed one stands for: on a process's own command, its table comes first,
        unless a file of the whole run was given."""
        is_of_run = self.whole_run_given and typed[0] in fields_of(self.root)
        if self.section and not is_of_run and self._is_of_process(self.section, typed[0]):
            return (self.section, *typed)
        return typed

    def _is_of_process(self, process: str, key: str) -> bool:
        """Return whether a key belongs to a process's own table: `optim` is `trainer.optim`, `max_steps` the run's."""
        if key in fields_of(self.root) or find(self.root, (process, key)) is not None:
            return find(self.root, (process, key)) is not None
        rows = rows_for(self.root)
        return key in names_below((process,), rows) or key not in names_below((), rows)

    def _set(self, path: KeyPath, value: Any, source: Source) -> None:
        """Merge one value: tables merge key by key; anything else, lists too, is replaced."""
        with self._collect_problem():
            if (table := self._table_at(path, source.label)) is None:
                return
            found = find(self.root, path)
            value = found.read(value) if found else value
            if _is_deeper(value, MOST_LEVELS):
                raise ConfigError(
                    f"{source.label}: the value of `{as_key(source.shown(path))}` is more than {MOST_LEVELS} levels "
                    "deep - expected fewer. Remove some of them."
                )
            before = table.get(path[-1])
            if isinstance(before, list):  # replaced, with all that was known of its items
                self.origins = {at: of for at, of in self.origins.items() if at[: len(path)] != path or at == path}
            table[path[-1]] = merged(before, value) if isinstance(value, dict) and isinstance(before, dict) else value
            self.origins[path] = source

    def _table_at(self, path: KeyPath, label: str) -> dict[str, Any] | None:
        """Return the table that holds a key, which is made if there is none; None if something else is in its place,
        which pydantic refuses.

        Raises: ConfigError if an array has no such table, or a value is in the place of a free table.
        """
        here: Any = self.tree

        for depth, part in enumerate(path[:-1]):
            inside, above, step = find(self.root, path[:depth]), find(self.root, path[: depth + 1]), _item(here, part)

            # Missing tables are made on the way. An array grows by one item at most, so that none is left empty.
            if step is None and isinstance(here, dict):
                step = here[part] = [] if above is not None and above.kind == "sections" else {}
            elif step is None and inside is not None and inside.kind == "sections":
                if part != str(len(here)):
                    raise ConfigError(_no_such_item(label, path[: depth + 1], len(here)))
                here.append(step := {})  # the next item of the array

            # A value is in the place of a table. Pydantic reports it unless the table takes any key.
            if not isinstance(step, dict | list):
                if above is None:  # in a table that takes any key
                    raise ConfigError(
                        f"`{label}`: `{as_key(path[: depth + 1])}` is {toml_value(step)} - expected a table. "
                        "Remove one of the two."
                    )
                return None
            here = step

        if isinstance(here, list):
            raise ConfigError(_no_such_item(label, path, len(here)))
        return here

    def validate(self) -> Any:
        """Raises: ConfigError with the problems of all sources and of pydantic."""
        config = None
        self.retry_refused()
        try:
            config = self.root.model_validate(self.tree)
        except ValidationError as error:
            self.problems += [self._explain(dict(problem)) for problem in error.errors(include_url=False)]
        raise_together(self.problems)
        return config

    def _explain(self, error: dict[str, Any]) -> str:
        # Pydantic points into lists and free tables. The nearest known field says what was expected.
        path = whole = tuple(map(str, error["loc"]))
        while path and find(self.root, path) is None:
            path = path[:-1]

        # The source is that of the value, or of the nearest table around it.
        around: Iterator[KeyPath] = (whole[:depth] for depth in range(len(whole), -1, -1))
        if error["type"] == "extra_forbidden":
            # An unknown table has no source itself: take that of one of its keys.
            around = chain([whole], (place for place in self.origins if place[: len(whole)] == whole), around)
        source = next((self.origins[place] for place in around if place in self.origins), Source("the defaults"))

        if error["type"] == "extra_forbidden" or not path:
            return explain(self.root, error, whole, None, source)
        if len(path) < len(whole):  # within a list or a free table: the whole of it is shown
            value: Any = self.tree
            for part in path:
                value = _item(value, part)
            error |= {"input": value, "type": "value_error"}
        return explain(self.root, error, path, find(self.root, path), source)


def _variable(path: KeyPath) -> str:
    return "TRIREME_" + "__".join(path).upper()


def _leaves(
    table: dict[str, Any], root: type[Section] | None = None, above: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the values of nested tables with their paths; with `root`, only of tables that are tables there."""
    for key, value in table.items():
        path = (*above, key)
        found = find(root, path) if root else None
        is_table = root is None or (found is not None and found.kind == "section")
        if isinstance(value, dict) and value and is_table:
            yield from _leaves(value, root, path)
        else:
            yield path, value


def _no_such_item(label: str, path: KeyPath, count: int) -> str:
    """Return the message for a key in a table that an array of `count` tables does not have."""
    have = f"there {'is' if count == 1 else 'are'} {count}, counted from 0" if count else "there are none"
    array = path[:-1]
    return (
        f"`{label}` points to `{as_key(path)}` - {have}. "
        f"Write `{as_flag(array)}.0.…` for the first, or add a `[[{as_key(array)}]]` to the file."
    )


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether a value has more levels than that: functions that call themselves for each might not end."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inside) and (levels == 0 or any(_is_deeper(each, levels - 1) for each in inside))


def _item(container: Any, part: str) -> Any:
    if isinstance(container, list):
        return container[int(part)] if part.isdigit() and int(part) < len(container) else None
    return container.get(part) if isinstance(container, dict) else None
