"""The examples of a search, and its records: every rollout and reflection, on disk as soon as it is over.

A search that was stopped is resumed by running it again from its beginning with these answers. The same seed asks the
same questions in the same order, so the search comes to where it stopped without asking a model anything, and nothing
is counted twice. Only what was under way is lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.paths import atomic_write
from trireme.orchestrator.environments.wire import Split
from trireme.orchestrator.evaluation.results import EvalResult
from trireme.tools.gepa.config import GepaConfig

Purpose = Literal["train", "validation", "test"]
PURPOSES: tuple[Purpose, ...] = ("train", "validation", "test")

ROLLOUTS = "rollouts.jsonl"
REFLECTIONS = "reflections.jsonl"


@dataclass(frozen=True)
class Example:
    """One example, by its place in the environment's data."""

    split: Split
    index: int
    purpose: Purpose = "train"


@dataclass(frozen=True)
class Drawn:
    """The examples of each purpose. No example is in two of them."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


def draw_examples(config: GepaConfig, *, num_train: int, num_eval: int) -> Drawn:
    """Draw from all over the data, by the seed. Validation and test examples come from the evaluation split first.

    Args:
        num_train: size of the environment's training split.
        num_eval: size of its evaluation split, 0 where it has none.

    Raises: ConfigError where the user asks for more examples than there are.
    """
    rng = random.Random(config.seed)
    training: list[tuple[Split, int]] = [("train", index) for index in range(num_train)]
    held_out: list[tuple[Split, int]] = [("eval", index) for index in range(num_eval)]
    rng.shuffle(training)
    rng.shuffle(held_out)
    size_train, size_val = _sizes(config, num_train, num_eval)
    if not training:
        training, held_out = held_out[:size_train], held_out[size_train:]
    rest = held_out + training[size_train:]
    val, test = rest[:size_val], rest[size_val : size_val + config.num_test]
    return Drawn(
        tuple(Example(*place, "train") for place in training[:size_train]),
        tuple(Example(*place, "validation") for place in val),
        tuple(Example(*place, "test") for place in test),
    )


def _sizes(config: GepaConfig, num_train: int, num_eval: int) -> tuple[int, int]:
    """Return the numbers of training and validation examples. Defaults shrink to the data, typed numbers do not."""
    given = config.model_fields_set
    most_train = num_train or num_eval
    shared = num_train + num_eval - config.num_test
    train, val = config.num_train, config.num_val
    if "num_train" not in given:
        left = val if "num_val" in given else min(val, max(num_eval if num_train else 0, shared // 3))
        train = min(train, most_train, max(1, shared - left))
    if "num_val" not in given:
        val = min(val, max(1, shared - train))
    if train > most_train or train + val > shared:
        raise ConfigError(
            f"{train} examples to reflect on, {val} to choose by and {config.num_test} to measure on were asked for - "
            f"expected at most as many as the environment has: {num_train} to train on and {num_eval} held out, and "
            "none is used twice. Lower `--num-train`, `--num-val` or `--num-test`."
        )
    return train, val


def name_of(text: str) -> str:
    """Return a short name of a text: equal for equal texts only."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PromptRollout(EvalResult, kw_only=True):
    """One rollout with one prompt. The keys of `EvalResult` come first, as analysis scripts expect them.

    Example:
        {"example_id": 3, "reward": 0.5, ..., "purpose": "train", "split": "train", "prompt_name": "1f3a…"}
    """

    purpose: Purpose
    split: Split
    prompt_name: str
    columns: dict[str, Any] = {}  # of the environment's state
    state_keys: list[str] = []  # of that state, where a column that was asked for is missing
    traceback: str = ""

    @property
    def score(self) -> float:
        """The reward; 0 where the rollout failed."""
        return self.reward or 0.0

    @property
    def key(self) -> tuple[str, Example, int]:
        """The name of the prompt, the example, and how often this prompt was tried on it before."""
        return self.prompt_name, Example(self.split, self.example, self.purpose), self.rollout


class Reflection(msgspec.Struct, kw_only=True):
    """One question to the reflection model, and its answer."""

    question_name: str
    nth: int  # how often the same question was asked before
    question: str
    answer: str
    error: str | None = None  # why there is no answer

    @property
    def key(self) -> tuple[str, int]:
        return self.question_name, self.nth


Line = TypeVar("Line", PromptRollout, Reflection)


class Records(Generic[Line]):
    """A file of a search, and the lines that it holds."""

    def __init__(self, path: Path, kind: type[Line]) -> None:
        """Read the file. A last line that is incomplete is cut off, and its work is repeated.

        Raises: ConfigError for a damaged file.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.lines: dict[Hashable, Line] = {}
        self._times: Counter[Hashable] = Counter()
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                line = msgspec.convert(json.loads(text), kind)
            except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                raise ConfigError(
                    f"{path}, line {number} cannot be read ({error}) - expected a line as this command writes it. "
                    "Remove the line, and its work is repeated; or start a new search with `--fresh`."
                ) from error
            self.lines[line.key] = line

    def next_time(self, asked: Hashable) -> int:
        """Return how often this process asked for the same rollout or reflection before."""
        self._times[asked] += 1
        return self._times[asked] - 1

    def add(self, line: Line) -> None:
        """Write a line, and wait until it is on disk. Raises: TriremeError where it cannot be written."""
        try:
            with open(self.path, "ab") as file:
                file.write(_to_line(line))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TriremeError(
                f"{self.path} could not be written ({error}) - expected room for one more line. Free some space; the "
                "same command then resumes the search."
            ) from error
        self.lines[line.key] = line

    def forget(self, lines: Sequence[Line]) -> None:
        """Remove lines that ended a search, so that a resumed search asks for them again."""
        for line in lines:
            del self.lines[line.key]
        with atomic_write(self.path) as file:
            file.writelines(map(_to_line, self.lines.values()))


def _to_line(line: PromptRollout | Reflection) -> bytes:
    return json.dumps(msgspec.to_builtins(line)).encode() + b"\n"
