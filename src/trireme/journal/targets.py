"""Training targets of a batch: from rewards to one advantage per token; and the flaws of a rollout.

Pure functions of what the journal holds: the orchestrator builds batches with them, and the audit recomputes them. The
order is: clip rewards (`reward_clip`), apply the length penalty, estimate advantages over the batch, add step rewards
and the teacher's signal per token, clip the sum (`clip`). The mathematics is in `algo/advantage.py`,
`algo/length_penalty.py` and `algo/filters.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
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
from trireme.algo.filters import find_flaws, has_signal, runs_of, shortest_judged
from trireme.algo.length_penalty import with_length_penalty
from trireme.algo.rules import Rules
from trireme.base.errors import ConfigError
from trireme.base.functions import load_function
from trireme.config.orchestrator import Filters
from trireme.journal.records import AgentRun, Rollout
from trireme.messages import Tokens


def advantages_of(
    rollouts: Sequence[Rollout], rules: Rules, baselines: Baselines, *, custom: Customs | None = None
) -> tuple[list[list[np.ndarray]], Baselines]:
    """Return advantages per rollout and sample, [T] float32 with 0 for untrained tokens; and the baselines after the
    batch.

    Args:
        rollouts: all rollouts of the batch.
        custom: the user's estimators, if the rules ask for any (`estimators_of`).
    """
    groups = list(by_group(rollouts).values())
    estimated, after = estimates_of([scores_of(group, rules) for group in groups], rules, baselines, custom=custom)

    # Estimates come by group, and callers expect the order of `rollouts`.
    found = {}
    for group, of_agent in zip(groups, estimated, strict=True):
        for rollout, advantages in zip(group, token_advantages(group, of_agent, rules), strict=True):
            found[id(rollout)] = advantages
    return [found[id(rollout)] for rollout in rollouts], after


def estimates_of(
    scored: list[list[GroupScores]], rules: Rules, baselines: Baselines, *, custom: Customs | None = None
) -> tuple[list[dict[str, np.ndarray]], Baselines]:
    """Return of each group the advantages of each agent's runs, and the baselines after the batch.

    Sources with the same estimator are seen by it together, as one batch; those with another one apart from them.

    Args:
        scored: the `scores_of` each group of the batch.
    """
    flat = [scores for of_group in scored for scores in of_group]
    places: dict[Any, list[int]] = {}
    for place, scores in enumerate(flat):
        places.setdefault(rules.of(scores.env).estimator, []).append(place)

    estimated: dict[int, np.ndarray] = {}
    for key, own_places in places.items():
        own, groups = rules.of(flat[own_places[0]].env), [flat[place] for place in own_places]
        found, baselines = estimate(
            own.advantage,
            groups,
            baselines,
            decay=own.decay,
            custom=(custom or {}).get(key),
            episode_agents=own.episode_agents,
        )
        estimated |= dict(zip(own_places, found, strict=True))

    # The estimators get all agents of all groups in one list; hand their results back in the same order.
    left = iter(estimated[place] for place in range(len(flat)))
    return [{scores.agent: next(left) for scores in of_group} for of_group in scored], baselines


def token_advantages(group: list[Rollout], of_agent: dict[str, np.ndarray], rules: Rules) -> Iterator[list[np.ndarray]]:
    """Return of each rollout of a group the advantages of its samples' tokens.

    Args:
        of_agent: advantages of each agent's runs, in the order of the rollouts.
    """
    left = {agent: iter(advantages) for agent, advantages in of_agent.items()}
    per_sample = []
    for rollout in group:
        per_sample.append(advantages_S := np.zeros(len(rollout.samples)))
        for run in agent_runs(rollout):  # its estimate is the next one of its agent
            advantages_S[run.samples] = next(left[run.agent])
    return per_token(group, per_sample, rules)


def agent_runs(rollout: Rollout) -> list[AgentRun]:
    """Return the parts of a rollout that have a reward: its agents' runs, or the whole of it."""
    return rollout.runs or [AgentRun(agent="", reward=rollout.reward, samples=list(range(len(rollout.samples))))]


def rewards_by_agent(group: list[Rollout]) -> dict[str, np.ndarray]:
    """Return [number of runs] rewards per agent, in the order of the rollouts."""
    found: dict[str, list[float]] = {}
    for rollout in group:
        for run in agent_runs(rollout):
            found.setdefault(run.agent, []).append(run.reward)
    return {agent: np.array(rewards, dtype=np.float64) for agent, rewards in sorted(found.items())}


Customs = dict[Any, Estimator]
"""The user's estimators, by `Rules.estimator`."""


def estimators_of(rules: Rules) -> Customs:
    """Import the estimators of the user that the rules ask for. Raises ConfigError if one cannot be imported."""
    return {each.estimator: _estimator_of(each) for each in rules.all if each.advantage == "custom"}


def _estimator_of(rules: Rules) -> Estimator:
    function = load_function(rules.advantage_path or "", key="orchestrator.advantage.path")

    def ask(groups: list[GroupScores]) -> Any:
        try:
            return check_custom(function(groups, **rules.advantage_args), groups)
        except Exception as error:  # the user's code can raise anything
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


def scores_of(group: list[Rollout], rules: Rules) -> list[GroupScores]:
    """Return a group in the form that estimators take: one for each agent that has rewards of its own."""
    scores, rules = [], rules.of(group[0].env)
    for agent, rewards in rewards_by_agent(group).items():
        runs = [(number, rollout, run) for number, rollout in enumerate(group) for run in agent_runs(rollout)]
        runs = [each for each in runs if each[2].agent == agent]
        samples = [[rollout.samples[place] for place in run.samples] for _, rollout, run in runs]
        lengths, episodes = np.array([num_sampled(each) for each in samples]), np.array([each[0] for each in runs])

        # Clip before the length penalty, so that the penalty is not clipped away.
        if rules.reward_clip is not None:
            rewards = np.clip(rewards, *rules.reward_clip)
        sizes: dict[str, np.ndarray] = {}
        if rules.length_penalty is not None and rules.length_penalty.type == "group_linear":
            sizes["inputs_G"] = np.array([sum(sample.length for sample in each) for each in samples]) - lengths
            sizes["turns_G"] = np.array([sum(len([*runs_of(s.loss_mask)]) for s in each) for each in samples])
        rewards = with_length_penalty(rewards, lengths, rules.length_penalty, **sizes)
        scores.append(GroupScores(group[0].env, group[0].example, rewards, lengths, agent, episodes))
    return scores


def num_sampled(samples: list[Tokens]) -> int:
    """Return the number of tokens that are trained on."""
    return sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples)


def num_tokens(rollouts: Iterable[Rollout]) -> int:
    """Return the number of tokens in all samples, prompts included."""
    return sum(sample.length for rollout in rollouts for sample in rollout.samples)


def per_token(group: list[Rollout], advantages: list[np.ndarray], rules: Rules) -> Iterator[list[np.ndarray]]:
    """Spread advantages over the tokens of each rollout's samples.

    Args:
        advantages: [S] per rollout, one for each of its samples.
    """
    rules = rules.of(group[0].env)
    # Step rewards are normalised over the whole group, so all its rollouts are handed over together.
    steps: Sequence[np.ndarray | float] = [0.0] * len(group)
    if any(rollout.token_rewards for rollout in group):
        steps = process_advantages([_joined(rollout, rollout.token_rewards) for rollout in group])
    for rollout, advantages_S, worth in zip(group, advantages, steps, strict=True):
        lengths = [sample.length for sample in rollout.samples]
        values = rules.reward_weight * (np.repeat(advantages_S, lengths) + worth)

        # The teacher's signal is no reward: `reward_weight` does not scale it.
        if rules.teacher_weight is not None and rollout.teacher:
            logprobs = _joined(rollout, [sample.logprobs for sample in rollout.samples])
            values = values + distillation_term(_joined(rollout, rollout.teacher), logprobs, rules.teacher_weight)

        # Last: the limit holds for the sum of all signals of a token.
        if rules.clip is not None:
            values = np.clip(values, -rules.clip, rules.clip)

        yield [
            np.where(sample.by_policy_loss, values[end - sample.length : end], 0.0).astype(np.float32)
            for sample, end in zip(rollout.samples, accumulate(lengths), strict=True)
        ]


def _joined(rollout: Rollout, columns: list[np.ndarray]) -> np.ndarray:
    """Return [T] float64 over all samples in order; all NaN if there is none."""
    if not columns or not rollout.samples:
        return np.full(sum(sample.length for sample in rollout.samples), np.nan)
    return np.concatenate(columns).astype(np.float64)


def with_advantages(sample: Tokens, advantages_T: np.ndarray) -> Tokens:
    return msgspec.structs.replace(sample, advantages=advantages_T)


def is_zero(advantages: list[np.ndarray]) -> bool:
    """Return whether all advantages of a rollout are zero."""
    return all(np.abs(part).max(initial=0.0) < SAME for part in advantages)


def flaws_of(rollout: Rollout, rules: Rules) -> list[str]:
    """Return the flaws of a rollout that can be determined before its batch is full."""
    filters = filters_of(rules.of(rollout.env))
    judged = [sample for sample in rollout.samples if sample.length >= shortest_judged(filters)]
    turns = ((sample.ids[run], sample.logprobs[run]) for sample in judged for run in runs_of(sample.loss_mask))
    return find_flaws(rollout.truncated, turns, filters)


def filters_of(rules: Rules) -> Filters:
    return rules.filters or Filters()


def outcome_of(group: list[Rollout]) -> Outcome:
    """Return the outcome of a group by its raw rewards, neither clipped nor penalised."""
    mean = float(np.mean([rollout.reward for rollout in group]))
    return Outcome(group=group[0].group, env=group[0].env, example=group[0].example, mean=mean)


def why_not_worth_it(group: list[Rollout], rules: Rules) -> str | None:
    """Return why a complete, fresh group is left out of batches; None if it is used."""
    rewards, rules = list(rewards_by_agent(group).values()), rules.of(group[0].env)
    steps = np.concatenate([np.zeros(0), *(part for rollout in group for part in rollout.token_rewards)])
    if rules.needs_signal and not any(has_signal(each, steps[~np.isnan(steps)]) for each in rewards):
        return "no signal: all rewards of the group are equal"

    # The agent whose rewards vary most decides: one agent with a signal is worth training on.
    variance = max(each.var() for each in rewards)
    if rules.least_variance > 0 and variance < rules.least_variance:
        return f"little signal: the rewards of the group vary by {variance:.3g}"

    if rules.advantage_range is not None:
        # A teacher is asked about whole batches, so its signal is not there yet.
        alone = msgspec.structs.replace(rules, teacher_weight=None, reward_weight=1.0)
        found, _ = advantages_of(group, alone, {})
        trained = [
            advantages_T[sample.loss_mask == 1]
            for rollout, per_sample in zip(group, found, strict=True)
            for sample, advantages_T in zip(rollout.samples, per_sample, strict=True)
        ]
        low, high = rules.advantage_range  # numpy compares with its ends as float32, as advantages are
        if all(((low <= each) & (each <= high)).all() for each in trained):
            return f"little advantage: all advantages of the group are between {low:g} and {high:g}"
    return None
