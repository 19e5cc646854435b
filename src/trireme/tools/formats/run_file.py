"""Read a command line whose run file may be in another format: a file, flags of either format, flags of the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.arguments import HELP, TypedFile, TypedFlag, mark_file, parse_arguments
from trireme.config.compatibility import Kind, belongs_elsewhere, keys_for, kind_of
from trireme.config.files import given_values, read_table
from trireme.config.load import knows, read_as, read_with_lines
from trireme.config.nested import value_at
from trireme.config.reference import help_text
from trireme.config.resolve import resolve
from trireme.config.rows.rules import on_machine
from trireme.config.rules.check import check
from trireme.config.run import RunConfig
from trireme.config.section import Field, Section, find
from trireme.config.translation import Line, Translated, their_keys_named, with_comments
from trireme.tools.formats.flat import FLAT, HOSTED
from trireme.tools.formats.translation import Format, path_of, translate
from trireme.tools.formats.translation import knows as knows_key
from trireme.tools.formats.vf_rl import VF_RL

FORMATS: dict[Kind, Format] = {"vf-rl": VF_RL, "flat": FLAT, "hosted": HOSTED}


class Command(Section):
    """Flags of the command itself; no part of the configuration, and not allowed in files."""

    session: str | None = None
    """Name of the tmux session; also `-s`. Without tmux everything runs in this terminal."""
    one_terminal: bool = False
    """Everything in this terminal, also where tmux is installed."""
    print_config: bool = False
    """Print the run in the keys of `rl`, with a comment on what became of each key; start nothing."""
    dry_run: bool = False
    """Show what would be started; start nothing."""

    def given(self) -> list[str]:
        """Return the flags that were typed."""
        return [f"--{name.replace('_', '-')}" for name in sorted(self.model_fields_set)]


@dataclass(frozen=True)
class TypedRun:
    """A run as it was typed, in any format.

    Example:
        TypedRun(file="reverse-text.toml", command=Command(), config=RunConfig(...), lines=(...))
    """

    file: str
    command: Command
    config: RunConfig  # nothing is derived yet
    lines: tuple[Line, ...]  # each key of the file, with what became of it
    typed: tuple[str, ...] = ()  # flags of ours on top of the file
    env_files: tuple[Path, ...] = ()  # files of environment variables that the run is to have

    @property
    def table(self) -> dict[str, Any]:
        """Return what was given, in our keys."""
        return given_values(self.config)

    def as_toml(self) -> str:
        """Return a file for `rl @`, with what became of each key as comments on top."""
        return with_comments(self.config, (*self.lines, *(f"{words} was typed" for words in self.typed)))


def read_run_file(argv: list[str], devices: Devices, *, program: str, kinds: tuple[Kind, ...]) -> TypedRun:
    """Read one file, with or without an `@`, and the flags around it.

    Args:
        kinds: formats that the program takes; the first is the one that it is about.

    Raises: ConfigError with all that is wrong in the file, or with the flags; SystemExit(0) after `--help`.
    """
    if any(word in HELP for word in argv):
        print(help_of(FORMATS[kinds[0]], program))
        raise SystemExit(0)

    # The file holds the whole run, so a second file, or one for a single table, has no meaning.
    arguments = parse_arguments(mark_file(["--session" if word == "-s" else word for word in argv]))
    files = [argument for argument in arguments if isinstance(argument, TypedFile)]
    if len(files) != 1 or files[0].scope:
        raise ConfigError(
            f"{len(files)} files were given ({', '.join(file.name for file in files) or 'none'}) - `{program}` takes "
            f"one, which holds the whole run. Type `{program} @ FILE`."
        )

    # Flags of the command are taken out first: they are keys of no configuration.
    flags = [argument for argument in arguments if isinstance(argument, TypedFlag)]
    own = [flag for flag in flags if knows(Command, flag)]
    command = read_as(Command, {}, where=program, flags=own)

    # The format is read off the file's keys. A file of another program gets an error that names that program.
    file = files[0].name
    table = read_table(Path(file))
    if (kind := kind_of(table)) not in kinds:
        raise ConfigError(belongs_elsewhere(file, kind, expected=kinds[0]))

    # Each other flag is a key of the file's format or of ours. If both have it, the file's format wins. One that
    # neither knows is taken as theirs, so that it is refused with suggestions from their keys.
    rest = [flag for flag in flags if flag not in own]
    made, theirs, where = Translated(), list[TypedFlag](), file
    if kind != "run":
        format, where = FORMATS[kind], f"{file}, translated"
        theirs = [flag for flag in rest if knows_key(format, flag) or not knows(RunConfig, flag)]
        made = translate(format, table, devices, where=file, flags=theirs)

    # Our flags are applied to the translated file, so they override what it set.
    ours = [flag for flag in rest if flag not in theirs]
    with their_keys_named(made.lines), on_machine(devices):
        config, lines = read_with_lines(RunConfig, table if kind == "run" else made.table, where=where, flags=ours)
    named = next((line.value for line in made.lines if line.theirs == ("env_file",)), ())
    return TypedRun(
        file,
        command,
        config,
        lines=tuple(lines if kind == "run" else made.lines),
        typed=tuple(" ".join([flag.name, *flag.values]) for flag in ours),
        env_files=tuple(Path(str(file)) for file in (named if isinstance(named, list | tuple) else [named])),
    )


def help_of(format: Format, program: str) -> str:
    """Return what a command prints for `--help`: its flags, and those of its format with what they are here."""
    keys = []
    for row in format.rows:
        # What a rule sets is told by the table of names, or is a sampling parameter by its own name.
        name = row.theirs.rpartition(".")[2]
        alike = [row.ours] if isinstance(row.ours, str) else [*keys_for(name), f"orchestrator.sampling.{name}"]
        known = ((key, find(RunConfig, path_of(key))) for key in alike if row.ours is not None)
        key, ours = next(((key, found) for key, found in known if found), ("", None))
        about = row.note or (f"{key}: {ours.doc}" if ours else "see `--print-config`")
        required, default = row.theirs in format.required, value_at(format.defaults, path_of(row.theirs))
        keys.append(Field(row.theirs, "text", ours.words if ours else "value", False, None, required, default, about))
    return help_text(None, Command, section=None, program=program, keys=keys)


def resolve_run(typed: TypedRun, devices: Devices) -> RunConfig:
    """Return the run with everything derived and checked.

    Raises: ConfigError that names the keys of the file, too.
    """
    config = resolve(typed.config, devices)
    with their_keys_named(typed.lines):
        check(config, devices)
    return config
