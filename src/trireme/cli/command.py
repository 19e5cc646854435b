"""Shared steps of all commands: turn errors into a message and an exit code, and load a process's configuration."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from trireme.base.devices import Devices, detect_devices
from trireme.base.disk import is_full
from trireme.base.errors import ConfigError, TriremeError
from trireme.base.installation import correct_wheel_tag
from trireme.base.safe_text import clean
from trireme.cli.machines import join_network, node_of
from trireme.config.arguments import HELP
from trireme.config.files import ProcessName, command_without_secrets, write_process_files, write_run
from trireme.config.load import Invocation, load_run_config
from trireme.config.resolve import resolve, resuming
from trireme.config.rules.check import check, check_launch, launch_problems, launch_warnings
from trireme.config.rules.sampling import sampling_notes
from trireme.config.run import NODE, RunConfig
from trireme.config.sft import SftConfig
from trireme.launch.folder import hold, prepare_folder
from trireme.launch.origin import begin
from trireme.launch.plan import describe, env_vars_of, plan, set_environment
from trireme.launch.process_tree import MARKER
from trireme.launch.ranks import RANKS_PARENT, end_with_parent
from trireme.launch.resume import check_fresh, check_resume
from trireme.launch.settings import write_settings

UNDECODED = re.compile("[\udc80-\udcff]")
"""Characters that Python makes of bytes in file names and arguments that it cannot decode."""

REFUSED = (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""Errors of files and folders that this user may not use. The user can correct that, and no traceback helps."""


def run_command(program: str, main: Callable[[list[str]], int | None], *, abruptly: bool = False) -> NoReturn:
    """Run a command and end the process: exit code 0, 2 for what the user can correct, or 1. Deliberate errors are
    printed without a traceback.

    Args:
        abruptly: skip the interpreter's finalization. Threads of gloo may still be releasing tensors then; if the
            interpreter ends under one of them, the process aborts with "terminate called without an active exception".
    """
    correct_wheel_tag()
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # like standard error, for encodings that lack a letter
    if any(word in HELP for word in sys.argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `rl --help | head` ends quietly

    # Errors that the user can correct end with one line; all others keep their traceback, for a report.
    try:
        _check_names()
        code = main(sys.argv[1:]) or 0
    except TriremeError as error:
        if logging.getLogger("trireme").isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"{program}: {clean(str(error))}", file=sys.stderr)
        code = error.exit_code
    except UnicodeEncodeError as error:
        if not UNDECODED.search(error.object[error.start : error.end]):
            raise
        print(f"{program}: {_undecoded(error.object[max(0, error.start - 80) : error.end + 20])}", file=sys.stderr)
        code = ConfigError.exit_code
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    except OSError as error:
        if not is_full(error) and (error.filename is None or error.errno not in REFUSED):
            raise
        code = _refused(program, error)
    except KeyboardInterrupt:
        code = 130

    # Flush before the exit: what Python flushes later fails without a useful exit code.
    code = _flush_output(program, code)
    sys.stderr.flush()
    if abruptly:
        os._exit(code)
    sys.exit(code)


def _check_names() -> None:
    """Refuse names of files that no configuration, journal or message can hold. Raises: ConfigError."""
    words = [*sys.argv[1:], *(value for name, value in os.environ.items() if name.startswith("TRIREME_"))]
    with suppress(OSError):
        words.append(os.getcwd())
    for word in filter(UNDECODED.search, words):
        raise ConfigError(_undecoded(word))


def _undecoded(text: str) -> str:
    """Return what is wrong with a text that holds bytes which Python could not decode as a name of a file."""
    content = text.encode(errors="surrogateescape")
    try:
        content.decode()
    except UnicodeDecodeError:
        return f"{content!r} is not UTF-8 - expected UTF-8 in names of files and words of the command. Rename it."
    return (
        f"{content!r} cannot be read in this locale, in which names of files are {sys.getfilesystemencoding()} - "
        "expected a locale of UTF-8. Set LC_ALL=C.UTF-8, and leave PYTHONUTF8 out or set it to 1."
    )


def _refused(program: str, error: OSError) -> int:
    """Print why a file or folder cannot be used, or that the disk of a file or of standard output is full."""
    what = "its output cannot be written" if error.filename is None else error.filename
    expected = "free space on that disk. Free some, or send the output elsewhere."
    if not is_full(error):
        expected = (
            "a place that this user may write to, or a file that may be read. Check its permissions, or choose another "
            "place: `output_dir` is where runs are written."
        )
    print(f"{program}: {what}: {error.strerror} - expected {expected}", file=sys.stderr)
    return ConfigError.exit_code


def _flush_output(program: str, code: int) -> int:
    """Return the exit code, which changes if the reader of the output has gone (`rl @ FILE --dry-run | head`) or its
    disk is full."""
    try:
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    except OSError as error:
        if not is_full(error):
            raise
        code = code or _refused(program, error)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would flush once more and fail
    return code


def open_process(name: ProcessName, argv: list[str]) -> tuple[RunConfig, Path]:
    """Return the configuration of a process, started by `rl` or alone, and the file from which another process can load
    exactly the same. A dry run ends here.

    Everything that must happen before heavy imports happens here: environment variables, and the tie to the parent.
    """
    config, invocation = load_run_config(argv, section=name, program=name)

    # Started by `rl`, or as a rank: the file is resolved and checked already.
    if invocation.run:
        end_with_parent()
        join_network(config, name, int(os.environ.get(NODE, 0)))
        is_rank_of_a_lone_trainer = RANKS_PARENT in os.environ and MARKER not in os.environ
        return config if is_rank_of_a_lone_trainer else resuming(config), invocation.run

    # Started alone: do what `rl` does for all its processes, for this one.
    os.environ.update(config.env_vars)
    devices = detect_devices()
    node = node_of(config, name, invocation)
    with invocation.their_keys_named():
        config = resolve(config, devices, section=name, node=node)
        check(config, devices, section=name)
    note_translation(invocation)

    if invocation.dry_run:
        sys.exit(_flush_output(name, ConfigError.exit_code if show(config, devices, name) else 0))

    # Checks come before anything is written, so that a refusal leaves the folder as it was.
    check_launch(config, devices, section=name)
    print_warnings(config, name)
    if name != "inference":
        check_resume(config, name)
        if not node:
            with hold(config.paths, name):  # or else the configuration of a running process would be replaced
                check_fresh(config, name)
                begin(config)

    join_network(config, name, node)

    # The first machine keeps the history of settings; further machines and engines only need theirs.
    run_file = config.paths.configs / (f"{name}-{node}.json" if node else f"{name}.json")
    if node or name == "inference":
        write_run(config, run_file)
    else:
        write_settings(config, run_file, name)
    if name == "orchestrator":
        note_provenance(config, devices)
    if not node:
        write_process_files(config, config.paths.configs, (name,))

    # Last: torch and vLLM read these variables when they are imported, which the caller does next.
    os.environ.update(env_vars_of(config, name))
    set_environment(plan(config, run_file, devices)[name].env)
    return config, run_file


def show(config: RunConfig, devices: Devices, name: ProcessName | None = None) -> list[str]:
    """Print the plan, and what prevents the run from starting here and now. Return the latter."""
    run_file = config.paths.configs / f"{name}.json" if name else config.paths.run_config
    print(describe(plan(config, run_file, devices), config, only=name))
    for note in sampling_notes(config.orchestrator) if name in (None, "orchestrator") else ():
        print(f"\nnote: {note}")
    print_warnings(config, name)
    problems = launch_problems(config, devices, section=name)
    for problem in problems:
        print(f"\nnot ready: {problem}")
    return problems


def print_warnings(config: RunConfig, name: ProcessName | None = None) -> None:
    """Print what lets a run start, but is seldom meant; the engine and the trainer alone know nothing of it."""
    for warning in launch_warnings(config) if name in (None, "orchestrator") else ():
        print(f"\nwarning: {warning}", flush=True)


def note_translation(invocation: Invocation) -> None:
    """Say which keys of the user's files have no effect here, and whose defaults hold for those that are left out."""
    if invocation.without_effect:
        print(f"note: {invocation.without_effect}\n", file=sys.stderr)
    if any(path != line.theirs for line in invocation.lines for path in line.ours):
        said = "keys of another system were translated; those left out take our defaults (docs/coming-from.md)"
        print(f"note: {said}\n", file=sys.stderr)


def note_provenance(config: RunConfig, devices: Devices) -> None:
    """Write down what a run that starts here depends on besides its configuration. What cannot be found is left out."""
    # Other commands need not load these.
    from trireme.journal.provenance import collect_provenance, describe_environment, write_provenance
    from trireme.orchestrator.environments.venv import find_environment, installed_venv

    environments: dict[str, dict[str, object]] = {}
    for each in config.orchestrator.all_environments:
        environments[each.resolved_name] = {}
        with suppress(TriremeError, OSError):
            source = find_environment(each.id)
            venv, file = installed_venv(source), Path(source.module)
            folder = source.folder or (file if file.suffix == ".py" else None)
            described = describe_environment(folder, venv / "bin" / "python" if venv else None)
            environments[each.resolved_name] = described

    # A run without provenance is worth more than no run: it is left out if the disk refuses it.
    command = [Path(sys.argv[0]).name, *command_without_secrets(sys.argv[1:])]
    with suppress(OSError):
        write_provenance(config.paths, collect_provenance(devices, environments, command))


def move_old_run_aside(config: RunConfig | SftConfig) -> None:
    if aside := prepare_folder(config):
        print(f"an earlier run lay in {config.paths.root}: moved to {aside}", flush=True)
