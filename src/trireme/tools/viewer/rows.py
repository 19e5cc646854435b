"""A line of the list of rollouts, and all that there is about a rollout. Pure; whatever a file holds becomes one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from statistics import fmean, pstdev
from typing import Any, TypeVar

import msgspec

from trireme.tools.rollouts import DROPPED, Record, Row

AnyRow = TypeVar("AnyRow", "Row", "ExampleRow")


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
