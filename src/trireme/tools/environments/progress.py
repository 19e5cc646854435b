"""Progress on standard error: a live line in a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.progress
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

SHOW_EVERY_S = 10.0  # where there is no terminal


class Progress:
    """Stages of a command, one after the other."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def show(self, words: str) -> None:
        self._console.print(words, markup=False)

    @contextmanager
    def stage(self, what: str, *, limit_s: float) -> Iterator[None]:
        """Show that `what` is under way, and may take `limit_s`."""
        words = f"{what} (at most {limit_s:.0f} s)"
        if not self._console.is_terminal:
            self.show(words)
        with self._live() as live:
            live.add_task(escape(words), total=None)
            yield

    @contextmanager
    def rewards(self, total: int, *, limit_s: float) -> Iterator[Callable[[float | None], None]]:
        """Yield a function to call with the reward of each rollout that ended, or None where it failed.

        Args:
            total: number of rollouts.
            limit_s: how long each of them may take.
        """
        limit, shown_at = f"each at most {limit_s:.0f} s", time.monotonic()
        rewards: list[float | None] = []

        def describe() -> str:
            scored = [reward for reward in rewards if reward is not None]
            mean = f", mean reward {sum(scored) / len(scored):.3f}" if scored else ""
            return f"{len(rewards)} of {total} rollouts, {len(rewards) - len(scored)} failed{mean}"

        def add(reward: float | None) -> None:
            nonlocal shown_at
            rewards.append(reward)
            live.update(task, description=f"{describe()}; {limit}", advance=1)
            if not self._console.is_terminal and time.monotonic() - shown_at >= SHOW_EVERY_S:
                shown_at = time.monotonic()
                self.show(describe())

        if not self._console.is_terminal:
            self.show(f"{describe()}; {limit}")
        with self._live(BarColumn(), MofNCompleteColumn()) as live:
            task = live.add_task(limit, total=total)
            yield add

    def _live(self, *more: BarColumn | MofNCompleteColumn) -> rich.progress.Progress:
        """Return a live line, which shows nothing where there is no terminal."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *more, TimeElapsedColumn())
        return rich.progress.Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )
