"""Finished groups become a batch: advantages, filters, a constant size."""

from __future__ import annotations

from collections import Counter

import numpy as np

from trireme.algo.advantage import ESTIMATORS
from trireme.algo.staleness import is_too_old, lags
from trireme.config.run import RunConfig
from trireme.ledger.records import Dropped, Rollout
from trireme.messages import Tokens
from trireme.orchestrator.scheduler import Group, Scheduler


class Batcher:
    """Fills one batch at a time from the scheduler's groups."""

    def __init__(self, config: RunConfig, scheduler: Scheduler) -> None:
        self._config = config
        self._scheduler = scheduler
        self._advantage = ESTIMATORS[config.orchestrator.advantage.type]

    async def fill(self, step: int) -> tuple[list[Rollout], list[Dropped]]:
        """Exactly `batch_size` rollouts with their advantages, and the fates of all that were dropped on the way."""
        groups: list[Group] = []
        dropped: list[Dropped] = []
        while len(groups) < self._config.num_groups:
            group = await self._scheduler.next_group()
            self._judge(group, step)
            dropped += group.dropped
            if group.reason is None:
                groups.append(group)
                self._scheduler.accepted()
            else:
                self._scheduler.not_accepted(group.reason)
        groups.sort(key=lambda group: group.task.id)
        return [rollout for group in groups for rollout in self._with_advantages(group)], dropped

    def _judge(self, group: Group, step: int) -> None:
        """Drops a group that this batch may not have."""
        if group.reason is not None:
            return
        size = self._config.orchestrator.rollouts_per_example
        oldest = min(rollout.oldest_version for rollout in group.rollouts)
        if is_too_old(step, oldest, self._config.orchestrator.max_off_policy_steps):
            group.drop(f"stale: version {oldest} sampled a part of it", size)
        elif self._config.orchestrator.buffer.online_difficulty_filtering and _has_no_signal(group):
            group.drop("no signal: all rewards of the group are equal", size)

    def _with_advantages(self, group: Group) -> list[Rollout]:
        advantages = self._advantage(np.array([rollout.reward for rollout in group.rollouts]))
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            rollout.samples = [_with_advantage(sample, float(advantage)) for sample in rollout.samples]
        return group.rollouts


def _has_no_signal(group: Group) -> bool:
    rewards = [rollout.reward for rollout in group.rollouts]
    return max(rewards) - min(rewards) < 1e-9


def _with_advantage(sample: Tokens, advantage: float) -> Tokens:
    return Tokens(
        ids=sample.ids,
        loss_mask=sample.loss_mask,
        logprobs=sample.logprobs,
        advantages=(sample.loss_mask * advantage).astype("float32"),
        versions=sample.versions,
    )


def batch_metrics(step: int, rollouts: list[Rollout], dropped: list[Dropped]) -> dict[str, float]:
    """What the orchestrator says about a batch."""
    rewards = np.array([rollout.reward for rollout in rollouts])
    token_lags = np.concatenate([lags(step, sample.versions) for rollout in rollouts for sample in rollout.samples])
    completions = [sum(int(sample.loss_mask.sum()) for sample in rollout.samples) for rollout in rollouts]
    totals = [sum(sample.length for sample in rollout.samples) for rollout in rollouts]
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/group_std": float(np.mean([np.std(group) for group in _by(rollouts, "group").values()])),
        "lag/mean": float(token_lags.mean()),
        "lag/max": int(token_lags.max()),
        "tokens/completion_mean": float(np.mean(completions)),
        "tokens/completion_max": int(max(completions)),
        "tokens/total": int(sum(totals)),
        "truncated_frac": float(np.mean([rollout.truncated for rollout in rollouts])),
        "rollouts/dropped": len(dropped),
    }
    per_environment = _by(rollouts, "env")
    if len(per_environment) > 1:
        metrics |= {f"reward/{name}/mean": float(np.mean(values)) for name, values in per_environment.items()}
    reasons = Counter(drop.reason.split(":")[0].replace(" ", "_") for drop in dropped)
    metrics |= {f"rollouts/dropped/{reason}": count for reason, count in reasons.items()}
    return metrics | _environment_metrics(rollouts)


def _by(rollouts: list[Rollout], attribute: str) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        values.setdefault(getattr(rollout, attribute), []).append(rollout.reward)
    return values


def _environment_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            values.setdefault(f"env/{rollout.env}/{name}", []).append(value)
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}
