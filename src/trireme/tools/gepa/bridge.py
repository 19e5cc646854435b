"""A library that knows no asyncio works in a thread, and has its questions answered by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Lock
from typing import Any, TypeVar

Value = TypeVar("Value")


class Closed(Exception):
    """The event loop answers nothing any more: the thread is to come to its end."""


class Bridge:
    """From a thread to the event loop that made it, until that is interrupted."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._asked: Future[Any] | None = None
        self.is_closed = False

    def ask(self, question: Coroutine[Any, Any, Value]) -> Value:
        """Called in the thread.

        Raises: Closed; whatever the question raises.
        """
        with self._lock:
            if self.is_closed:
                question.close()
                raise Closed
            self._asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return self._asked.result()
        except Exception as error:
            if self.is_closed:
                raise Closed from error
            raise

    async def run(self, work: Callable[[], Value]) -> Value:
        """The thread's own result. Where this is cancelled, the thread is gone before it returns."""
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            self._close()
            await asyncio.wait([working])
            if not working.cancelled():
                working.exception()  # looked at: that it ended early is no news
            raise

    def _close(self) -> None:
        with self._lock:
            self.is_closed = True
            if self._asked is not None:
                self._asked.cancel()
