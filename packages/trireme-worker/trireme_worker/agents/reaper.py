"""Runs one program, and ends all that descends from it: `python .../trireme_worker agents.reaper ORDER REPORT GRACE_S`.

ORDER and REPORT are descriptors. The order is {"command", "variables", "cwd", "parent"} as JSON. The report is
{"exit": 0} as soon as the program has ended, or {"failed": why}.

A process cannot leave this one: an orphan becomes its child (PR_SET_CHILD_SUBREAPER), even if it has given itself
another session and other variables. SIGTERM, which is also sent when the parent of this process ends, ends them all.
Then this process ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

REAP_S = 30.0  # time for killed processes to end

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_AWAITED = (signal.SIGTERM, signal.SIGCHLD)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the kernel reports no exit code if it is ignored
    # blocked, both signals wait until `sigwait` takes them, so none is lost in between
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    with open(int(sys.argv[1]), "rb") as file:
        order = json.load(file)
    report = int(sys.argv[2])
    os.set_inheritable(report, False)
    if os.getppid() != order["parent"]:  # it has ended already
        return

    program = os.fork()
    if program == 0:
        _become(order, report)

    # orphans of the program become children of this process, so their ends are taken note of too
    ended: dict[int, int] = {}
    while program not in ended and signal.sigwait(_AWAITED) != signal.SIGTERM:
        _reap(ended)

    if program in ended:
        _say(report, {"exit": ended[program]})
    end_descendants(float(sys.argv[3]))


def _become(order: dict, report: int) -> None:
    """Become the program, in a session of its own: a signal to all of that does not reach the parent."""
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        os.chdir(order["cwd"])
        try:
            os.execvpe(order["command"][0], order["command"], order["variables"])
        except OSError as error:  # it names the last folder of PATH
            raise OSError(error.errno, error.strerror, order["command"][0]) from error
    except (OSError, ValueError) as error:  # a NUL byte in a word of the command, for example
        _say(report, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(127)


def _say(report: int, said: dict) -> None:
    os.write(report, json.dumps(said).encode() + b"\n")


def _reap(ended: dict[int, int]) -> bool:
    """Add the children that have ended, with their exit codes. Return whether there are others."""
    with contextlib.suppress(ChildProcessError):
        while child := os.waitpid(-1, os.WNOHANG):
            if child[0] == 0:
                return True
            ended[child[0]] = os.waitstatus_to_exitcode(child[1])
    return False


def end_descendants(grace_s: float) -> None:
    """Send SIGTERM to each descendant; after `grace_s` kill, until the kernel says that there is no child.

    An orphan becomes a child before its parent is gone. So one that is started meanwhile is found, too.
    """
    asked: set[int] = set()
    began = time.monotonic()
    while _reap({}) and (waited_s := time.monotonic() - began) < grace_s + REAP_S:
        number = signal.SIGTERM if waited_s < grace_s else signal.SIGKILL
        for pid in _descendants():
            if number == signal.SIGKILL or pid not in asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
                asked.add(pid)
        signal.sigtimedwait((signal.SIGCHLD,), 0.02)


def _descendants() -> list[int]:
    """Return the descendants, parents first."""
    found = [os.getpid()]
    for pid in found:  # grows as it is walked
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found[1:]
