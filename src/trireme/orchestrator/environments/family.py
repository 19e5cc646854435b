"""A process and all its descendants: how much memory they hold, and their end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import psutil

GIB = 1 << 30


def resident_gib(pid: int) -> float:
    """Pages that several of them share are counted once (PSS), so that forking costs nothing. 0 where it has ended."""
    total = 0
    for process in _family(pid):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / GIB


def kill_family(leader: int) -> None:
    """The leader's process group, and those of its children that made a group of their own while it lives."""
    others = _family(leader)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for process in others:
        with suppress(psutil.Error):
            process.kill()


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []
