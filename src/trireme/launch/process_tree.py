"""Track every descendant of the processes that the launcher started, so that none of them outlives a run.

This file is also a program: `python process_tree.py LAUNCHER_PID GRACE_S FOLDER` is the guard. When the launcher
is killed, it ends the descendants and removes the run's temporary folder. It uses the standard library only, so that it
starts in milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MARKER = "TRIREME_PARENT"
"""Environment variable of every process of a run: the launcher's pid."""

MEMBER = "TRIREME_PROCESS"
"""Environment variable with the name of the run's process that it is, or descends from."""

GRACE_S = 10.0  # between SIGTERM and SIGKILL

SCAN_LINES = 1000  # lines of the launcher between two scans of the guard

_PROC = Path("/proc")


class Process(NamedTuple):
    """One process of /proc. Pids are reused; the pair of pid and start time is unique."""

    pid: int
    start: int  # clock ticks after boot
    parent: int
    session: int
    state: str  # the letter of `ps`
    command: str  # the name of its program

    @property
    def zombie(self) -> bool:
        return self.state in "ZX"

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in "Tt"


def read_process(pid: int) -> Process | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    command, _, rest = stat.partition("(")[2].rpartition(")")  # the name may hold spaces and brackets
    fields = rest.split()
    return Process(pid, int(fields[19]), int(fields[1]), int(fields[3]), fields[0], command)


def read_processes() -> dict[int, Process]:
    pids = (int(name) for name in os.listdir(_PROC) if name.isdigit())
    return {pid: process for pid in pids if (process := read_process(pid)) is not None}


def _read_environment(process: Process) -> list[bytes]:
    """Return the entries of its environment; none if it is another user's, or has ended."""
    try:
        return (_PROC / str(process.pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


class Descendants:
    """The recorded descendants, each until it ends: an orphan cannot be found by walking down the tree any more."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}  # pid -> start
        self._roots: set[int] = set()

    def add_root(self, pid: int) -> Process | None:
        """Record a process that the launcher started as the leader of its own session, and has not reaped yet."""
        process = read_process(pid)
        if process is not None:
            self._roots.add(pid)
            self._starts[pid] = process.start
        return process

    def add(self, pid: int, start: int) -> None:
        self._starts[pid] = start

    def absorb(self, other: Descendants) -> None:
        self._starts |= other._starts
        self._roots |= other._roots

    def forget_root(self, pid: int) -> None:
        """Forget a root that was reaped: its pid, and so its session id, may be reused from now on."""
        self._roots.discard(pid)

    def scan(self, table: dict[int, Process] | None = None) -> list[Process]:
        """Record the descendants of recorded processes and the members of roots' sessions. Forget those that have
        ended. Return the new ones."""
        table = read_processes() if table is None else table
        below: dict[int, list[Process]] = defaultdict(list)
        for process in table.values():
            below[process.parent].append(process)

        # A descendant whose parent has ended belongs to pid 1; its session still shows that it is ours.
        queue = [p for p in table.values() if self._starts.get(p.pid) == p.start or p.session in self._roots]
        found = []
        seen = set()

        while queue:
            process = queue.pop()
            if process.pid in seen:
                continue
            seen.add(process.pid)
            queue += below[process.pid]
            if self._starts.get(process.pid) != process.start:
                self._starts[process.pid] = process.start
                found.append(process)

        # Forget those that have ended: a pid may be reused by a process that is not ours.
        self._starts = {process.pid: process.start for process in self.members(table)}
        return found

    def scan_marked(self, marks: Sequence[str]) -> None:
        """Record processes whose environment has all marks: they left their parent and session between two scans."""
        wanted = {mark.encode() for mark in marks}
        for process in read_processes().values():
            if process.pid != os.getpid() and wanted <= set(_read_environment(process)):
                self._starts[process.pid] = process.start

    def release(self, name: str) -> None:
        """Forget descendants that bear the name of another process of the run, with what descends from them."""
        table = read_processes()

        # The environment names the child that a process belongs to, even if it descends from another one.
        queue = []
        for process in self.alive():
            names = [entry for entry in _read_environment(process) if entry.startswith(f"{MEMBER}=".encode())]
            if names and f"{MEMBER}={name}".encode() not in names:
                queue.append(process.pid)

        for pid in queue:  # grows as it is walked
            self._starts.pop(pid, None)
            queue += [process.pid for process in table.values() if process.parent == pid]

    def members(self, table: dict[int, Process]) -> list[Process]:
        """Return the recorded processes that are in the table."""
        return [
            process for pid, start in self._starts.items() if (process := table.get(pid)) and process.start == start
        ]

    def alive(self) -> list[Process]:
        """Return the recorded processes that are alive. Zombies are not."""
        processes = (read_process(pid) for pid in self._starts)
        return [p for p in processes if p is not None and not p.zombie and self._starts[p.pid] == p.start]

    def send(self, number: signal.Signals) -> None:
        for process in self.alive():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)


def mark_of(launcher: int, process: str | None = None) -> list[str]:
    """Return the environment entries of all processes of a run, or of the family of one of its processes."""
    return [f"{MARKER}={launcher}", *([f"{MEMBER}={process}"] if process else [])]


def end_all(
    descendants: Descendants,
    *,
    marks: Sequence[str],
    grace_s: float = GRACE_S,
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """Send SIGTERM, wait (until `hurry` is true, or for `grace_s`), send SIGKILL. None of them is alive afterwards.

    Args:
        marks: processes whose environment has all of these end too.
    """
    # Scan right before the signal, so that the newest descendants get it too.
    descendants.scan()
    descendants.scan_marked(marks)
    descendants.send(signal.SIGTERM)

    # Give them time to end in order: a rank may be writing a checkpoint.
    deadline = time.monotonic() + grace_s
    while descendants.alive() and time.monotonic() < deadline and not hurry():
        time.sleep(0.05)

    kill_all(descendants, marks)


def kill_all(descendants: Descendants, marks: Sequence[str]) -> None:
    """Kill until a scan finds none alive: a process may have started another one just before it was killed."""
    for _ in range(20):
        descendants.scan()
        descendants.scan_marked(marks)
        if not descendants.alive():
            return
        descendants.send(signal.SIGKILL)
        time.sleep(0.05)


class Guard:
    """The launcher's end of the pipe to its guard process. The kernel closes it, however the launcher ends."""

    def __init__(self, grace_s: float, temporary: Path, keep_open: Sequence[int] = ()) -> None:
        """Start the guard. It inherits the descriptors `keep_open`, so that a lock outlives a killed launcher."""
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(grace_s), str(temporary)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=quiet,
            stderr=quiet,
            text=True,
            start_new_session=True,
            pass_fds=keep_open,
        )

    def watch(self, processes: Iterable[Process]) -> None:
        self._tell("".join(f"{process.pid} {process.start}\n" for process in processes))

    def dismiss(self) -> None:
        assert self._process.stdin is not None
        self._tell("done\n")
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, lines: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # the guard was killed; the run does not depend on it
            self._process.stdin.write(lines)
            self._process.stdin.flush()


def guard(launcher: int, grace_s: float, temporary: Path) -> None:
    """Read "PID START" lines from the launcher. An end of file without "done" means that the launcher was killed."""
    # Ctrl-C must not end the guard before the launcher has ended the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    descendants = Descendants()
    for number, line in enumerate(sys.stdin, 1):
        if line.strip() == "done":
            return
        pid, start = line.split()
        descendants.add(int(pid), int(start))
        if number % SCAN_LINES == 0:
            descendants.scan()  # forgets those that have ended

    # The launcher was killed. Processes that it started last may not have been reported: find them by marks.
    end_all(descendants, marks=mark_of(launcher), grace_s=grace_s)
    shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    guard(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
