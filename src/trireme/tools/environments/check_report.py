"""What a check found, in numbers. In words: `check_text`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trireme.algo.advantage import SAME, are_same
from trireme.base.paths import atomic_write
from trireme.orchestrator.environments.wire import Split
from trireme.orchestrator.rollout.driver import Extent, Outcome


@dataclass(frozen=True)
class Loaded:
    """The environment before its first rollout."""

    id: str
    kind: str  # package, file or installed
    where: str
    install_s: float | None  # None where its virtual environment was there, or it needs none
    load_s: float
    num_workers: int
    num_train: int
    num_eval: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Numbers:
    """Of one figure over all rollouts."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Numbers:
        return cls(float(np.mean(values)), float(np.min(values)), float(np.max(values)))


@dataclass(frozen=True)
class Rewards:
    """Groups here are the scored rollouts of one example."""

    mean: float  # over groups: each example counts the same
    error: float | None  # standard error of that mean, from how much groups differ; None of a single group
    std: float  # over all rollouts
    least: float
    most: float
    group_std: float | None  # mean standard deviation within a group; None where no group has two rollouts
    without_signal: float | None  # share of groups whose rewards are all the same
    success: float | None  # the share that `advice` goes by; None where rewards are no shares, see `success_of`


@dataclass(frozen=True)
class Trouble:
    """Failures of one kind."""

    stage: str  # rollout, score, timeout or worker
    error: str
    count: int
    examples: list[int]
    traceback: str  # of the first


@dataclass(frozen=True)
class CheckReport:
    """Everything that a check found."""

    loaded: Loaded
    policy: str
    is_baseline: bool  # a policy that is to be trained answered, not a script
    split: Split
    num_examples: int
    rollouts_per_example: int
    num_done: int
    seconds: float
    slowest_s: float
    num_restarts: int  # of workers
    rewards: Rewards | None  # None where nothing was scored
    success_at: float | None
    components: dict[str, Numbers]
    turns: Numbers | None
    sampled: Numbers | None  # tokens of the model in a rollout
    tokens: Numbers | None  # of the whole conversation
    truncated: float  # share of the scored rollouts
    stops: dict[str, int]
    troubles: list[Trouble] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        return sum(trouble.count for trouble in self.troubles)

    @property
    def holds(self) -> bool:
        return self.num_done > 0 and not self.troubles and self.num_restarts == 0

    def as_json(self) -> dict[str, Any]:
        return {"holds": self.holds} | asdict(self)


def build_report(
    loaded: Loaded,
    outcomes: Sequence[Outcome],
    extent: Extent,
    *,
    policy: str,
    is_baseline: bool,
    seconds: float,
    num_restarts: int,
    success_at: float | None = None,
) -> CheckReport:
    scored = [outcome.finished for outcome in outcomes if outcome.finished is not None]
    sampled = [finished.num_sampled for finished in scored if finished.num_sampled is not None]
    tokens = [finished.num_tokens for finished in scored if finished.num_tokens is not None]
    return CheckReport(
        loaded=loaded,
        policy=policy,
        is_baseline=is_baseline,
        split=extent.split,
        num_examples=len(extent.examples),
        rollouts_per_example=extent.rollouts_per_example,
        num_done=len(scored),
        seconds=seconds,
        slowest_s=max((outcome.seconds for outcome in outcomes), default=0.0),
        num_restarts=num_restarts,
        rewards=rewards_of(_groups(outcomes), success_at=success_at) if scored else None,
        success_at=success_at,
        components=_components([finished.done.metrics for finished in scored]),
        turns=Numbers.of([finished.num_turns for finished in scored]) if scored else None,
        sampled=Numbers.of(sampled) if sampled else None,
        tokens=Numbers.of(tokens) if tokens else None,
        truncated=float(np.mean([finished.truncated for finished in scored])) if scored else 0.0,
        stops=dict(Counter(finished.stop or "(not said)" for finished in scored).most_common()),
        troubles=_troubles(outcomes),
    )


def write_rollouts(outcomes: Sequence[Outcome], file: Path) -> None:
    """One line per rollout, with the keys that analysis scripts expect (`example_id`, `reward`)."""
    with atomic_write(file) as out:
        for outcome in outcomes:
            out.write(json.dumps(_line(outcome)).encode() + b"\n")


def _line(outcome: Outcome) -> dict[str, Any]:
    where = {"example": outcome.spec.example, "rollout": outcome.spec.rollout, "seconds": round(outcome.seconds, 3)}
    if outcome.finished is None:
        failure = outcome.failure
        return where | {"error": str(failure), "traceback": failure.traceback if failure else ""}
    done = outcome.finished.done
    said = {name: getattr(done, name) for name in ("prompt", "completion", "answer", "info")}
    counted = ("num_turns", "num_sampled", "num_tokens", "truncated", "stop")
    counts = {name: getattr(outcome.finished, name) for name in counted}
    return where | {"example_id": done.example_id, "reward": done.reward, "metrics": done.metrics} | said | counts


def rewards_of(groups: Sequence[Sequence[float]], *, success_at: float | None = None) -> Rewards:
    """Of groups with at least one reward each."""
    means = [float(np.mean(group)) for group in groups]
    every = [reward for group in groups for reward in group]
    several = [group for group in groups if len(group) > 1]
    return Rewards(
        mean=float(np.mean(means)),
        error=float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None,
        std=float(np.std(every)),
        least=min(every),
        most=max(every),
        group_std=float(np.mean([np.std(group) for group in several])) if several else None,
        without_signal=float(np.mean([are_same(np.array(group)) for group in several])) if several else None,
        success=success_of(groups, success_at=success_at),
    )


def success_of(groups: Sequence[Sequence[float]], *, success_at: float | None) -> float | None:
    """The share of rollouts that reach `success_at`. Without it the mean reward, where all are between 0 and 1."""
    if success_at is not None:
        return float(np.mean([np.mean([reward >= success_at for reward in group]) for group in groups]))
    every = [reward for group in groups for reward in group]
    is_share = min(every) >= -SAME and max(every) <= 1 + SAME
    return float(np.mean([np.mean(group) for group in groups])) if is_share else None


def _groups(outcomes: Sequence[Outcome]) -> list[list[float]]:
    groups: dict[int, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.finished is not None:
            groups[outcome.spec.example].append(outcome.finished.done.reward)
    return list(groups.values())


def _components(rows: Sequence[dict[str, float]]) -> dict[str, Numbers]:
    """Over the rollouts that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    return {name: Numbers.of(each) for name, each in values.items()}


def _troubles(outcomes: Sequence[Outcome]) -> list[Trouble]:
    """The most frequent first."""
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if (failure := outcome.failure) is not None:
            found[failure.stage, failure.error].append(outcome)
    troubles = [
        Trouble(stage, error, len(each), sorted({outcome.spec.example for outcome in each}), _traceback(each[0]))
        for (stage, error), each in found.items()
    ]
    return sorted(troubles, key=lambda trouble: -trouble.count)


def _traceback(outcome: Outcome) -> str:
    return outcome.failure.traceback if outcome.failure is not None else ""
