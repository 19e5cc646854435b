"""Which examples are for what: to reflect on, to choose by, and to measure on what nothing has seen."""

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
    """No example is in two of them."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


def draw_examples(config: GepaConfig, *, num_train: int, num_eval: int) -> Drawn:
    """From all over the data, by the seed. What is not reflected on comes from the evaluation split, while that lasts.

    Args:
        num_train: size of the environment's training split.
        num_eval: size of its evaluation split, 0 where it has none.

    Raises: ConfigError where more were asked for than there are.
    """
    rng = random.Random(config.seed)
    to_train: list[tuple[Split, int]] = [("train", index) for index in range(num_train)]
    held_out: list[tuple[Split, int]] = [("eval", index) for index in range(num_eval)]
    rng.shuffle(to_train)
    rng.shuffle(held_out)
    wanted_train, wanted_val = _sizes(config, num_train, num_eval)
    if not to_train:
        to_train, held_out = held_out[:wanted_train], held_out[wanted_train:]
    train, rest = to_train[:wanted_train], held_out + to_train[wanted_train:]
    validation, test = rest[:wanted_val], rest[wanted_val : wanted_val + config.num_test]
    return Drawn(_for("train", train), _for("validation", validation), _for("test", test))


def _for(purpose: Purpose, places: list[tuple[Split, int]]) -> tuple[Example, ...]:
    return tuple(Example(split, index, purpose) for split, index in places)


def _sizes(config: GepaConfig, num_train: int, num_eval: int) -> tuple[int, int]:
    """What was typed is meant; what was not shrinks to what there is."""
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
            f"{train} examples to reflect on, {val} to choose by and {config.num_test} to measure on are wanted - "
            f"expected at most as many as the environment has: {num_train} to train on and {num_eval} held out, and "
            "none is used twice. Lower `--num-train`, `--num-val` or `--num-test`."
        )
    return train, val
