"""Timers: the seconds of a step by named phase."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path


class Timer:
    """Sums of seconds by name since the last `take`. Each span also enters `also(name)`, a context manager.

    Example:
        with timer.span("forward_backward"): ...
        timer.take()  # {"time/forward_backward": 0.41}
    """

    def __init__(self, also: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._also = also

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self._also(name):
                yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        taken = {f"time/{name}": round(seconds, 6) for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


def age_s() -> float:
    """Return the age of this process in seconds, including the time before its first line of Python."""
    # Field 22 of the file, in clock ticks since boot. The name in field 2 may hold blanks and parentheses.
    began_ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_ticks / os.sysconf("SC_CLK_TCK")
