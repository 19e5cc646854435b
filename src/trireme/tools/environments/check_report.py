"""The report of an environment check: figures, the same in words, and advice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trireme.algo.data.order import ENDLESS
from trireme.base.safe_text import clean
from trireme.monitor.metrics import means
from trireme.orchestrator.batch_metrics import computed_tokens
from trireme.orchestrator.rollout.driver import Extent, RolloutOutcome
from trireme.orchestrator.session.wire import Split
from trireme.tools.environments.sessions import SessionReport
from trireme.tools.policies.rewards import Rewards, difficulty_in_words, rewards_of

MUCH_WITHOUT_SIGNAL = 0.5
LITTLE_SPREAD = 0.05  # standard deviation of rewards between 0 and 1, within a group
MUCH_TRUNCATED = 0.1
NONSENSE_EARNS = 0.5
SHOWN_EXAMPLES = 12
SHOWN_TRACEBACK = 8  # lines


@dataclass(frozen=True)
class Loaded:
    """The environment before its first rollout."""

    id: str
    where: str
    load_s: float
    num_train: int
    num_eval: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Trouble:
    """Failures with the same error."""

    stage: str  # rollout, score, timeout or worker; oracle or nothing, of tasks that bring solutions
    error: str
    count: int
    examples: list[int]
    traceback: str  # traceback of the first failure


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
    num_restarts: int  # restarts of workers
    rewards: Rewards | None  # None if nothing was scored
    components: dict[str, float]  # means of what the environment measured
    lengths: dict[str, float]  # mean turns and tokens, as far as the policy counts them
    computed_frac: float | None  # tokens that engines computed per token of the rollouts
    truncated: float  # share of the scored rollouts
    stops: dict[str, int]
    troubles: list[Trouble] = field(default_factory=list)
    sessions: SessionReport | None = None  # findings about an agent program; None for other environments

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
    sessions: SessionReport | None = None,
) -> CheckReport:
    # failures go by their error, as one cause fails many rollouts
    scored = [outcome.rollout for outcome in outcomes if outcome.rollout is not None]
    failed: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)  # examples and tracebacks
    for outcome in outcomes:
        if (failure := outcome.failure) is not None:
            failed[failure.stage, failure.error].append((outcome.spec.example, failure.traceback))
    troubles = [
        Trouble(stage, error, len(each), sorted({example for example, _ in each}), traceback=each[0][1])
        for (stage, error), each in failed.items()
    ]
    # text endpoints may not count tokens, so a length may be None
    lengths = {"turns": "num_turns", "tokens sampled": "num_sampled", "tokens in all": "num_tokens"}
    counted = [{name: getattr(rollout, length) for name, length in lengths.items()} for rollout in scored]
    groups = defaultdict(list)
    for rollout in scored:
        groups[rollout.example].append(rollout)
    computed, existing = (sum(each) for each in zip((0, 0), *map(computed_tokens, groups.values()), strict=True))
    return CheckReport(
        loaded=loaded,
        policy=policy,
        is_baseline=is_baseline,
        split=extent.split,
        num_examples=len(extent.examples),
        rollouts_per_example=extent.rollouts_per_example,
        num_done=len(scored),
        seconds=seconds,
        num_restarts=num_restarts,
        rewards=rewards_of((outcome.spec.example, outcome.reward) for outcome in outcomes),
        components=means(rollout.metrics for rollout in scored),
        lengths=means({name: n for name, n in each.items() if n is not None} for each in counted),
        computed_frac=computed / existing if existing else None,
        truncated=float(np.mean([rollout.truncated for rollout in scored])) if scored else 0.0,
        stops=dict(Counter(rollout.stop or "(not said)" for rollout in scored).most_common()),
        troubles=sorted(troubles, key=lambda trouble: -trouble.count),
        sessions=sessions,
    )


def text_of(report: CheckReport) -> str:
    loaded, rewards, sessions = report.loaded, report.rewards, report.sessions
    to_train = "endless tasks" if loaded.num_train == ENDLESS else str(loaded.num_train)
    failed = f"{report.num_failed} failed" if report.num_failed else "none failed"

    rows = {
        "versions": ", ".join(f"{name} {version}" for name, version in loaded.versions.items()),
        "loaded": f"in {loaded.load_s:.1f} s",
        "examples": f"{to_train} to train on, {loaded.num_eval} held out",
        "policy": report.policy,
        "rollouts": f"{report.num_examples} {report.split} examples x {report.rollouts_per_example}: "
        f"{report.num_done} scored, {failed}, in {report.seconds:.1f} s",
    }
    # rewards, if anything was scored
    if rewards is not None:
        error = f" ± {rewards.error:.3f}" if rewards.error is not None else ""
        rows["reward"] = f"{rewards.mean:.3f}{error}, from {rewards.least:g} to {rewards.most:g}"
        if rewards.group_std is not None and rewards.without_signal is not None:
            without_signal = f"{rewards.without_signal:.0%} of the groups without signal"
            rows["spread"] = f"standard deviation within groups {rewards.group_std:.3f}; {without_signal}"
        for title, figures in (("components", report.components), ("lengths", report.lengths)):
            rows[title] = ", ".join(f"{name} {value:.4g}" for name, value in figures.items()) or "none"
        if report.computed_frac is not None:
            rows["computed"] = f"{report.computed_frac:.2f} tokens by the engine per token of the rollouts"
        rows["truncated"] = f"{report.truncated:.1%}"
        rows["stopped by"] = ", ".join(f"{stop} ({count})" for stop, count in report.stops.items())

    if sessions is not None:
        rows |= dict(sessions.lines())
    lines = [f"{loaded.id}  ({loaded.where})", *(f"  {name:11}{text}" for name, text in rows.items())]
    parts = [lines, list(_trouble_lines(report)), [*(f"- {line}" for line in advice_of(report)), _verdict(report)]]
    return clean("\n\n".join("\n".join(part) for part in parts if part))


def advice_of(report: CheckReport) -> list[str]:
    """Return what to think of the figures, and what to try. The first line is about the difficulty, if measured."""
    rewards, advice = report.rewards, []
    if rewards is None:
        return []
    # answers of the script say nothing about the difficulty, and much about the reward
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
    # advice on difficulty first, then on the spread within groups, then on lengths
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

    if report.truncated > MUCH_TRUNCATED:
        advice.append(
            f"{report.truncated:.0%} of the rollouts were cut off: raise `orchestrator.sampling.max_tokens` or "
            "`seq_len`, or ask for shorter answers."
        )
    return advice


def _trouble_lines(report: CheckReport) -> Iterator[str]:
    if report.num_restarts:
        yield f"workers died and were restarted, {report.num_restarts} in all: see their logs."
    # failures with the same error are one trouble
    for trouble in report.troubles:
        yield f"{trouble.count} failed, {trouble.stage}: {trouble.error}"
        more = ", …" if len(trouble.examples) > SHOWN_EXAMPLES else ""
        yield f"  {report.split} examples {', '.join(map(str, trouble.examples[:SHOWN_EXAMPLES]))}{more}"
        for line in trouble.traceback.strip().splitlines()[-SHOWN_TRACEBACK:]:
            yield f"  | {line}"


def _verdict(report: CheckReport) -> str:
    if report.holds:
        return f"{report.loaded.id} works."
    if report.num_done:
        return f"{report.loaded.id} has errors: rollouts that fail are retried, then dropped with their group."
    return f"{report.loaded.id} does not work: no rollout was scored."
