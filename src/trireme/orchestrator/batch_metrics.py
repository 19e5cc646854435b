"""Metrics of a batch, see `docs/metrics.md`. Computed from its journal entry, so that an audit can recompute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from trireme.algo.advantage import are_same
from trireme.algo.packing import num_distinct
from trireme.algo.pictures import distinct_ids
from trireme.algo.staleness import lags
from trireme.config.run import RunConfig
from trireme.journal.records import Dropped, Outcome, Rollout, State
from trireme.journal.targets import agent_runs, by_group, is_zero, num_sampled, num_tokens, rewards_by_agent
from trireme.messages import Tokens
from trireme.monitor.metrics import means

Metrics = dict[str, float]

FLAWS = ("truncated", "repetition", "gibberish", "zero_advantage")
FAILED = frozenset({"rollout", "score", "timeout", "worker"})
"""Reasons, up to their colon, of rollouts that failed: the stages of `RolloutFailed`."""

NO_SIGNAL = frozenset({"no_signal", "little_signal", "little_advantage"})
"""Reasons of groups that came to their end and were dropped because their rewards are the same, or nearly, or their
advantages in the range that is rejected."""


def batch_metrics(
    step: int,
    rollouts: list[Rollout],
    dropped: list[Dropped],
    *,
    config: RunConfig,
    outcomes: Sequence[Outcome] = (),
) -> Metrics:
    """Compute metrics of the whole batch, and of each environment.

    Args:
        outcomes: of the groups that ended since the batch before, dropped ones too: with them `solve_none` and
            `solve_all` are about all of those; without them, about the groups of the batch.
    """
    parts = metrics_in_parts(step, rollouts, dropped, config=config, outcomes=outcomes)
    return {name: value for part in parts for name, value in part.items()}


def metrics_in_parts(
    step: int,
    rollouts: list[Rollout],
    dropped: list[Dropped],
    *,
    config: RunConfig,
    outcomes: Sequence[Outcome] = (),
) -> Iterator[Metrics]:
    """Yield the same a few at a time: each part of thousands of rollouts takes milliseconds."""
    rewards = np.array([rollout.reward for rollout in rollouts])
    of_runs = [run.reward for rollout in rollouts for run in agent_runs(rollout)]
    yield {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(np.std(of_runs)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/group_std": _group_std(rollouts),
    }

    # over sampled tokens
    ages = lags(step, np.concatenate([sample.versions for rollout in rollouts for sample in rollout.samples]))
    completions = [num_sampled(rollout.samples) for rollout in rollouts]
    yield {
        "lag/mean": float(ages.mean()),
        "lag/max": int(ages.max()),
        "lag/beyond_frac": float((ages > config.max_async_level).mean()),
        **_cache_ages([sample for rollout in rollouts for sample in rollout.samples]),
        "tokens/completion_mean": float(np.mean(completions)),
        "tokens/completion_max": int(max(completions)),
        "tokens/total": num_tokens(rollouts),
        "truncated_frac": _truncated_frac(rollouts),
        **_turns("turns/mean", rollouts),
    }

    # rollouts that ended since the batch before: trained in this one, or dropped, by reason
    trained = [rollout for rollout in rollouts if rollout.masked is None]
    yield {
        "rollouts/trained": len(trained),
        "rollouts/with_signal": sum(not is_zero([each.advantages for each in r.samples]) for r in trained),
        "rollouts/dropped": len(dropped),
        "rollouts/error_rate": _error_rate(rollouts, dropped),
    }

    # Groups that were dropped for lack of signal count too. Without them the share would hide what a filter does.
    num_groups = len({rollout.group for rollout in rollouts})
    num_without_signal = len({drop.group for drop in dropped if _reason(drop) in NO_SIGNAL})
    groups = by_group(rollouts).values()
    with_signal = [group for group in groups if not all(map(are_same, rewards_by_agent(group).values()))]
    reasons = Counter(map(_reason, dropped))
    flaws = Counter(flaw for rollout in rollouts for flaw in set(rollout.flaws))
    yield {
        "groups/signal_frac": len(with_signal) / (num_groups + num_without_signal),
        **{f"rollouts/dropped/{reason}": count for reason, count in reasons.items()},
        "rollouts/rewritten": sum(rollout.rewritten != 0 for rollout in rollouts),
        # shares of the batch's rollouts
        **{f"filters/{flaw}_frac": flaws[flaw] / len(rollouts) for flaw in (*FLAWS, *sorted(flaws))},
        "filters/masked_frac": float(np.mean([rollout.masked is not None for rollout in rollouts])),
    }

    # The samples of a group begin alike. Groups are compared one by one, as long samples take milliseconds.
    computed: dict[str, list[tuple[int, int]]] = {}
    for group in groups:
        computed.setdefault(group[0].env, []).append(computed_tokens(group))
        yield {}
    yield _computed_frac("perf/tokens_computed_frac", [each for counts in computed.values() for each in counts])

    # Environments whose rollouts were all dropped have an error rate too, and nothing else.
    for name in sorted({rollout.env for rollout in rollouts} | {drop.env for drop in dropped}):
        own = [rollout for rollout in rollouts if rollout.env == name]
        lengths = [length for rollout, length in zip(rollouts, completions, strict=True) if rollout.env == name]
        yield {f"env/{name}/error_rate": _error_rate(own, [drop for drop in dropped if drop.env == name])}
        if own:
            sampled = lags(step, np.concatenate([sample.versions for rollout in own for sample in rollout.samples]))
            yield {
                f"env/{name}/rollouts": len(own),
                f"env/{name}/lag_mean": float(sampled.mean()),
                f"env/{name}/masked_frac": float(np.mean([rollout.masked is not None for rollout in own])),
            }
            yield _computed_frac(f"env/{name}/tokens_computed_frac", computed.get(name, []))
            yield _environment(name, own, lengths, [outcome for outcome in outcomes if outcome.env == name])


def _environment(name: str, rollouts: list[Rollout], lengths: list[int], outcomes: Sequence[Outcome]) -> Metrics:
    """Compute one environment's metrics. Its own come last, so they replace ours of the same name.

    Args:
        lengths: sampled tokens of each rollout.
    """
    rewards = np.array([rollout.reward for rollout in rollouts])
    solve_none, solve_all = _solved_fracs(rollouts, outcomes)
    return {
        f"reward/{name}/mean": float(rewards.mean()),
        f"reward/{name}/std": float(rewards.std()),
        f"env/{name}/group_std": _group_std(rollouts),
        f"env/{name}/solve_none": solve_none,
        f"env/{name}/solve_all": solve_all,
        f"env/{name}/tokens_mean": float(np.mean(lengths)),
        f"env/{name}/truncated_frac": _truncated_frac(rollouts),
        **_turns(f"env/{name}/turns_mean", rollouts),
        **{f"env/{name}/{measure}": mean for measure, mean in means(r.metrics for r in rollouts).items()},
    }


def _solved_fracs(rollouts: list[Rollout], outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Shares of groups with no reward above 0, and with none below 1; of those dropped, only their means are known."""
    rewards_of = _group_rewards(rollouts)
    groups = [rewards_of.get(outcome.group, [outcome.mean]) for outcome in outcomes] or list(rewards_of.values())
    none = np.mean([max(rewards) <= 0 for rewards in groups])
    every = np.mean([min(rewards) >= 1 for rewards in groups])
    return float(none), float(every)


def computed_tokens(group: list[Rollout]) -> tuple[int, int]:
    """Return the tokens that engines computed for a group, and those of its samples: those that stand behind the same
    beginning once. Without the rollouts of engines that do not count."""
    counted = [rollout for rollout in group if rollout.num_computed is not None]
    samples = [each for rollout in counted for each in rollout.samples]
    has_pictures = any(each.pictures for each in samples)
    ids = [distinct_ids(each.ids, each.pictures) if has_pictures else each.ids for each in samples]
    return sum(rollout.num_computed or 0 for rollout in counted), num_distinct(ids)


def _computed_frac(name: str, counts: list[tuple[int, int]]) -> Metrics:
    """Return the tokens that engines computed per token that exists; nothing if no engine counts them."""
    existing = sum(each for _, each in counts)
    return {name: sum(each for each, _ in counts) / existing} if existing else {}


def _cache_ages(samples: list[Tokens]) -> Metrics:
    """Return by how many versions the oldest thing that a token attended to is older than the token; nothing if no
    caches were kept."""
    if all(sample.oldest is None for sample in samples):
        return {}
    ages = np.concatenate([(sample.versions - sample.attended)[sample.versions >= 0] for sample in samples])
    return {"cache_age/mean": float(ages.mean()), "cache_age/max": int(ages.max())} if len(ages) else {}


def _turns(name: str, rollouts: list[Rollout]) -> Metrics:
    """Return the mean number of turns; nothing if they were not counted."""
    counts = [rollout.num_turns for rollout in rollouts if rollout.num_turns]
    return {name: float(np.mean(counts))} if counts else {}


def _group_std(rollouts: list[Rollout]) -> float:
    return float(np.mean([np.std(rewards) for rewards in _group_rewards(rollouts).values()]))


def _group_rewards(rollouts: list[Rollout]) -> dict[int, list[float]]:
    return {group: [rollout.reward for rollout in members] for group, members in by_group(rollouts).items()}


def _error_rate(rollouts: list[Rollout], dropped: list[Dropped]) -> float:
    """Return the share of failed attempts among all that ended, in the batch or dropped."""
    return sum(_reason(drop) in FAILED for drop in dropped) / max(1, len(rollouts) + len(dropped))


def _reason(drop: Dropped) -> str:
    """Example: "no signal: all rewards of the group are equal" -> "no_signal"."""
    return drop.reason.split(":")[0].replace(" ", "_")


def _truncated_frac(rollouts: list[Rollout]) -> float:
    return float(np.mean([rollout.truncated for rollout in rollouts]))


def state_metrics(state: State, *, config: RunConfig) -> Metrics:
    """Compute the position in the data after a batch: passes over the examples, difficulty, curriculum."""
    metrics: Metrics = {f"data/{name}/epoch": cursor.epoch for name, cursor in state.cursors.items()}
    if config.orchestrator.curriculum:
        metrics["curriculum/stage"] = state.stage
        if state.stage_reward is not None:
            metrics["curriculum/reward"] = state.stage_reward

    for name, scores in state.scores.items():
        if (pools := config.orchestrator.of(name).buffer.pools) is None:
            continue
        easy = int((scores.means >= pools.easy_threshold).sum())
        hard = int((scores.means <= pools.hard_threshold).sum())
        metrics |= {
            f"data/{name}/easy": easy,
            f"data/{name}/normal": len(scores.means) - easy - hard,
            f"data/{name}/hard": hard,
        }
    return metrics
