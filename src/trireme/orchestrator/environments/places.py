"""Who may run beside whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Place:
    """One of the places of `max_concurrent`, from the entry to the exit, or until it is given back before that."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._is_taken = False

    async def __aenter__(self) -> Place:
        await self._places.acquire()
        self._is_taken = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self._places.release()


class Isolation:
    """A room for one name at a time; all who come under that name may be in it together.

    Example:
        async with isolation.alone("group 17"):
            ...
    """

    def __init__(self) -> None:
        self._name = ""
        self._num_inside = 0
        self._emptied = asyncio.Event()

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
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
