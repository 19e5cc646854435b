"""Where the time of a step went: named spans that add up."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Adds up the seconds spent under each name since the last `take`.

    Example:
        with timer.span("forward_backward"): ...
        timer.take()  # {"time/forward_backward": 0.41}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def add(self, name: str, seconds: float) -> None:
        """Seconds that were measured elsewhere."""
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        taken = {f"time/{name}": round(seconds, 6) for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
