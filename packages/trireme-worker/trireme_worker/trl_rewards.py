"""Call reward functions of TRL's trainers, and read their data sets, as a plain environment.

A function is called with lists, one entry per rollout of a group: `prompts`, `completions`, and each column of the data
set by its name. It returns a list with a number for each, or None for a rollout that it does not judge. It may be
async. Prompts and completions are texts or lists of messages, as the data set has them.

Example:
    def exact(completions, answer, **columns):
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

    def load_environment():
        return as_environment(train=[{"prompt": "Reverse: abc", "answer": "cba"}], rewards=[exact], weights=[1.0])
"""

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trireme_worker.plain import to_messages
from trireme_worker.rollout import RewardError

NOT_COLUMNS = ("prompt", "completion", "completion_ids")
OFFERED = ("prompts", "completions", "log_extra", "log_metric")
"""Names that a function may ask for beside columns. TRL also has `completion_ids`, `trainer_state`, `environments`."""
THOUGHT = re.compile(r"<think>((?!<think>).)*?</think>((?!<think>).)*", re.DOTALL)
PICTURES = ("image", "images")


def as_environment(
    *, train: Iterable, rewards: Any, weights: Sequence[float] | None = None, eval: Iterable | None = None
) -> dict[str, Any]:
    """Return what `load_environment` returns: examples, and the reward of all functions together.

    Args:
        train, eval: data sets with a column `prompt`; others are handed to the functions.
        rewards: a function, or a list of them.
        weights: a factor for each function; 1 if not given.

    Raises: TypeError for a function that asks for what only TRL's trainer has, ValueError for data without prompts.
    """
    functions = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if len(weights) != len(functions):
        raise ValueError(
            f"there are {len(weights)} reward weights for {len(functions)} reward functions - expected one for each - "
            "correct `weights`."
        )
    found = {"dataset": read_rows(train), "eval_dataset": read_rows(eval if eval is not None else ())}
    for function in functions:
        _check_function(function, {*(found["dataset"] or [{}])[0]})

    async def reward(completions: list[str], conversations: list[list[dict]], examples: list[dict]) -> list[dict]:
        said = [
            text if isinstance(example["prompt"], str) else messages[len(to_messages(example["prompt"])) :]
            for text, messages, example in zip(completions, conversations, examples, strict=True)
        ]
        return await score(functions, weights, said, examples)

    return {**found, "reward": reward}


def read_rows(data: Iterable) -> list[dict[str, Any]]:
    """Return the rows of a data set. Raises: ValueError for one without prompts, without an end, or with pictures."""
    if not hasattr(data, "__len__"):
        raise ValueError(
            f"the data set is a {type(data).__name__} without a length - expected one that ends - load it without "
            "`streaming`."
        )
    rows = [dict(row) for row in data]
    if rows and "prompt" not in rows[0]:
        raise ValueError(
            f"the data set has the columns {', '.join(rows[0])} - expected `prompt`, a text or a list of messages - "
            "add that column, as TRL asks for it too."
        )
    if rows and (pictures := [name for name in PICTURES if name in rows[0]]):
        raise ValueError(
            f"the data set has a column `{pictures[0]}` - expected pictures inside of the messages of `prompt` - see "
            "docs/pictures.md for their form."
        )
    return rows


def _check_function(function: Callable, columns: set[str]) -> None:
    """Refuse a function that asks for what no rollout can give: at load, before any rollout is paid for."""
    if not callable(function):
        raise TypeError(
            f"a reward is {function!r:.80} - expected a function - a reward model has no counterpart here: serve it, "
            "and write a function that asks it."
        )
    offered = (columns - {*NOT_COLUMNS}) | {*OFFERED}
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    if missing := [each.name for each in named if each.default is each.empty and each.name not in offered]:
        raise TypeError(
            f"the reward function `{name_of(function)}` asks for {', '.join(missing)} - expected "
            f"{', '.join(sorted(offered))} (columns of the data set, by name) - write it without, or give the "
            "parameter a default."
        )


async def score(
    functions: Sequence[Callable], weights: Sequence[float], completions: list[Any], examples: Sequence[dict]
) -> list[dict[str, float]]:
    """Return the reward of each rollout of a group, with what each function gave as a metric.

    A function that returns None for a rollout does not count in its sum. A rollout for which all return None gets the
    mean of the others, so that its advantage is 0 and theirs is not changed.
    """
    logged: dict[str, float] = {}
    given = {
        "prompts": [example["prompt"] for example in examples],
        "completions": completions,
        **{name: [each.get(name) for each in examples] for name in examples[0] if name not in NOT_COLUMNS},
        **{"log_extra": lambda column, values: None, "log_metric": logged.__setitem__},
    }
    # Async functions wait for other services, so they run at the same time.
    values = [function(**_accepted(function, given)) for function in functions]
    waiting = [number for number, value in enumerate(values) if inspect.isawaitable(value)]
    for number, value in zip(waiting, await asyncio.gather(*(values[number] for number in waiting)), strict=True):
        values[number] = value
    columns = [_checked(value, len(examples), name_of(each)) for value, each in zip(values, functions, strict=True)]

    found: list[dict[str, float]] = []
    for scores in zip(*columns, strict=True):
        judged = [(weight * value) for weight, value in zip(weights, scores, strict=True) if value is not None]
        own = {name_of(each): value for each, value in zip(functions, scores, strict=True) if value is not None}
        found.append({**own, **({"reward": math.fsum(judged)} if judged else {})})

    rewards = [each["reward"] for each in found if "reward" in each]
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    return [{"reward": mean, **logged, **each, "unscored": float("reward" not in each)} for each in found]


def _accepted(function: Callable, given: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in given.items() if takes_any or name in parameters}


def _checked(values: Any, size: int, name: str) -> list[float | None]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != size:
        what = f"{len(values)} rewards" if isinstance(values, (list, tuple)) else f"a {type(values).__name__}"
        raise RewardError(
            f"Reward function `{name}` returned {what} for {size} completions - expected a list with one for each."
        )
    # NaN is TRL's other way to say None
    numbers = [None if value is None else float(value) for value in values]
    return [None if number is None or math.isnan(number) else number for number in numbers]


def name_of(function: Callable) -> str:
    # `functools.partial` and objects have no name of their own
    return getattr(function, "__name__", None) or getattr(
        getattr(function, "func", None), "__name__", type(function).__name__
    )


def think_format_reward(completions: list[Any], **columns: Any) -> list[float]:
    """1 for a completion that begins with one block of <think>…</think>, else 0; TRL has one of this name."""
    texts = [said if isinstance(said, str) else said[0]["content"] for said in completions]
    return [float(bool(THOUGHT.fullmatch(text))) for text in texts]
