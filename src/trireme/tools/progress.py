"""Progress on standard error: a live line in a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SHOW_EVERY_S = 10.0  # without a terminal


def show(words: str) -> None:
    _console().print(words, markup=False)


@contextmanager
def stage(what: str, *, limit_s: float) -> Iterator[None]:
    """Show that `what` is under way, and may take `limit_s`."""
    words = f"{what} (at most {limit_s:.0f} s)"
    if not _console().is_terminal:
        show(words)
    with _live() as live:
        live.add_task(escape(words), total=None)
        yield


@contextmanager
def rewards(total: int, *, limit_s: float) -> Iterator[Callable[[float | None], None]]:
    """Yield a function to call with the reward of each rollout that ended, or None if it failed.

    Args:
        total: number of rollouts.
        limit_s: how long each of them may take.
    """
    limit, shown_at = f"each at most {limit_s:.0f} s", time.monotonic()
    ended: list[float | None] = []

    def describe() -> str:
        scored = [reward for reward in ended if reward is not None]
        mean = f", mean reward {sum(scored) / len(scored):.3f}" if scored else ""
        return f"{len(ended)} of {total} rollouts, {len(ended) - len(scored)} failed{mean}"

    def add(reward: float | None) -> None:
        nonlocal shown_at
        ended.append(reward)
        live.update(task, description=f"{describe()}; {limit}", advance=1)
        # without a terminal, a line now and then
        if not _console().is_terminal and time.monotonic() - shown_at >= SHOW_EVERY_S:
            shown_at = time.monotonic()
            show(describe())

    if not _console().is_terminal:
        show(f"{describe()}; {limit}")
    with _live(BarColumn(), MofNCompleteColumn()) as live:
        task = live.add_task(limit, total=total)
        yield add


def _live(*more: BarColumn | MofNCompleteColumn) -> Progress:
    """Return a live line, which shows nothing if there is no terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *more, TimeElapsedColumn())
    return Progress(*columns, console=_console(), transient=True, disable=not _console().is_terminal)


@cache
def _console() -> Console:
    """One for all, so that what is shown meanwhile goes above the live line."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
