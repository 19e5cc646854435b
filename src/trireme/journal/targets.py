"""Training targets of a batch: from rewards to one advantage per token; and the flaws of a rollout.

Pure functions of what the journal holds: the orchestrator builds batches with them, and the audit recomputes them. The
order is: clip rewards (`reward_clip`), apply the length penalty, estimate advantages over the batch, add step rewards
and the teacher's signal per token, clip the sum (`clip`). The mathematics is in `algo/advantage.py`,
`algo/length_penalty.py` and `algo/filters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from trireme.algo.advantage import (
    SAME,
    Baselines,
    Estimator,
    GroupScores,
    check_custom,
    distillation_term,
    estimate,
    process_advantages,
)
from trireme.algo.data.difficulty import Outcome
from trireme.algo.filters import Turn, find_flaws, has_signal, runs_of, shortest_judged
from trireme.algo.length_penalty import with_length_penalty
from trireme.algo.rules import Rules
from trireme.base.errors import ConfigError
from trireme.base.functions import load_function
from trireme.config.orchestrator import Filters
from trireme.journal.records import Rollout
from trireme.messages import Tokens


def advantages_of(
    rollouts: Sequence[Rollout], rules: Rules, baselines: Baselines, *, custom: Estimator | None = None
) -> tuple[list[list[np.ndarray]], Baselines]:
    """Return advantages per rollout and sample, [T] float32 with 0 for untrained tokens; and the baselines after the
    batch.

    Args:
        rollouts: of the whole batch.
        custom: the user's estimator, where the rules ask for one.
    """
    groups = list(by_group(rollouts).values())
    outcomes, after = estimates_of([scores_of(group, rules) for group in groups], rules, baselines, custom=custom)
    found = {
        id(rollout): advantages
        for group, estimated in zip(groups, outcomes, strict=True)
        for rollout, advantages in zip(group, per_token(group, estimated, rules), strict=True)
    }
    return [found[id(rollout)] for rollout in rollouts], after


def estimates_of(
    scored: list[GroupScores], rules: Rules, baselines: Baselines, *, custom: Estimator | None = None
) -> tuple[list[np.ndarray], Baselines]:
    """Return one advantage per rollout of each group, and the baselines after the batch."""
    return estimate(rules.advantage, scored, baselines, decay=rules.decay, custom=custom)


def estimator_of(rules: Rules) -> Estimator | None:
    """Import the user's estimator, where the rules ask for one. Raises ConfigError where it cannot be imported."""
    if rules.advantage != "custom":
        return None
    function = load_function(rules.advantage_path or "", key="orchestrator.advantage.path")

    def ask(groups: list[GroupScores]) -> Any:
        try:
            return check_custom(function(groups, **rules.advantage_args), groups)
        except Exception as error:  # whatever the user's code raises
            raise ConfigError(
                f'orchestrator.advantage.path = "{rules.advantage_path}": the function failed on {len(groups)} groups: '
                f"{type(error).__name__}: {error} - expected a list of one array per group, one finite number per "
                "rollout. Mend it, and go on with --resume."
            ) from error

    return ask


def by_group(rollouts: Sequence[Rollout]) -> dict[int, list[Rollout]]:
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return groups


def scores_of(group: list[Rollout], rules: Rules) -> GroupScores:
    """Return a group in the form that estimators take."""
    rewards = np.array([rollout.reward for rollout in group], dtype=np.float64)
    lengths = np.array([num_sampled(rollout) for rollout in group])
    if rules.reward_clip is not None:
        rewards = np.clip(rewards, *rules.reward_clip)
    rewards = with_length_penalty(rewards, lengths, rules.length_penalty)
    return GroupScores(group[0].env, group[0].example, rewards, lengths)


def num_sampled(rollout: Rollout) -> int:
    """Return the number of tokens that are trained on."""
    return sum(int(np.count_nonzero(sample.loss_mask)) for sample in rollout.samples)


def per_token(group: list[Rollout], advantages_G: np.ndarray, rules: Rules) -> Iterator[list[np.ndarray]]:
    """Spread advantages over the tokens of each rollout's samples."""
    if not any(rollout.token_rewards or rollout.teacher for rollout in group):
        yield from _same_for_all_tokens(group, advantages_G, rules)
        return
    steps = process_advantages([_joined(rollout, rollout.token_rewards) for rollout in group])
    for rollout, advantage, worth in zip(group, advantages_G, steps, strict=True):
        values = rules.reward_weight * (advantage + worth)
        if rules.teacher_weight is not None and rollout.teacher:
            logprobs = _joined(rollout, [sample.logprobs for sample in rollout.samples])
            values = values + distillation_term(_joined(rollout, rollout.teacher), logprobs, rules.teacher_weight)
        if rules.clip is not None:
            values = np.clip(values, -rules.clip, rules.clip)
        yield [
            np.where(sample.loss_mask == 1, part, 0.0).astype(np.float32)
            for sample, part in zip(rollout.samples, _split(rollout, values), strict=True)
        ]


def _same_for_all_tokens(group: list[Rollout], advantages_G: np.ndarray, rules: Rules) -> Iterator[list[np.ndarray]]:
    """Spread advantages where nothing is given per token: one number per rollout."""
    values = rules.reward_weight * (advantages_G + 0.0)
    if rules.clip is not None:
        values = np.clip(values, -rules.clip, rules.clip)
    for rollout, value in zip(group, values, strict=True):
        yield [np.where(sample.loss_mask == 1, value, 0.0).astype(np.float32) for sample in rollout.samples]


def _joined(rollout: Rollout, columns: list[np.ndarray]) -> np.ndarray:
    """Return [T] float64 over all samples in order; all NaN where there is none."""
    if not columns or not rollout.samples:
        return np.full(sum(sample.length for sample in rollout.samples), np.nan)
    return np.concatenate(columns).astype(np.float64)


def _split(rollout: Rollout, values_T: np.ndarray) -> list[np.ndarray]:
    if not rollout.samples:
        return []
    return np.split(values_T, np.cumsum([sample.length for sample in rollout.samples])[:-1])


def with_advantages(sample: Tokens, advantages_T: np.ndarray) -> Tokens:
    return msgspec.structs.replace(sample, advantages=advantages_T)


def is_zero(advantages: list[np.ndarray]) -> bool:
    """Return whether all advantages of a rollout are zero."""
    return all((np.abs(part) < SAME).all() for part in advantages)


def flaws_of(rollout: Rollout, rules: Rules) -> list[str]:
    """Return the flaws of a rollout that can be determined before its batch is full."""
    filters = filters_of(rules)
    return find_flaws(rollout.truncated, _turns(rollout, at_least=shortest_judged(filters)), filters)


def filters_of(rules: Rules) -> Filters:
    return rules.filters or Filters()


def _turns(rollout: Rollout, *, at_least: int) -> Iterator[Turn]:
    """Return the turns of the samples that are long enough for a number of tokens."""
    for sample in rollout.samples:
        for run in runs_of(sample.loss_mask) if sample.length >= at_least else ():
            yield sample.ids[run], sample.logprobs[run]


def outcome_of(group: list[Rollout]) -> Outcome:
    """Return the outcome of a group by its raw rewards, neither clipped nor penalised."""
    mean = float(np.mean([rollout.reward for rollout in group]))
    return Outcome(group=group[0].group, env=group[0].env, example=group[0].example, mean=mean)


def why_not_worth_it(group: list[Rollout], rules: Rules) -> str | None:
    """Return why a complete, fresh group is left out of batches; None where it is used."""
    rewards = np.array([rollout.reward for rollout in group], dtype=np.float64)
    steps = np.concatenate([_joined(rollout, rollout.token_rewards) for rollout in group])
    if rules.needs_signal and not has_signal(rewards, steps[~np.isnan(steps)]):
        return "no signal: all rewards of the group are equal"
    if rules.least_variance > 0 and rewards.var() < rules.least_variance:
        return f"little signal: the rewards of the group vary by {rewards.var():.3g}"
    return None
