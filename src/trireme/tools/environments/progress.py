"""What a check is doing now, on standard error: a live line in a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import rich.progress
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

SAY_EVERY_S = 10.0  # where there is no terminal


@dataclass
class Tally:
    """Of the rollouts that have ended."""

    total: int
    num_scored: int = 0
    num_failed: int = 0
    reward: float = 0.0  # the sum

    def add(self, reward: float | None) -> None:
        """None of one that failed."""
        self.num_scored += reward is not None
        self.num_failed += reward is None
        self.reward += reward or 0.0

    def __str__(self) -> str:
        mean = f", mean reward {self.reward / self.num_scored:.3f}" if self.num_scored else ""
        return f"{self.num_scored + self.num_failed} of {self.total} rollouts, {self.num_failed} failed{mean}"


class Progress:
    """Stages, one after the other."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self._console = Console(file=file or sys.stderr, highlight=False, soft_wrap=True)

    def say(self, words: str) -> None:
        self._console.print(words, markup=False)

    @contextmanager
    def stage(self, what: str, *, limit_s: float) -> Iterator[None]:
        """`what` is under way, and may take `limit_s`."""
        words = f"{what} (at most {limit_s:.0f} s)"
        if not self._console.is_terminal:
            self.say(words)
            yield
            return
        with self._live() as live:
            live.add_task(escape(words), total=None)
            yield

    @contextmanager
    def rewards(self, total: int, *, limit_s: float) -> Iterator[Callable[[float | None], None]]:
        """Yield a function to call with the reward of each rollout that ended, or with None where it failed.

        Args:
            limit_s: how long each rollout may take.
        """
        tally, limit = Tally(total), f"each at most {limit_s:.0f} s"
        if not self._console.is_terminal:
            yield self._now_and_then(tally, limit)
            return
        with self._live(BarColumn(), MofNCompleteColumn()) as live:
            task = live.add_task(f"{tally}; {limit}", total=total)

            def told(reward: float | None) -> None:
                tally.add(reward)
                live.update(task, description=f"{tally}; {limit}", advance=1)

            yield told

    def _now_and_then(self, tally: Tally, limit: str) -> Callable[[float | None], None]:
        self.say(f"{tally}; {limit}")
        said_at = time.monotonic()

        def told(reward: float | None) -> None:
            nonlocal said_at
            tally.add(reward)
            if time.monotonic() - said_at >= SAY_EVERY_S:
                said_at = time.monotonic()
                self.say(str(tally))

        return told

    def _live(self, *more: BarColumn | MofNCompleteColumn) -> rich.progress.Progress:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *more, TimeElapsedColumn())
        return rich.progress.Progress(*columns, console=self._console, transient=True)
