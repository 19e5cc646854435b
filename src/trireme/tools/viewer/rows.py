"""A line of the list of rollouts, and all that there is about a rollout. Pure; whatever a file holds becomes one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, pstdev
from typing import Any, TypeVar

import msgspec

from trireme.messages import Tokens
from trireme.tools.viewer.conversation import last_said, messages_of, text_of
from trireme.tools.viewer.pictures import one_line

AnyRow = TypeVar("AnyRow", "Row", "ExampleRow")
DROPPED = "dropped"  # how a rollout ended that is not trained on
PREVIEW = 200  # characters kept of a text, for the list


class Row(msgspec.Struct):
    """What the list shows of a rollout, and where the rest is."""

    number: int  # in its source, from 0
    example: str
    rollout: int
    reward: float | None  # None where it failed, or the file has none
    env: str = ""
    tokens: int = 0  # sampled
    turns: int = 0  # of the model
    advantage: float | None = None  # mean over the tokens that are trained on
    truncated: bool = False
    stop: str = ""
    error: str = ""
    flaws: str = ""
    question: str = ""  # how it begins
    said: str = ""  # what the model said last
    offset: int = 0  # in its file
    length: int = 0  # bytes there


class Record(msgspec.Struct):
    """All of a rollout."""

    row: Row
    prompt: list[dict[str, Any]] = []
    completion: list[dict[str, Any]] = []
    answer: str = ""
    metrics: dict[str, float] = {}
    info: dict[str, Any] = {}  # of the example
    more: dict[str, Any] = {}  # what else was said of it
    samples: list[Tokens] = []
    temperature: float = 1.0
    token_rewards: list[Any] = []  # per sample [T], NaN where there is none


class ExampleRow(msgspec.Struct):
    """The rollouts of one example as a line."""

    example: str
    env: str
    count: int
    failed: int
    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    question: str


KNOWN = {
    *("example_id", "reward", "prompt", "completion", "answer", "info", "metrics", "example", "rollout"),
    *("tokens", "turns", "truncated", "stop", "error", "is_truncated", "stop_condition"),
}


def record_of(value: Mapping[str, Any], *, number: int, seen: Mapping[str, int] | None = None) -> Record:
    """From a line of results, ours or another's that has our first keys. What is not as expected is shown as it is.

    Args:
        seen: rollouts before it per example, for files that do not number them.
    """
    example = str(value.get("example_id", value.get("example", number)))
    prompt, completion = messages_of(value.get("prompt"), "user"), messages_of(value.get("completion"), "assistant")
    others = {name: item for name, item in value.items() if name not in KNOWN}
    numbers = {name: item for name, item in others.items() if _number(item) is not None}
    metrics = _dict(value.get("metrics")) | {name: item for name, item in numbers.items() if name != "version"}
    row = Row(
        number=number,
        example=example,
        rollout=_whole(value.get("rollout"), (seen or {}).get(example, 0)),
        reward=_number(value.get("reward")),
        tokens=_whole(value.get("tokens"), 0),
        turns=_whole(value.get("turns"), sum(message.get("role") == "assistant" for message in completion)),
        truncated=bool(value.get("truncated", value.get("is_truncated", False))),
        stop=one_line(value.get("stop") or value.get("stop_condition") or "", PREVIEW),
        error=one_line(value.get("error") or "", PREVIEW),
        question=preview(text_of(prompt[-1]) if prompt else ""),
        said=preview(last_said(completion)),
    )
    return Record(
        row=row,
        prompt=prompt,
        completion=completion,
        answer=_text(value.get("answer")),
        metrics={name: found for name, item in metrics.items() if (found := _number(item)) is not None},
        info=_dict(value.get("info")),
        more=_more(value, others, numbers),
    )


def _more(value: Mapping[str, Any], others: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
    rest = {name: item for name, item in others.items() if name not in numbers or name == "version"}
    odd = {name: value[name] for name in ("info", "metrics") if name in value and not _is_dict_or_nothing(value[name])}
    if (error := value.get("error")) and len(str(error)) > PREVIEW:
        odd["error"] = error
    return odd | {name: item for name, item in rest.items() if item not in (None, "", [], {})}


def _is_dict_or_nothing(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def preview(text: str) -> str:
    return one_line(text, PREVIEW)


def _number(value: Any) -> float | None:
    if isinstance(value, bool | int | float):
        number = float(value) if abs(value) < 1e300 else math.inf
        return number if math.isfinite(number) else None
    return None


def _whole(value: Any, otherwise: int) -> int:
    number = _number(value)
    return otherwise if number is None else int(number)


def _dict(value: Any) -> dict[str, Any]:
    return {str(name): item for name, item in value.items()} if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else repr(value)


# order

SORTS: dict[str, Callable[[Row], Any]] = {
    "example": lambda row: (row.stop == DROPPED, row.env, _natural(row.example), row.rollout),
    "rollout": lambda row: row.rollout,
    "reward": lambda row: row.reward,
    "advantage": lambda row: row.advantage,
    "tokens": lambda row: row.tokens,
    "turns": lambda row: row.turns,
    "stop": lambda row: row.error or row.stop,
    "said": lambda row: row.said,
}


def _natural(name: str) -> tuple[int, int, str]:
    """ "10" after "9", and names after numbers."""
    return (0, int(name), "") if name.isascii() and name.isdigit() and len(name) < 18 else (1, 0, name)


def in_order(rows: Iterable[Row], name: str, *, backwards: bool) -> list[Row]:
    return _in_order(rows, SORTS[name], backwards=backwards)


def examples_in_order(rows: Iterable[ExampleRow], name: str, *, backwards: bool) -> list[ExampleRow]:
    return _in_order(rows, EXAMPLE_SORTS[name], backwards=backwards)


def _in_order(rows: Iterable[AnyRow], key: Callable[[AnyRow], Any], *, backwards: bool) -> list[AnyRow]:
    """What has no value comes last, either way round."""
    there: list[AnyRow] = []
    missing: list[AnyRow] = []
    for row in rows:
        (missing if key(row) is None else there).append(row)
    return sorted(there, key=key, reverse=backwards) + missing


def key_of(line: Row | ExampleRow) -> tuple[str, str, int]:
    """By which a rollout is found again in other steps; -1 stands for all of an example."""
    return line.env, line.example, line.rollout if isinstance(line, Row) else -1


def by_example(rows: Iterable[Row]) -> list[ExampleRow]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.env, row.example), []).append(row)
    return [_example_row(group) for group in groups.values()]


def _example_row(group: list[Row]) -> ExampleRow:
    rewards = [row.reward for row in group if row.reward is not None]
    return ExampleRow(
        example=group[0].example,
        env=group[0].env,
        count=len(group),
        failed=sum(bool(row.error) for row in group),
        mean=fmean(rewards) if rewards else None,
        std=pstdev(rewards) if rewards else None,
        low=min(rewards, default=None),
        high=max(rewards, default=None),
        question=next((row.question for row in group if row.question), ""),
    )


EXAMPLE_SORTS: dict[str, Callable[[ExampleRow], Any]] = {
    "example": lambda row: (row.env, _natural(row.example)),
    "count": lambda row: row.count,
    "mean": lambda row: row.mean,
    "std": lambda row: row.std,
    "low": lambda row: row.low,
    "high": lambda row: row.high,
    "question": lambda row: row.question,
}


def as_json(record: Record) -> str:
    """What was said and how it was rewarded; no tokens."""
    row = msgspec.to_builtins(record.row)
    head = {name: row[name] for name in ("env", "example", "rollout", "reward", "tokens", "turns", "stop", "error")}
    body = {"prompt": record.prompt, "completion": record.completion, "answer": record.answer}
    text = json.dumps(head | body | {"metrics": record.metrics, "info": record.info}, default=str, indent=1)
    return text.encode(errors="replace").decode()
