"""Progress on standard error: a live line in a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from typing import IO, TypeVar

import rich.progress
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

SAY_EVERY_S = 10.0  # where there is no terminal

Opened = TypeVar("Opened")


class Progress:
    """Stages of a command, one after the other."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self._console = Console(file=file or sys.stderr, highlight=False, soft_wrap=True)

    def say(self, words: str) -> None:
        self._console.print(words, markup=False)

    @contextmanager
    def stage(self, what: str, *, limit_s: float) -> Iterator[None]:
        """Show that `what` is under way, and may take `limit_s`."""
        words = f"{what} (at most {limit_s:.0f} s)"
        if not self._console.is_terminal:
            self.say(words)
            yield
            return
        with self._live() as live:
            live.add_task(escape(words), total=None)
            yield

    @asynccontextmanager
    async def opening(
        self, what: str, resource: AbstractAsyncContextManager[Opened], *, limit_s: float
    ) -> AsyncIterator[Opened]:
        """Open `resource` as a stage of its own."""
        async with AsyncExitStack() as stack:
            with self.stage(what, limit_s=limit_s):
                opened = await stack.enter_async_context(resource)
            yield opened

    @contextmanager
    def rewards(self, total: int, *, limit_s: float) -> Iterator[Callable[[float | None], None]]:
        """Yield a function to call with the reward of each rollout that ended, or None where it failed.

        Args:
            total: number of rollouts.
            limit_s: how long each of them may take.
        """
        limit, said_at = f"each at most {limit_s:.0f} s", time.monotonic()
        rewards: list[float | None] = []
        live = self._live(BarColumn(), MofNCompleteColumn()) if self._console.is_terminal else None
        task = live.add_task(limit, total=total) if live else None

        def describe() -> str:
            scored = [reward for reward in rewards if reward is not None]
            mean = f", mean reward {sum(scored) / len(scored):.3f}" if scored else ""
            return f"{len(rewards)} of {total} rollouts, {len(rewards) - len(scored)} failed{mean}"

        def add(reward: float | None) -> None:
            nonlocal said_at
            rewards.append(reward)
            if live is not None and task is not None:
                live.update(task, description=f"{describe()}; {limit}", advance=1)
            elif time.monotonic() - said_at >= SAY_EVERY_S:
                said_at = time.monotonic()
                self.say(describe())

        with live or nullcontext():
            if live is None:
                self.say(f"{describe()}; {limit}")
            yield add

    def _live(self, *more: BarColumn | MofNCompleteColumn) -> rich.progress.Progress:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *more, TimeElapsedColumn())
        return rich.progress.Progress(*columns, console=self._console, transient=True)
