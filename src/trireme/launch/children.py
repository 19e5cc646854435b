"""The launcher's child processes: start them, poll them, and end them together with everything they started."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trireme.base.errors import TriremeError
from trireme.base.processes import TEMPORARY, make_socket_folder
from trireme.launch import process_tree
from trireme.monitor.progress import ProcessState

if TYPE_CHECKING:
    from trireme.launch.plan import ProcessSpec

REAP_S = 5.0
SCAN_S = 1.0  # between two scans for descendants


class Exit(NamedTuple):
    """The end of one process."""

    code: int  # minus the signal's number if a signal ended it
    at: float  # unix time at which the launcher noticed it
    why: str = ""  # the reason, if the launcher killed it

    @property
    def short(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        name = signal.Signals(-self.code).name if -self.code in set(signal.Signals) else f"signal {-self.code}"
        return f"killed by {name}" + (f": {self.why}" if self.why else "")

    def __str__(self) -> str:
        is_unexplained = self.code == -signal.SIGKILL and not self.why
        return self.short + (" (out of memory? `dmesg` shows it)" if is_unexplained else "")


class Child:
    """One process of the run, in a session of its own, with its descendants. It can be started again after `end`."""

    def __init__(self, spec: ProcessSpec, guard: process_tree.Guard, *, temporary: Path) -> None:
        self.spec = spec
        self._temporary = temporary  # a folder that is removed when all children have ended
        self.family = process_tree.Descendants()
        self.log_start = 0  # byte of the log at which this run of the process begins
        self.started_at = 0.0  # unix time
        self.num_starts = 0
        self.exit: Exit | None = None  # None while it runs, and if we ended it ourselves
        self.stopped = False
        self.restarts_in_s: float | None = None  # set when it died and is going to be restarted
        self._killed_why = ""
        self._guard = guard
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_starts - 1)

    def start(self) -> None:
        """Start the process, from the main thread: PR_SET_PDEATHSIG ends a child with the *thread* that started it.

        Raises: TriremeError if the program cannot be executed.
        """
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.spec.log, "ab") as log:
            # The log is appended to across restarts, and reasons for a death are read from here on only.
            self.log_start = log.tell()
            self.started_at, self.exit, self.stopped = time.time(), None, False
            self.restarts_in_s, self._killed_why = None, ""

            # The child gets its own session: Ctrl-C in the terminal reaches only the launcher, which ends all in order.
            try:
                self._popen = subprocess.Popen(
                    list(self.spec.argv),
                    env=_environment(self.spec, self._temporary),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise TriremeError(
                    f"{self.name} could not be started: {error}. Its command is {list(self.spec.argv)}; the "
                    "program named first must exist and be executable."
                ) from error

        self.num_starts += 1

        # The guard must know the process at once: the launcher may be killed at any time.
        root = self.family.add_root(self._popen.pid)
        self._guard.watch([root] if root else [])

    def poll(self) -> None:
        """Record an exit without reaping the zombie, so that its pid cannot be reused before our last signal."""
        if self._popen is None or self.exit is not None:
            return

        result = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is not None:
            code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            self.exit = Exit(code, time.time(), self._killed_why)

    def kill(self, why: str) -> None:
        """Kill the process itself. Its descendants end with it, or before its successor starts."""
        assert self._popen is not None
        self._killed_why = why
        os.kill(self._popen.pid, signal.SIGKILL)

    def kill_member(self, process: process_tree.Process, why: str) -> None:
        """Kill one process of its family, which may be the child itself."""
        if self._popen is not None and process.pid == self._popen.pid:
            self.kill(why)
        else:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def ask_family_to_end(self) -> None:
        self.family.scan()
        self.family.release(self.name)
        self.family.send(signal.SIGTERM)

    def end(self) -> None:
        """End it and its descendants at once, to restart this child alone."""
        self.family.release(self.name)
        process_tree.kill_all(self.family, process_tree.mark_of(os.getpid(), self.name))
        self.reap()

    def reap(self) -> None:
        if self._popen is not None:
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                self._popen.wait(REAP_S)
            self.family.forget_root(self._popen.pid)
        self.stopped, self.restarts_in_s = self.exit is None, None

    def state(self) -> ProcessState:
        if self.exit is None:
            state = "stopped" if self.stopped else "running"
        elif self.restarts_in_s is not None:
            state = f"{self.exit.short}; restarting" + (f" in {self.restarts_in_s:g} s" if self.restarts_in_s else "")
        else:
            state = "ended" if self.exit.code == 0 else str(self.exit)
        return ProcessState(self.name, state, self.spec.log, self.log_start, self.num_restarts)


def _environment(spec: ProcessSpec, temporary: Path) -> dict[str, str]:
    """Return our environment with unbuffered output and tracebacks of crashes, then the plan's variables.

    An engine's temporary files (sockets, rendezvous files of its workers) go to the run's own folder. Torch's compile
    cache stays where it was: later runs use it too.
    """
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"} | dict(os.environ)

    # A folder that the launcher removes: killed engines leave their sockets behind.
    if spec.name.startswith("inference"):
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a user id without a name, as in some containers
            user = str(os.getuid())
        compiled = environment.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{user}"
        environment |= {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": compiled}

    if spec.name == "orchestrator":
        environment |= {TEMPORARY: str(temporary)}

    # The marks come last: the guard finds processes by them, so no setting may change them.
    return environment | dict(spec.env) | {process_tree.MARKER: str(os.getpid()), process_tree.MEMBER: spec.name}


class Children:
    """All child processes of a run."""

    def __init__(self, children: list[Child], guard: process_tree.Guard, temporary: Path) -> None:
        self.children = children
        self._guard = guard
        self._temporary = temporary
        self._scanned = 0.0

    def start(self, spec: ProcessSpec) -> Child:
        """Start one more process, which ends with the others. Raises: as `Child.start`."""
        child = Child(spec, self._guard, temporary=self._temporary)
        self.children.append(child)
        child.start()
        return child

    def look(self) -> dict[int, process_tree.Process] | None:
        """Record exits; once a second also descendants. Return the machine's process table in that case."""
        for child in self.children:
            child.poll()

        # Reading the whole process table takes milliseconds, so not in every poll.
        if time.monotonic() - self._scanned < SCAN_S:
            return None
        self._scanned = time.monotonic()

        table = process_tree.read_processes()
        for child in self.children:
            self._guard.watch(child.family.scan(table))
        return table

    def states(self) -> list[ProcessState]:
        return [child.state() for child in self.children]


@contextmanager
def open_children(
    specs: Iterable[ProcessSpec], hurry: Callable[[], bool], grace_s: float, keep_open: Sequence[int] = ()
) -> Iterator[Children]:
    """Yield the started processes. Afterwards none of them and none of their descendants is alive, on any way out.

    Args:
        hurry: whether the wait of at most `grace_s` between SIGTERM and SIGKILL ends now.
        keep_open: file descriptors that stay open until no process is left, even if the launcher is killed.
    """
    # The guard starts before the first child, so that no child is ever without one.
    temporary = make_socket_folder("trireme-")
    guard = process_tree.Guard(grace_s, temporary, keep_open)
    children = [Child(spec, guard, temporary=temporary) for spec in specs]

    try:
        for child in children:
            child.start()
        yield Children(children, guard, temporary)
    finally:
        family = process_tree.Descendants()
        for child in children:
            family.absorb(child.family)
        process_tree.end_all(family, marks=process_tree.mark_of(os.getpid()), grace_s=grace_s, hurry=hurry)
        for child in children:
            child.reap()
        shutil.rmtree(temporary, ignore_errors=True)
        guard.dismiss()
