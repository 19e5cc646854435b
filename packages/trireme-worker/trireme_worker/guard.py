"""No orphans: however the orchestrator ends, this process and everything it started end with it.

Three nets, because an environment can block the event loop for minutes (a synchronous reward, a slow load), replace
our signal handlers (verifiers does, on every load) and fork workers of its own (its `MathRubric` does):
1. a thread that waits for the socket's other end to close,
2. the kernel's parent-death signal,
3. forked children close their copy of the socket, or the orchestrator would not see this process die; being in the
   same process group, they are ended together with it. So are programs in sessions of their own (sandboxes, harnesses).
"""

import atexit
import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading

_PR_SET_PDEATHSIG = 1


def send_prints_to_stderr() -> None:
    """Environments print. Their words belong into the log, also those of C libraries and child processes."""
    sys.stdout.flush()
    os.dup2(2, 1)


def end_with(orchestrator: socket.socket) -> None:
    """Arms the three nets. To be called before anything of the environment is imported."""
    os.register_at_fork(after_in_child=lambda: _close(orchestrator.fileno()))
    atexit.register(_end_descendants)  # the first to be registered is the last to be called
    restore_signals()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    threading.Thread(target=_wait_for_hang_up, args=(orchestrator.fileno(),), daemon=True).start()


def restore_signals() -> None:
    """Takes SIGTERM and SIGINT back: verifiers' handlers raise SystemExit in the middle of any code."""
    signal.signal(signal.SIGTERM, lambda number, frame: end_now())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the orchestrator, which then stops us in order


def end_now() -> None:
    """Ends this process and all that descends from it at once, without any clean-up."""
    _end_descendants()
    try:
        os.killpg(os.getpid(), signal.SIGKILL)
    except ProcessLookupError:  # started by hand, not as the leader of a process group
        os._exit(1)


def _end_descendants() -> None:
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="latin-1") as stat:
            # the name of a process may hold blanks and brackets, so fields are counted after the last bracket
            parent = int(stat.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = [root]
    for pid in found:  # grows as it is walked
        found += children.get(pid, [])
    return found[1:]


def _wait_for_hang_up(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    end_now()


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # closed already, or in an earlier fork
        os.close(descriptor)
