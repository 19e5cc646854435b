"""The records of a search: every rollout and reflection, on disk as soon as it is over.

A search that was stopped is resumed by running it again from its beginning with these answers. The same seed asks the
same questions in the same order, so the search comes to where it stopped without asking a model anything. Only what was
under way or failed is asked again. An answer's name depends on all that it was asked with, so that a search with other
settings never reuses it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from trireme.monitor.lines import append_lines, read_lines
from trireme.orchestrator.environments.wire import Split
from trireme.orchestrator.evaluation.results import EvalResult

ROLLOUTS = "rollouts.jsonl"
REFLECTIONS = "reflections.jsonl"


@dataclass(frozen=True)
class Example:
    """One example, by its place in the environment's data."""

    split: Split
    index: int


def name_of(*asked: Any) -> str:
    """Return a short name of what a model was asked: equal for equal values only."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


class PromptRollout(EvalResult, kw_only=True):
    """One rollout with one prompt. The keys of `EvalResult` come first, as analysis scripts expect them.

    Example:
        {"example_id": 3, "reward": 0.5, ..., "split": "train", "prompt_name": "1f3a…"}
    """

    split: Split
    prompt_name: str  # digest of the prompt and all other settings
    columns: dict[str, Any] = {}  # the fields of the environment's state that were asked for
    state_keys: list[str] = []  # all fields of that state, if one that was asked for is missing

    @property
    def score(self) -> float:
        """The reward; 0 if the rollout failed."""
        return self.reward or 0.0

    @property
    def key(self) -> tuple[str, Example, int]:
        """The name of the prompt, the example, and how often this prompt was tried on it before."""
        return self.prompt_name, Example(self.split, self.example), self.rollout


class Reflection(msgspec.Struct, kw_only=True):
    """One question to the reflection model, and its answer."""

    name: str  # digest of the model, its sampling and the question
    nth: int  # how often the same question was asked before
    question: str
    answer: str
    error: str | None = None  # why there is no answer

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.nth


Line = TypeVar("Line", PromptRollout, Reflection)


class Records(Generic[Line]):
    """A file of a search, and the lines that it holds."""

    def __init__(self, path: Path, kind: type[Line]) -> None:
        """Read the file. What failed is left out, and so is a line whose writer was killed."""
        self.path = path
        self.lines: dict[Hashable, Line] = {}
        self._times: Counter[Hashable] = Counter()
        for text in read_lines(path)[0]:
            with suppress(ValueError, RecursionError):
                line = msgspec.convert(json.loads(text), kind)  # `json.loads` reads NaN and infinity too
                if line.error is None:
                    self.lines[line.key] = line

    def next_time(self, asked: Hashable) -> int:
        """Return how often this process asked for the same rollout or reflection before."""
        self._times[asked] += 1
        return self._times[asked] - 1

    def add(self, line: Line) -> None:
        """Write a line, and wait until it is on disk. Raises: OSError if the disk is full."""
        append_lines(self.path, deque([json.dumps(msgspec.to_builtins(line)).encode()]), sync=True)
        self.lines[line.key] = line
