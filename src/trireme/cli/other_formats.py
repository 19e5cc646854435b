"""`vf-rl` and `prime-rl`: translate a run file of another format, then show the run, or start it in panes or here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trireme.base.devices import detect_devices
from trireme.cli.command import run_command
from trireme.cli.rl import dry_run, launch
from trireme.config.compatibility import Kind
from trireme.config.rules import check_launch
from trireme.tools.formats.run_file import read_run_file, resolve_run, their_keys_named
from trireme.tools.formats.translation import as_toml

KINDS: dict[str, tuple[Kind, ...]] = {"vf-rl": ("vf-rl",), "prime-rl": ("flat", "hosted", "run")}
PANES = {"vf-rl": ("inference",), "prime-rl": ("inference", "orchestrator")}
"""Processes whose logs have a pane of their own, above the run itself."""


def vf_rl() -> None:
    run_command("vf-rl", lambda argv: run_translated("vf-rl", argv))


def prime_rl() -> None:
    run_command("prime-rl", lambda argv: run_translated("prime-rl", argv))


def run_translated(program: str, argv: list[str]) -> int:
    from trireme.cli.panes import open_panes, wants_panes

    devices = detect_devices()
    typed = read_run_file(argv, devices, program=program, kinds=KINDS[program])
    command, config = typed.command, resolve_run(typed, devices)
    if command.print_config:
        print(as_toml(typed.translation), end="")
        return 0
    if command.dry_run:
        return dry_run(config, devices)
    with their_keys_named(typed.file, typed.translation):
        check_launch(config, devices)
    if not command.one_terminal and wants_panes(command.session):
        again = [sys.executable, "-m", __spec__.name, program, *_without_session(argv), "--one-terminal"]
        return open_panes(command.session or program, config.paths, PANES[program], again)
    set_variables(typed.translation.env_files)
    return launch(config, devices)


def _without_session(argv: list[str]) -> list[str]:
    """Return the same words without the name of a session."""
    left, kept = iter(argv), []
    for word in left:
        if word in ("-s", "--session"):
            next(left, None)
        elif not word.startswith("--session="):
            kept.append(word)
    return kept


def set_variables(files: Sequence[Path]) -> None:
    """Set keys for APIs for every process of the run. The shell's own variables take precedence."""
    if files:
        from trireme.tools.cluster.job import read_env_files

        for name, value in read_env_files(files).items():
            os.environ.setdefault(name, value)


if __name__ == "__main__":
    program = sys.argv.pop(1)
    run_command(program, lambda argv: run_translated(program, argv))
