"""Background jobs: one at a time, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from trireme.base.log import get_logger
from trireme.base.waiting import Waits

log = get_logger("background")

CHECK_S = 0.5


class BackgroundJob:
    """Runs one job at a time. The next `check` or `wait` raises what the job raised."""

    def __init__(self, waits: Waits, *, peer: str) -> None:
        """
        Args:
            peer: what the jobs wait for ("disk"); shown by those who wait for a job.
        """
        self._waits = waits
        self._peer = peer
        self._what = "nothing"
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._was_raised = False
        self._seconds: float | None = None

    def begin(self, what: str, job: Callable[[], None]) -> None:
        """Start a job. `what` names it to those who wait for it ("checkpoint step_50 to be written")."""
        assert self._idle.is_set(), f"{self._what} is still running"
        self.check()
        self._what = what
        self._idle.clear()

        def run() -> None:
            began = time.perf_counter()
            try:
                job()
                self._seconds = time.perf_counter() - began
            except BaseException as error:  # raised by `check`
                self._error = error
            finally:
                self._idle.set()

        threading.Thread(target=run, name=what, daemon=True).start()

    def check(self) -> None:
        """Raise what the last job raised."""
        if self._error is not None:
            self._was_raised = True
            raise self._error

    def wait(self, deadline_s: float) -> None:
        """Wait until no job is running. Raises what the last job raised."""
        if not self._idle.is_set():
            with self._waits.waiting(self._what, peer=self._peer, deadline_s=deadline_s) as wait:
                while not self._idle.wait(CHECK_S):
                    wait.check()
        self.check()

    def close(self, timeout_s: float) -> None:
        """Give the job some time to end. Raises nothing; logs an error that was not raised before."""
        if not self._idle.wait(timeout_s):
            log.warning("%s: abandoned, as the process ends", self._what)
        elif self._error is not None and not self._was_raised:
            log.error("%s: %s: %s", self._what, type(self._error).__name__, self._error)

    def take_seconds(self) -> float | None:
        """Return how long the last job took, once; None if it is still running."""
        seconds, self._seconds = self._seconds, None
        return seconds
