"""Long work that must not block other work: jobs in daemon threads, and loops that yield to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

PAUSE_EVERY_S = 0.005


def in_background(job: Callable[[], T], *, name: str) -> Future[T]:
    """Run a job in a thread of its own; return its result, or what it raises, as a future.

    It is a daemon, so that the process can end even if the job never does.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as error:  # raised by `Future.result`
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future


async def with_pauses(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items; give the event loop a turn after every few milliseconds of work on them."""
    began = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - began > PAUSE_EVERY_S:
            await asyncio.sleep(0)
            began = time.perf_counter()
