"""What a group was told of its rewards is handed out once all of it is there, or to nobody.

A worker tells the rollouts of a group one after the other. Where it dies in the midst of that, nobody can tell the
rest: another worker would wait for those that have their rewards already. So the whole group runs again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trireme.orchestrator.environments.worker_process import WorkerDied


class GroupResults:
    """The groups of which some rollouts have been told their rewards, and not all."""

    def __init__(self) -> None:
        self._told: dict[str, list[asyncio.Future[None]]] = {}

    async def until_all_are_told(self, group: str, size: int, *, timeout_s: float) -> None:
        """Called by each of them once it is told. Where another one fails by itself, or is not told, its own stands.

        Raises: WorkerDied, the death that another one saw.
        """
        told = self._told.setdefault(group, [])
        told.append(mine := asyncio.get_running_loop().create_future())
        if len(told) == size:
            self.release(group)
        try:
            async with asyncio.timeout(timeout_s):
                await mine
        except TimeoutError:
            return
        finally:
            if mine in told:
                told.remove(mine)

    def worker_died(self, group: str, death: WorkerDied) -> None:
        for waiting in self._told.pop(group, []):
            if not waiting.done():
                waiting.set_exception(death.again())

    def release(self, group: str) -> None:
        for waiting in self._told.pop(group, []):
            if not waiting.done():
                waiting.set_result(None)
