"""Background jobs in daemon threads, so that the process can end even if a job never does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(job: Callable[[], T], *, name: str) -> Future[T]:
    """Run a job in a thread of its own; return its result, or what it raises, as a future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as error:  # raised by `Future.result`
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future
