"""An environment of what `trl grpo --config` names: a data set, and reward functions by their names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from trireme_worker.trl_rewards import as_environment, think_format_reward

OWN = {"think_format_reward": think_format_reward}
OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward")
"""Reward functions of TRL's that need packages of their own."""


def load_environment(
    *,
    dataset_name: str,
    reward_funcs: list[str] | str,
    dataset_config: str | None = None,
    dataset_train_split: str = "train",
    dataset_test_split: str = "test",
    reward_weights: list[float] | None = None,
    evaluate: bool = False,
) -> dict[str, Any]:
    """Return examples and reward; `dataset_name` is a data set on a hub, a folder or a file."""
    names = [reward_funcs] if isinstance(reward_funcs, str) else reward_funcs
    return as_environment(
        train=load_rows(dataset_name, dataset_config, dataset_train_split),
        eval=load_rows(dataset_name, dataset_config, dataset_test_split) if evaluate else None,
        rewards=[find_reward(name) for name in names],
        weights=reward_weights,
    )


def load_rows(name: str, config: str | None, split: str) -> Any:
    from datasets import load_dataset

    kind = {"jsonl": "json", "json": "json", "parquet": "parquet", "csv": "csv"}.get(name.rpartition(".")[2])
    return load_dataset(kind, data_files=name, split="train") if kind else load_dataset(name, config, split=split)


def find_reward(name: str) -> Callable[..., Any]:
    """Return a reward function by TRL's name of it, or by a dotted path. Raises: ValueError if there is none."""
    if name in OWN:
        return OWN[name]
    module, _, function = name.rpartition(".") if name not in OF_TRL else ("trl.rewards", "", name)
    if not module:
        raise ValueError(
            f"reward_funcs has {name!r} - expected {', '.join((*OWN, *OF_TRL))}, or the dotted path of a function such "
            "as `my_rewards.exact` - correct it; `get_soft_overlong_punishment` is `[orchestrator.length_penalty]`."
        )
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        advice = "install trl and math-verify" if name in OF_TRL else "correct the path; it begins in this folder"
        raise ValueError(f"the reward function {name!r} cannot be imported ({error}) - {advice}.") from error
