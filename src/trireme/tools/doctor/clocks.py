"""Clocks: whether this machine's runs evenly, is set by somebody, and agrees with its file system and other machines.

No deadline depends on it (those count from the machine's start). Logs, metrics and lanes of several processes are put
in order by it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

from trireme.tools.doctor.finding import Case, Finding, ok, warning

LOOK_S = 0.2
UNEVEN_S = 0.02
APART_S = 1.0
UNSYNCHRONISED = 5  # what adjtimex returns where nobody sets the clock
_BYTES = 1024  # more than `struct timex` has

FIX = "Let a time service set it: `timedatectl set-ntp true` (a container has its machine's clock)."


def clock(case: Case) -> Iterator[Finding]:
    began = time.time(), time.monotonic()
    time.sleep(LOOK_S)
    drift = (time.time() - began[0]) - (time.monotonic() - began[1])
    yield of_clock(drift, file_system_ahead(case.folder), is_set(), alone=not case.is_of_several_machines)


def of_clock(drift: float, ahead: float | None, is_set: bool | None, *, alone: bool) -> Finding:
    """
    Args:
        drift: seconds that the clock gained while we looked.
        ahead: seconds that the file system's clock is ahead; None where it could not be asked.
        is_set: whether somebody sets the clock; None where the kernel does not say.
        alone: whether all processes are on this machine.
    """
    if abs(drift) > UNEVEN_S:
        return warning(
            f"the clock jumped by {drift * 1000:+.0f} ms within {LOOK_S:g} s - expected it to run evenly", FIX
        )
    if ahead is not None and abs(ahead) > APART_S:
        where = "the file server's clock is"
        return warning(f"{where} {ahead:+.1f} s from this machine's - expected less than {APART_S:g} s", FIX)
    by = {True: "set by a time service", False: "set by nobody", None: "who sets it is not known"}[is_set]
    said = f"it runs evenly, {by}" + ("" if ahead is None else f"; the file system's is {ahead * 1000:+.0f} ms from it")
    if is_set is False and not alone:
        return warning(f"{said} - expected one: clocks of several machines drift apart", FIX)
    return ok(said)


def file_system_ahead(folder: Path) -> float | None:
    file = folder / f".clock-{os.getpid()}"
    try:
        before = time.time()
        file.write_bytes(b"?")
        after = time.time()
        written = file.stat().st_mtime
        file.unlink()
    except OSError:
        return None
    return written - min(max(written, before), after)


def is_set() -> bool | None:
    """As the kernel says."""
    library = ctypes.CDLL(None, use_errno=True)
    state: int = library.adjtimex(ctypes.create_string_buffer(_BYTES))
    return None if state < 0 else state != UNSYNCHRONISED
