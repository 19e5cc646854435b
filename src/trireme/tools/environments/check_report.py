"""The report of an environment check: figures, the same in words, and advice.

The bounds are the usual ones for reinforcement learning from verifiable rewards: a policy learns where it sometimes
succeeds and sometimes does not. Of an example that always or never succeeds, all advantages are 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from trireme.algo.advantage import SAME, are_same
from trireme.algo.data.order import ENDLESS
from trireme.base.safe_text import clean
from trireme.orchestrator.environments.wire import Split
from trireme.orchestrator.evaluation.results import EvalResult
from trireme.orchestrator.rollout.driver import Extent, RolloutOutcome
from trireme.tools.environments.sessions import SessionReport

TOO_EASY = 0.8
GOOD = (0.1, 0.7)
TOO_HARD = 0.05
MUCH_WITHOUT_SIGNAL = 0.5
LITTLE_SPREAD = 0.05  # of rewards between 0 and 1, within a group
MUCH_TRUNCATED = 0.1
FEW_EXAMPLES = 10
NONSENSE_EARNS = 0.5
SHOWN_EXAMPLES = 12
SHOWN_TRACEBACK = 8  # lines


@dataclass(frozen=True)
class Loaded:
    """The environment before its first rollout."""

    id: str
    kind: str  # package, file, installed or tasks
    where: str
    install_s: float | None  # None where its virtual environment was there, or it needs none
    load_s: float
    num_workers: int
    num_train: int
    num_eval: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Numbers:
    """One figure over all rollouts that have it."""

    mean: float
    least: float
    most: float

    def __str__(self) -> str:
        spread = "" if self.least == self.most else f" (from {self.least:.4g} to {self.most:.4g})"
        return f"{self.mean:.4g}{spread}"


@dataclass(frozen=True)
class Rewards:
    """Statistics over groups, which are the scored rollouts of one example each."""

    mean: float  # over groups: each example counts the same
    error: float | None  # standard error of that mean, from how much groups differ; None of a single group
    std: float  # over all rollouts
    least: float
    most: float
    group_std: float | None  # mean standard deviation within a group; None where no group has two rollouts
    without_signal: float | None  # share of groups whose rewards are all the same
    success: float | None  # the share that the advice goes by; None where rewards are no shares


@dataclass(frozen=True)
class Trouble:
    """Failures with the same error."""

    stage: str  # rollout, score, timeout or worker; oracle or nothing, of tasks that bring solutions
    error: str
    count: int
    examples: list[int]
    traceback: str  # of the first


@dataclass(frozen=True)
class CheckReport:
    """Everything that a check found. Its fields are the keys of `--json`."""

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
    sessions: SessionReport | None = None  # of an agent program

    @property
    def num_failed(self) -> int:
        return sum(trouble.count for trouble in self.troubles)

    @property
    def holds(self) -> bool:
        is_exact = self.sessions is None or self.sessions.drift == 0
        return self.num_done > 0 and not self.troubles and self.num_restarts == 0 and is_exact

    def as_json(self) -> dict[str, Any]:
        return {"holds": self.holds} | asdict(self)


def build_report(
    loaded: Loaded,
    outcomes: Sequence[RolloutOutcome],
    extent: Extent,
    *,
    policy: str,
    is_baseline: bool,
    seconds: float,
    num_restarts: int,
    success_at: float | None = None,
    sessions: SessionReport | None = None,
) -> CheckReport:
    scored = [outcome.rollout for outcome in outcomes if outcome.rollout is not None]
    groups: dict[int, list[float]] = defaultdict(list)
    components: dict[str, list[float]] = defaultdict(list)
    failed: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)  # examples and tracebacks
    for outcome in outcomes:
        if outcome.rollout is not None:
            groups[outcome.spec.example].append(outcome.rollout.reward)
            for name, value in outcome.rollout.metrics.items():
                components[name].append(value)
        elif outcome.failure is not None:
            failure = outcome.failure
            failed[failure.stage, failure.error].append((outcome.spec.example, failure.traceback))
    troubles = [
        Trouble(stage, error, len(each), sorted({example for example, _ in each}), traceback=each[0][1])
        for (stage, error), each in failed.items()
    ]
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
        rewards=rewards_of(list(groups.values()), success_at=success_at) if scored else None,
        success_at=success_at,
        components={name: found for name, values in components.items() if (found := numbers_of(values)) is not None},
        turns=numbers_of([rollout.num_turns for rollout in scored]) if scored else None,
        sampled=numbers_of([n for rollout in scored if (n := rollout.num_sampled) is not None]),
        tokens=numbers_of([n for rollout in scored if (n := rollout.num_tokens) is not None]),
        truncated=float(np.mean([rollout.truncated for rollout in scored])) if scored else 0.0,
        stops=dict(Counter(rollout.stop or "(not said)" for rollout in scored).most_common()),
        troubles=sorted(troubles, key=lambda trouble: -trouble.count),
        sessions=sessions,
    )


def numbers_of(values: Sequence[float]) -> Numbers | None:
    return Numbers(float(np.mean(values)), float(np.min(values)), float(np.max(values))) if values else None


class CheckedRollout(EvalResult, kw_only=True):
    """One rollout of a check, as a line of its file. The first keys are those of an evaluation."""

    seconds: float  # from its first attempt
    traceback: str = ""

    @classmethod
    def of(cls, outcome: RolloutOutcome, **more: Any) -> Self:
        traceback = outcome.failure.traceback if outcome.failure is not None else ""
        return super().of(outcome, seconds=round(outcome.seconds, 3), traceback=traceback, **more)


def rewards_of(groups: Sequence[Sequence[float]], *, success_at: float | None = None) -> Rewards:
    """Compute statistics of groups with at least one reward each.

    Args:
        success_at: the reward from which on a rollout is a success. Without it, success is the mean reward where all
            rewards are between 0 and 1.
    """
    means = [float(np.mean(group)) for group in groups]
    every = [reward for group in groups for reward in group]
    several = [group for group in groups if len(group) > 1]
    success = None
    if success_at is not None:
        success = float(np.mean([np.mean([reward >= success_at for reward in group]) for group in groups]))
    elif min(every) >= -SAME and max(every) <= 1 + SAME:
        success = float(np.mean(means))
    return Rewards(
        mean=float(np.mean(means)),
        error=float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None,
        std=float(np.std(every)),
        least=min(every),
        most=max(every),
        group_std=float(np.mean([np.std(group) for group in several])) if several else None,
        without_signal=float(np.mean([are_same(np.array(group)) for group in several])) if several else None,
        success=success,
    )


def text_of(report: CheckReport) -> str:
    sessions = (_row(name, text) for name, text in report.sessions.lines()) if report.sessions else ()
    parts = [_fact_lines(report), _figure_lines(report), sessions, _trouble_lines(report), _advice_lines(report)]
    return clean("\n\n".join(text for part in parts if (text := "\n".join(part))))


def advice_of(report: CheckReport) -> list[str]:
    """Return what to think of the figures, and what to try. The first line is about the difficulty, if measured."""
    rewards, advice = report.rewards, []
    if rewards is None:
        return []
    if not report.is_baseline:
        if rewards.success is not None and rewards.success > NONSENSE_EARNS:
            advice.append(
                f"answers that make no sense earned {rewards.success:.2f}: a reward that anything earns teaches "
                "nothing. Look at the reward function."
            )
        advice.append(
            "no baseline was measured, as no model answered. `--model FOLDER` starts an engine for the check, "
            "`--base-url URL` asks a running server."
        )
        return advice
    advice.append(difficulty_in_words(rewards))
    if rewards.without_signal is None:
        advice.append("one rollout per example says nothing about the spread within groups: take `-r 8`.")
    elif rewards.without_signal > MUCH_WITHOUT_SIGNAL:
        advice.append(
            f"{rewards.without_signal:.0%} of the groups have no signal (all their rewards are the same): the rewards "
            "may need tuning, so that better answers earn more; or a higher temperature, or "
            "`orchestrator.buffer.online_difficulty_filtering = true`."
        )
    elif rewards.success is not None and rewards.group_std is not None and rewards.group_std < LITTLE_SPREAD:
        advice.append(
            f"rewards differ little within groups (standard deviation {rewards.group_std:.3f}): they may need tuning, "
            "so that better answers earn visibly more."
        )
    if report.num_examples < FEW_EXAMPLES:
        advice.append(f"only {_count(report.num_examples, 'example')}: take `-n 20` or more to trust these figures.")
    if report.truncated > MUCH_TRUNCATED:
        advice.append(
            f"{report.truncated:.0%} of the rollouts were cut off: raise `orchestrator.sampling.max_tokens` or "
            "`seq_len`, or ask for shorter answers."
        )
    return advice


def difficulty_in_words(rewards: Rewards) -> str:
    success = rewards.success
    if success is None:
        return (
            f"difficulty: rewards from {rewards.least:g} to {rewards.most:g} are no shares of success. "
            "`--success-at X` says from which reward on a rollout is one."
        )
    measured = f"{success:.1%} success"
    if success > TOO_EASY:
        return f"too easy: {measured}, above {TOO_EASY:.0%}. There is little left to learn: take harder examples."
    if success < TOO_HARD:
        return (
            f"too hard: {measured}, below {TOO_HARD:.0%}. Take easier examples, a stronger model, a supervised "
            "warm-up (`sft`), or a reward that also pays for a part of the way."
        )
    if GOOD[0] <= success <= GOOD[1]:
        return f"good: {measured} is within {GOOD[0]:.0%} to {GOOD[1]:.0%}, where reinforcement learning works best."
    side = "easy" if success > GOOD[1] else "hard"
    return f"on the {side} side: {measured}; {GOOD[0]:.0%} to {GOOD[1]:.0%} is best."


def _fact_lines(report: CheckReport) -> Iterator[str]:
    loaded = report.loaded
    yield f"{loaded.id}  ({loaded.kind}, {loaded.where})"
    yield _row("versions", ", ".join(f"{name} {version}" for name, version in loaded.versions.items()))
    installed = f"; installed in {loaded.install_s:.1f} s" if loaded.install_s is not None else ""
    yield _row("loaded", f"in {loaded.load_s:.1f} s by {_count(loaded.num_workers, 'worker')}{installed}")
    to_train = "endless tasks" if loaded.num_train == ENDLESS else str(loaded.num_train)
    yield _row("examples", f"{to_train} to train on, {loaded.num_eval} held out")
    yield _row("policy", report.policy)
    failed = f"{report.num_failed} failed" if report.num_failed else "none failed"
    yield _row(
        "rollouts",
        f"{report.num_examples} {report.split} examples x {report.rollouts_per_example}: {report.num_done} "
        f"scored, {failed}, in {report.seconds:.1f} s (the slowest {report.slowest_s:.1f} s)",
    )


def _figure_lines(report: CheckReport) -> Iterator[str]:
    rewards = report.rewards
    if rewards is None:
        return
    error = f" ± {rewards.error:.3f}" if rewards.error is not None else ""
    yield _row("reward", f"{rewards.mean:.3f}{error}, from {rewards.least:g} to {rewards.most:g}")
    if report.success_at is not None and rewards.success is not None:
        yield _row("success", f"{rewards.success:.1%} of the rollouts earn {report.success_at:g} or more")
    spread = f"standard deviation {rewards.std:.3f}"
    if rewards.group_std is not None and rewards.without_signal is not None:
        spread += f", within groups {rewards.group_std:.3f}; {rewards.without_signal:.0%} of the groups without signal"
    yield _row("spread", spread)
    lengths = {"turns": report.turns, "tokens sampled": report.sampled, "tokens in all": report.tokens}
    for title, figures in (("components", report.components), ("lengths", lengths)):
        lines = [f"{name} {numbers}" for name, numbers in figures.items() if numbers is not None]
        yield from (_row("" if place else title, line) for place, line in enumerate(lines))
    yield _row("truncated", f"{report.truncated:.1%}")
    yield _row("stopped by", ", ".join(f"{stop} ({count})" for stop, count in report.stops.items()))


def _trouble_lines(report: CheckReport) -> Iterator[str]:
    if report.num_restarts:
        yield f"workers died and were restarted {_count(report.num_restarts, 'time')}: see their logs."
    for trouble in report.troubles:
        yield f"{_count(trouble.count, 'rollout')} failed, {trouble.stage}: {trouble.error}"
        shown = ", ".join(map(str, trouble.examples[:SHOWN_EXAMPLES]))
        num_more = len(trouble.examples) - SHOWN_EXAMPLES
        yield f"  {report.split} examples {shown}{f' and {num_more} more' if num_more > 0 else ''}"
        for line in trouble.traceback.strip().splitlines()[-SHOWN_TRACEBACK:]:
            yield f"  | {line}"


def _advice_lines(report: CheckReport) -> Iterator[str]:
    yield from (f"- {line}" for line in advice_of(report))
    if report.holds:
        yield f"{report.loaded.id} works."
    elif report.num_done:
        yield f"{report.loaded.id} has errors: rollouts that fail are retried, then dropped with their group."
    else:
        yield f"{report.loaded.id} does not work: no rollout was scored."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _row(name: str, text: str) -> str:
    return f"  {name:11}{text}"
