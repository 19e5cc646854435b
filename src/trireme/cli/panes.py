"""Panes of tmux: logs above, the run itself below. The run ends with its pane, and its last words stay to be read."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths

RUN = "run"  # title of the pane that the run is in


def wants_panes(session: str | None) -> bool:
    """A terminal gets them wherever tmux is; anything else where a session was named."""
    return shutil.which("tmux") is not None and (session is not None or (sys.stdin.isatty() and sys.stdout.isatty()))


def open_panes(session: str, paths: RunPaths, rooms: Sequence[str], command: Sequence[str]) -> int:
    """
    Args:
        rooms: whose logs are followed, from the top.
        command: the run.

    Raises: ConfigError where a session of that name is at work.
    """
    _make_room(session)
    shown = {room: _follow(paths, room) for room in rooms} | {RUN: _with_environment(command)}
    panes: list[str] = []
    for text in shown.values():
        panes.append(_split(session, panes[-1] if panes else None, text))
    for pane, title in zip(panes, shown, strict=True):
        _tmux("select-pane", "-t", pane, "-T", title)
    _tmux("select-layout", "-t", panes[0], "even-vertical")
    _tmux("set-option", "-t", session, "pane-border-status", "top")
    _tmux("set-option", "-t", session, "pane-border-format", " #{pane_title} ")
    _tmux("select-pane", "-t", panes[-1])
    return _attach(session)


def _split(session: str, above: str | None, text: str) -> str:
    """A new pane; its id. In the same breath its window learns to keep panes whose process is over."""
    where = ["new-session", "-d", "-s", session] if above is None else ["split-window", "-d", "-t", above]
    keep = [";", "set-option", "-w", "-t", f"={session}:", "remain-on-exit", "on"]
    return _tmux(*where, "-P", "-F", "#{pane_id}", "-c", os.getcwd(), text, *keep)


def _make_room(session: str) -> None:
    """A session whose run is over makes room for the next."""
    listed = _ask("list-panes", "-s", "-t", f"={session}", "-F", "#{pane_title} #{pane_dead}")
    if listed is None:
        return
    if f"{RUN} 1" not in listed.splitlines():
        raise ConfigError(
            f"there is a tmux session `{session}` already - expected a name that is free, or a run in it that is over. "
            f"Look at it with `tmux attach -t {session}`, or take another name: `-s {session}-2`."
        )
    _tmux("kill-session", "-t", f"={session}")


def _follow(paths: RunPaths, room: str) -> str:
    """The log may not exist yet, nor its folder."""
    return f"exec tail -n 200 -F {shlex.quote(str(paths.log(room)))} 2>/dev/null"


def _with_environment(command: Sequence[str]) -> str:
    """In this shell's environment: tmux would give it that of whoever started its server.

    It goes through a file that only its owner reads, and that is gone once it was read.
    """
    with tempfile.NamedTemporaryFile("w", prefix="trireme-", suffix=".sh", delete=False) as file:
        file.writelines(f"export {name}={shlex.quote(value)}\n" for name, value in os.environ.items() if _is_name(name))
    script = shlex.quote(file.name)
    return f"exec sh -c {shlex.quote(f'. {script}; rm -f {script}; exec {shlex.join(command)}')}"


def _is_name(name: str) -> bool:
    return name.isidentifier() and name.isascii() and name not in ("TERM", "TMUX", "TMUX_PANE", "PWD", "SHLVL", "_")


def _attach(session: str) -> int:
    sys.stdout.flush()
    if not sys.stdout.isatty():
        print(f"session {session} is open: tmux attach -t {session}")
        return 0
    verb = "switch-client" if os.environ.get("TMUX") else "attach-session"
    return subprocess.run(["tmux", verb, "-t", f"={session}"], check=False).returncode


def _ask(*words: str) -> str | None:
    """What tmux answers; None where it says no."""
    done = subprocess.run(["tmux", *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _tmux(*words: str) -> str:
    """Raises: ConfigError with what tmux has to say against it."""
    done = subprocess.run(["tmux", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"`tmux {words[0]}` failed ({done.stderr.strip()}) - expected panes for the run. "
            "Type the same command with `--one-terminal`."
        )
    return done.stdout.strip()
