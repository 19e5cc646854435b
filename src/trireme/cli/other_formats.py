"""`vf-rl`, `vf-train`, `prime-rl`: translate a run file of another format, then show the run, or start it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.cli.command import run_command
from trireme.cli.rl import dry_run, launch
from trireme.config.compatibility import Kind
from trireme.config.files import ProcessName
from trireme.config.rules.check import check_launch
from trireme.config.translation import their_keys_named
from trireme.tools.formats.run_file import read_run_file, resolve_run

KINDS: dict[str, tuple[Kind, ...]] = {
    "vf-rl": ("vf-rl",),
    "vf-train": ("vf-rl",),
    "prime-rl": ("flat", "hosted", "run"),
}
STARTED: dict[str, tuple[ProcessName, ...]] = {"vf-train": ("orchestrator", "trainer")}
"""Processes that a command starts, where it does not start all. `vf-vllm` serves the policy of `vf-train`."""
PANES = {"vf-rl": ("inference",), "prime-rl": ("inference", "orchestrator")}
"""Processes whose logs have a pane of their own, above the run itself."""
RUN = "run"  # title of the pane that the run is in
NOT_EXPORTED = ("TERM", "TMUX", "TMUX_PANE", "PWD", "SHLVL", "_")


def vf_rl() -> None:
    run_command("vf-rl", lambda argv: run_translated("vf-rl", argv))


def prime_rl() -> None:
    run_command("prime-rl", lambda argv: run_translated("prime-rl", argv))


def run_translated(program: str, argv: list[str]) -> int:
    devices = detect_devices()
    typed = read_run_file(argv, devices, program=program, kinds=KINDS[program])
    command, config = typed.command, resolve_run(typed, devices)
    if command.print_config:
        print(typed.as_toml(), end="")
        return 0

    set_variables(typed.env_files)
    if command.dry_run:
        return dry_run(config, devices)

    # Errors from here on name the keys of the file that the user wrote, not of its translation.
    with their_keys_named(typed.lines):
        if program in PANES and not command.one_terminal and wants_panes(command.session):
            check_launch(config, devices)  # while it can be seen in this terminal
            again = [sys.executable, "-m", __spec__.name, program, *argv, "--one-terminal"]
            return open_panes(command.session or program, config.paths, PANES[program], again)
        return launch(config, devices, STARTED.get(program, ()))


def set_variables(files: Sequence[Path]) -> None:
    """Set keys for APIs for every process of the run. The shell's own variables take precedence."""
    if files:
        from trireme.tools.cluster.job import read_env_files

        for name, value in read_env_files(files).items():
            os.environ.setdefault(name, value)


# panes of tmux: logs above, the run itself below, which ends with its pane; its last lines stay readable


def wants_panes(session: str | None) -> bool:
    """Return whether to open panes: in a terminal if there is tmux, elsewhere only if a session was named."""
    return shutil.which("tmux") is not None and (session is not None or (sys.stdin.isatty() and sys.stdout.isatty()))


def open_panes(session: str, paths: RunPaths, processes: Sequence[str], command: Sequence[str]) -> int:
    """Open a session of tmux and attach to it.

    Args:
        processes: those whose logs are followed, from the top.
        command: the run.

    Raises: ConfigError if a session of that name has a run that is not over.
    """
    session = re.sub("[.:]", "_", session)  # tmux replaces these letters too

    # A session in which a run is alive must not be replaced; one whose run is over may.
    listed = _tmux("list-panes", "-s", "-t", f"={session}", "-F", "#{pane_title} #{pane_dead}", check=False)
    if listed and f"{RUN} 1" not in listed.splitlines():
        raise ConfigError(
            f"There is a tmux session `{session}` already. Expected a free name, or a run in it that is over. "
            f"Look at it with `tmux attach -t {session}`, or use another name: `-s {session}-2`."
        )
    if listed:
        _tmux("kill-session", "-t", f"={session}")
    # A log may not exist yet, nor its folder: tail retries.
    shown = {
        process: f"exec tail -n 200 -F {shlex.quote(str(paths.log(process)))} 2>/dev/null" for process in processes
    }

    # tmux starts panes with the environment of its server, and keys must not be in a command line.
    script = _write_environment()
    file = shlex.quote(str(script))
    shown[RUN] = f"exec sh -c {shlex.quote(f'. {file}; rm -f {file}; exec {shlex.join(command)}')}"

    # Build one long command: panes above, the run below, each titled and kept after its end.
    window = ["-t", f"={session}:"]
    words: list[str] = []
    for title, text in shown.items():
        words += ["split-window", *window] if words else ["new-session", "-d", "-s", session]
        words += ["-c", os.getcwd(), text, ";", "set-option", "-w", *window, "remain-on-exit", "on", ";"]
        words += ["select-pane", *window, "-T", title, ";"]
    words += ["select-layout", *window, "even-vertical", ";", "set-option", *window, "pane-border-status", "top", ";"]
    words += ["set-option", *window, "pane-border-format", " #{pane_title} "]

    try:
        _tmux(*words)  # one call, because the pane of a short run would be gone before it is kept
    except ConfigError:
        script.unlink(missing_ok=True)
        _tmux("kill-session", "-t", f"={session}", check=False)
        raise

    # Without a terminal (a script, CI) there is nothing to attach.
    sys.stdout.flush()
    if not sys.stdout.isatty():
        print(f"session {session} is open: tmux attach -t {session}")
        return 0
    verb = "switch-client" if os.environ.get("TMUX") else "attach-session"
    return subprocess.run(["tmux", verb, "-t", f"={session}"], check=False).returncode


def _write_environment() -> Path:
    """Write this process's environment to a script that only its owner can read; tmux would use that of its server."""
    with tempfile.NamedTemporaryFile("w", prefix="trireme-", suffix=".sh", delete=False) as file:
        for name, value in os.environ.items():
            if name.isidentifier() and name.isascii() and name not in NOT_EXPORTED:
                file.write(f"export {name}={shlex.quote(value)}\n")
    return Path(file.name)


def _tmux(*words: str, check: bool = True) -> str:
    """Run tmux and return what it prints; with `check=False`, nothing if it fails.

    Raises: ConfigError with the error that tmux reports.
    """
    done = subprocess.run(["tmux", *words], capture_output=True, text=True, check=False)
    if done.returncode and check:
        raise ConfigError(
            f"`tmux {words[0]}` failed ({done.stderr.strip()}). Expected panes for the run. "
            "Type the same command with `--one-terminal`."
        )
    return "" if done.returncode else done.stdout.strip()


if __name__ == "__main__":
    program = sys.argv.pop(1)
    run_command(program, lambda argv: run_translated(program, argv))
