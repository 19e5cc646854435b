"""Concurrency of an environment's rollouts: slots, an exclusive section for one group, and a barrier of a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Slot:
    """One of the slots of `max_concurrent`, held from entry to exit, or until `release` before that."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._is_held = False

    async def __aenter__(self) -> Slot:
        await self._slots.acquire()
        self._is_held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._slots.release()


class ExclusiveSection:
    """A section for one name at a time. All tasks of that name may be inside together.

    Example:
        async with section.enter("group 17"):
            ...
    """

    def __init__(self) -> None:
        self._name = ""
        self._num_inside = 0
        self._emptied = asyncio.Event()

    @asynccontextmanager
    async def enter(self, name: str) -> AsyncIterator[None]:
        while self._num_inside and self._name != name:
            self._emptied.clear()
            await self._emptied.wait()
        self._name = name
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._emptied.set()


class GroupBarrier:
    """Holds the results of a group back until all of its rollouts have theirs.

    A worker reports the rollouts of a group one after the other. If it dies in between, another worker cannot score the
    rest without those that were reported already, so the whole group runs again.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    async def wait(self, group: str, size: int, *, timeout_s: float) -> None:
        """Wait for the others, once this rollout has its result. After a timeout or a failure of another, it stands.

        Raises: the error given to `fail`.
        """
        waiting = self._waiting.setdefault(group, [])
        waiting.append(mine := asyncio.get_running_loop().create_future())
        if len(waiting) == size:
            self.release(group)
        try:
            async with asyncio.timeout(timeout_s):
                await mine
        except TimeoutError:
            return
        finally:
            if mine in waiting:
                waiting.remove(mine)

    def fail(self, group: str, build_error: Callable[[], Exception]) -> None:
        """Fail all that wait. Each gets an error of its own: one that is raised in many places has a long traceback."""
        for waiting in self._waiting.pop(group, []):
            if not waiting.done():
                waiting.set_exception(build_error())

    def release(self, group: str) -> None:
        for waiting in self._waiting.pop(group, []):
            if not waiting.done():
                waiting.set_result(None)
