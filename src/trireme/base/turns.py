"""An event loop that always comes back soon: much that is to be done at once is done a little in each of its turns.

What has come in one turn (a thousand answers on a thousand connections, a thousand messages in one read) would all be
worked at in the next, and whoever else waits would wait for all of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")

AT_ONCE = 16
"""In one turn: of calls that each wake a rollout, or of a batch's rollouts that something is worked out for."""


class Turns:
    """Calls in their order, a few in each turn of the event loop."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left_now = at_once
        self._queue: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_under_way = False

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """At once where little was done in this turn, else in one of the next."""
        if not self._is_under_way:
            self._is_under_way, self._left_now = True, self._at_once
            asyncio.get_running_loop().call_soon(self._go_on)
        if self._left_now and not self._queue:
            self._left_now -= 1
            function(*args)
        else:
            self._queue.append((function, args))

    def finish(self) -> None:
        """Whatever is left, at once."""
        while self._queue:
            function, args = self._queue.popleft()
            function(*args)

    def _go_on(self) -> None:
        queue, self._left_now = self._queue, self._at_once
        if not queue:
            self._is_under_way = False
            return
        asyncio.get_running_loop().call_soon(self._go_on)
        while queue and self._left_now:
            self._left_now -= 1
            function, args = queue.popleft()
            function(*args)


async def by_turns(items: Iterable[Item], at_once: int = AT_ONCE) -> AsyncIterator[Item]:
    """The same items; in between, others have their turns."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % at_once == 0:
            await asyncio.sleep(0)
