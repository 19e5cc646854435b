"""What a page consists of, whatever it is written as. Texts may have `code` in them and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows under a head; without one, names and values."""

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()


@dataclass(frozen=True)
class Figure:
    """A plot. It is drawn when it is asked for, as what is asked for.

    Example:
        Figure("reward", "Reward", draw, "reward from 0.40 to 0.97 over steps 1 to 150").svg
    """

    name: str  # of its file, where it gets one
    title: str
    draw: Callable[[Literal["svg", "png"]], bytes]
    alt: str  # for who cannot see it
    wide: bool = False  # takes the width of the page

    @property
    def svg(self) -> str:
        """One element, with nothing outside it."""
        return self.draw("svg").decode()


@dataclass(frozen=True)
class Code:
    """Lines as they are."""

    text: str
    language: str = ""


@dataclass(frozen=True)
class Message:
    role: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """A rollout to read."""

    title: str
    messages: Sequence[Message]
    facts: Sequence[tuple[str, str]] = ()  # beside it: answer, components of the reward


@dataclass(frozen=True)
class Fold:
    """What most will not want to see."""

    title: str
    blocks: Sequence[Block]


Block = Words | Table | Figure | Code | Conversation | Fold


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """All of it."""

    title: str
    lead: str  # what came of the run, in a sentence or two
    sections: Sequence[Section]
