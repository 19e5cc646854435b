"""What a search has paid for: every rollout and every reflection, one line each, written when it is over.

A search that was stopped is gone on with by running it again from its beginning with these answers: the same seed asks
the same questions in the same order, so it comes to where it stopped without asking a model anything, and nothing is
counted twice. Only what was under way is lost.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.paths import atomic_write
from trireme.orchestrator.evaluation.results import EvalResult
from trireme.tools.gepa.examples import Example, Purpose

ROLLOUTS = "rollouts.jsonl"
REFLECTIONS = "reflections.jsonl"


def name_of(text: str) -> str:
    """Short, and the same for the same text only."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Scored(EvalResult, kw_only=True):
    """One rollout with one prompt. The keys of `EvalResult` first, as analysis scripts expect them.

    Example:
        {"example_id": 3, "reward": 0.5, ..., "purpose": "train", "split": "train", "prompt_name": "1f3a…", "nth": 0}
    """

    purpose: Purpose
    split: str
    prompt_name: str
    nth: int  # time that this prompt is tried on this example, from 0
    columns: dict[str, Any] = {}  # of the environment's state
    state_keys: list[str] = []  # what there is, where one that was asked for is not
    traceback: str = ""

    @property
    def score(self) -> float:
        """A rollout that failed counts as 0."""
        return self.reward or 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        return key_of(self.prompt_name, Example(self.split, self.example, self.purpose), self.nth)  # type: ignore[arg-type]


class Reflected(msgspec.Struct, kw_only=True):
    """One question to the reflection model, and what it said."""

    question_name: str
    nth: int
    question: str
    answer: str
    error: str | None = None  # why there is no answer

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.question_name, self.nth)


Line = TypeVar("Line", Scored, Reflected)


def key_of(prompt_name: str, example: Example, nth: int) -> tuple[Any, ...]:
    return (prompt_name, example.purpose, example.split, example.index, nth)


class Journal:
    """Both files, held open for appending."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rollouts, self._reflections = folder / ROLLOUTS, folder / REFLECTIONS
        self.rollouts = {line.key: line for line in _read(self._rollouts, Scored)}
        self.reflections = {line.key: line for line in _read(self._reflections, Reflected)}

    @property
    def num_failed(self) -> int:
        return sum(line.error is not None for line in self.rollouts.values())

    def add_rollout(self, line: Scored) -> None:
        _append(self._rollouts, line)
        self.rollouts[line.key] = line

    def add_reflection(self, line: Reflected) -> None:
        _append(self._reflections, line)
        self.reflections[line.key] = line

    def forget(self, lines: Sequence[Scored | Reflected]) -> None:
        """As if they had never been: what ended a search must not end it again when its cause is gone."""
        gone = {line.key for line in lines}
        self.rollouts = {key: line for key, line in self.rollouts.items() if key not in gone}
        self.reflections = {key: line for key, line in self.reflections.items() if key not in gone}
        _write(self._rollouts, self.rollouts.values())
        _write(self._reflections, self.reflections.values())


def _write(path: Path, lines: Iterable[Scored | Reflected]) -> None:
    with atomic_write(path) as file:
        file.writelines(_to_line(line) for line in lines)


def _to_line(line: Scored | Reflected) -> bytes:
    return json.dumps(msgspec.to_builtins(line)).encode() + b"\n"


def _append(path: Path, line: Scored | Reflected) -> None:
    try:
        with open(path, "ab") as file:
            file.write(_to_line(line))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TriremeError(
            f"{path} could not be written ({error}) - expected room for one more line. Make some; the same command "
            "then goes on where this one stopped."
        ) from error


def _read(path: Path, kind: type[Line]) -> Iterator[Line]:
    """A last line that was not written to its end is cut off: what it was for is done again."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            yield msgspec.convert(json.loads(line), kind)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number} cannot be read ({error}) - expected a line as this command writes it. Remove "
                "the line, and what it was for is done again; or begin anew with `--fresh`."
            ) from error
