"""Commands of other formats: their file and flags become a run of ours, which is shown, or started in panes or here."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError
from trireme.cli.rl import dry_run, launch
from trireme.config.arguments import HELP, TypedFile, TypedFlag, mark_file, parse_arguments
from trireme.config.compatibility import Kind, belongs_elsewhere, kind_of
from trireme.config.files import read_table
from trireme.config.load import knows, read_as
from trireme.config.reference import manual
from trireme.config.resolve import resolve
from trireme.config.rules import check, check_launch
from trireme.config.run import RunConfig
from trireme.config.section import Section
from trireme.tools.formats import flat, hosted, vf_rl
from trireme.tools.formats.flat_file import Flat, Hosted
from trireme.tools.formats.translation import Translation, as_toml
from trireme.tools.formats.vf_rl_file import VfRl

FORMATS: dict[Kind, tuple[type[Section], Callable[..., Translation]]] = {
    "vf-rl": (VfRl, vf_rl.translate),
    "flat": (Flat, flat.translate),
    "hosted": (Hosted, hosted.translate),
}

EXAMPLES: dict[Kind, str] = {"vf-rl": "configs/vf-rl", "flat": "configs/prime-rl", "hosted": "configs/rl"}


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


@dataclass(frozen=True)
class Foreign:
    """A run as it was typed in the words of another format.

    Example:
        Foreign(file="reverse-text.toml", command=Command(), config=RunConfig(...), translation=Translation(...))
    """

    file: str
    command: Command
    config: RunConfig  # nothing is derived yet
    translation: Translation


def read_foreign(argv: list[str], devices: Devices, *, program: str, kinds: tuple[Kind, ...]) -> Foreign:
    """
    Args:
        kinds: formats that the program takes; the first is the one that it is about.

    Raises: ConfigError with all that is wrong in the file, or with the flags.
    """
    if any(word in HELP for word in argv):
        print(manual(FORMATS[kinds[0]][0], Command, section=None, program=program))
        raise SystemExit(0)
    file, flags = _read_words(argv, program, EXAMPLES[kinds[0]])
    own = [flag for flag in flags if _is_of_the_command(flag)]
    command = read_as(Command, {}, where=program, flags=own)
    rest = [flag for flag in flags if flag not in own]
    table = read_table(Path(file))
    if (kind := kind_of(table)) not in kinds:
        raise ConfigError(belongs_elsewhere(file, kind, expected=kinds[0]))
    theirs = [flag for flag in rest if _is_theirs(flag, kind)]
    ours = [flag for flag in rest if flag not in theirs]
    translation = _translate(table, kind, devices, file=file, flags=theirs)
    with their_keys_named(file, translation):
        config = read_as(RunConfig, translation.table, where=f"{file}, translated", flags=ours)
    return Foreign(file, command, config, _with_flags(translation, config, ours))


def _read_words(argv: list[str], program: str, examples: str) -> tuple[str, list[TypedFlag]]:
    """One file, with or without an `@`, and flags."""
    words = ["--session" if word == "-s" else word for word in argv]
    arguments = parse_arguments(mark_file(words))
    files = [argument for argument in arguments if isinstance(argument, TypedFile)]
    if len(files) != 1 or files[0].scope:
        raise ConfigError(
            f"{len(files)} files were given ({', '.join(file.name for file in files) or 'none'}) - `{program}` takes "
            f"one, which holds the whole run. Type `{program} @ {examples}/reverse-text.toml`, or the like."
        )
    return files[0].name, [argument for argument in arguments if isinstance(argument, TypedFlag)]


def _is_of_the_command(flag: TypedFlag) -> bool:
    """Also where it is misspelt: it then gets its suggestion."""
    nearly = len(flag.path) == 1 and get_close_matches(flag.path[0], Command.model_fields, cutoff=0.75)
    return knows(Command, flag) or bool(nearly and not knows(RunConfig, flag))


def _is_theirs(flag: TypedFlag, kind: Kind) -> bool:
    """Flags are the file's own keys, or else ours; one that is nobody's is refused with suggestions out of theirs."""
    return kind != "run" and (knows(FORMATS[kind][0], flag) or not knows(RunConfig, flag))


def _translate(
    table: dict[str, Any], kind: Kind, devices: Devices, *, file: str, flags: list[TypedFlag]
) -> Translation:
    if kind == "run":
        return Translation(table, (f"{file} is a file of `rl`: nothing had to be translated",))
    _, translate = FORMATS[kind]
    return translate(table, devices, where=file, flags=flags)


def _with_flags(translation: Translation, config: RunConfig, flags: list[TypedFlag]) -> Translation:
    """All that was given, wherever."""
    typed = (" ".join([flag.name, *flag.values]) + " was typed" for flag in flags)
    given = config.model_dump(mode="json", exclude_unset=True)
    return replace(translation, table=given, notes=(*translation.notes, *typed))


def as_run(foreign: Foreign, devices: Devices) -> RunConfig:
    """Nothing left open, and checked.

    Raises: ConfigError that says which of their keys is meant, too.
    """
    config = resolve(foreign.config, devices)
    with their_keys_named(foreign.file, foreign.translation):
        check(config, devices)
    return config


@contextmanager
def their_keys_named(file: str, translation: Translation) -> Iterator[None]:
    """What is wrong with a key of ours is told of the key that it comes from, too."""
    try:
        yield
    except ConfigError as error:
        named = "".join(f"\n{line}" for line in _their_keys(file, translation, str(error)))
        raise ConfigError(f"{error}{named}") from None


def _their_keys(file: str, translation: Translation, message: str) -> Iterator[str]:
    """ "`orchestrator.batch_size` is `trainer.args.batch_size` in a.toml." for each key that the message names."""
    for ours, theirs in translation.origins.items():
        if ours != theirs and re.search(rf"(?<![\w.]){re.escape(ours)}(?![\w.])", message):
            yield f"`{ours}` is `{theirs}` in {file}."


def run_foreign(argv: list[str], *, program: str, kinds: tuple[Kind, ...], rooms: tuple[str, ...]) -> int:
    """
    Args:
        rooms: whose logs have a pane of their own, above the run itself.
    """
    from trireme.cli.panes import open_panes, wants_panes

    devices = detect_devices()
    foreign = read_foreign(argv, devices, program=program, kinds=kinds)
    command, config = foreign.command, as_run(foreign, devices)
    if command.print_config:
        print(as_toml(foreign.translation), end="")
        return 0
    if command.dry_run:
        return dry_run(config, devices)
    with their_keys_named(foreign.file, foreign.translation):
        check_launch(config, devices)
    if not command.one_terminal and wants_panes(command.session):
        again = [sys.executable, "-m", f"trireme.cli.{program.replace('-', '_')}", *_without_session(argv)]
        return open_panes(command.session or program, config.paths, rooms, [*again, "--one-terminal"])
    set_variables(foreign.translation.env_files)
    return launch(config, devices)


def _without_session(argv: list[str]) -> list[str]:
    """The same command without the name of a session."""
    left = iter(argv)
    kept = []
    for word in left:
        if word in ("-s", "--session"):
            next(left, None)
        elif not word.startswith("--session="):
            kept.append(word)
    return kept


def set_variables(files: Sequence[Path]) -> None:
    """Keys for APIs, for every process of the run; what the shell says counts more."""
    if files:
        from trireme.tools.cluster.secrets import read_env_files

        for name, value in read_env_files(files).items():
            os.environ.setdefault(name, value)
