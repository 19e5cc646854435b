"""Draw examples for three purposes: to reflect on, to choose the best prompt by, and to measure on at the end."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from trireme.base.errors import ConfigError
from trireme.orchestrator.environments.wire import Split
from trireme.tools.gepa.config import GepaConfig

Purpose = Literal["train", "validation", "test"]
PURPOSES: tuple[Purpose, ...] = ("train", "validation", "test")


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
