"""A transfer that a thread takes in, while its receiver goes on with what it does."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Generic, TypeVar

Part = TypeVar("Part")


class Ahead(Generic[Part]):
    """All that comes. A daemon: where a sender is gone for good, not even the end of the process waits for it."""

    def __init__(self, coming: Iterator[Part]) -> None:
        self._parts: list[Part] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._take_in, args=(coming,), name="weights", daemon=True)
        self._thread.start()

    def _take_in(self, coming: Iterator[Part]) -> None:
        try:
            self._parts.extend(coming)
        except BaseException as error:  # raised by `take`
            self._error = error

    def take(self, timeout_s: float) -> list[Part]:
        """Returns when all is there. Raises what the receiver raised, and TimeoutError."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"waited {timeout_s:.0f} s for the trainer to send what it had announced. Look at logs/trainer.stdout"
            )
        if self._error is not None:
            raise self._error
        return self._parts
