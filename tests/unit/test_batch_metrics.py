"""The metrics of a batch, worked out by hand from a small one."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from trireme.config.run import RunConfig
from trireme.ledger.records import Cursor, Dropped, Outcome, Rollout, Scores, State
from trireme.messages import Tokens, build_tokens
from trireme.orchestrator.batch_metrics import batch_metrics, state_metrics
from trireme.orchestrator.environment_counts import EnvironmentCounts

STEP = 5


def sample(versions: list[int], *, advantage: float = 1.0) -> Tokens:
    """Two tokens of a prompt, then one per version."""
    count = len(versions)
    return build_tokens(
        ids=[7] * (2 + count),
        loss_mask=[0, 0] + [1] * count,
        logprobs=[0.0] * (2 + count),
        advantages=[0.0, 0.0] + [advantage] * count,
        versions=[-1, -1, *versions],
    )


def rollout(group: int, reward: float, versions: list[int], **fields) -> Rollout:
    given = {"env": "a", "place": 0, "attempt": 0, "example": group, "temperature": 1.0}
    return Rollout(group=group, reward=reward, samples=[sample(versions)], **given | fields)


def drop(group: int, reason: str, env: str = "a") -> Dropped:
    return Dropped(group=group, place=0, attempt=0, env=env, example=group, reason=reason)


ROLLOUTS = [
    rollout(1, 1.0, [5, 5], num_turns=1, metrics={"format": 1.0}),
    rollout(
        1, 0.0, [5, 4], num_turns=3, metrics={"format": 0.0}, truncated=True, flaws=["truncated"], masked="truncated"
    ),
    rollout(2, 1.0, [3], env="b"),
    rollout(2, 1.0, [3, 3, 2], env="b", flaws=["zero_advantage"], metrics={"format": 0.25}),
]
DROPPED = [
    drop(3, "no signal: all rewards of the group are equal"),
    drop(3, "no signal: all rewards of the group are equal"),
    drop(4, "score: ValueError: no number"),
    drop(5, "timeout: not finished after 600 s", env="c"),
]


def test_the_metrics_of_a_batch_by_hand() -> None:
    found = batch_metrics(STEP, ROLLOUTS, DROPPED, config=RunConfig.model_validate({"max_async_level": 1}))
    assert found == pytest.approx(
        {
            "reward/mean": 0.75,
            "reward/std": np.sqrt(3) / 4,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/group_std": 0.25,  # 0.5 and 0
            "lag/mean": np.mean([0, 0, 0, 1, 2, 2, 2, 3]),
            "lag/max": 3,
            "lag/beyond_frac": 4 / 8,  # older than one step, which generation runs ahead
            "tokens/completion_mean": 2.0,
            "tokens/completion_max": 3,
            "tokens/total": 4 * 2 + 8,
            "truncated_frac": 0.25,
            "turns/mean": 2.0,
            "rollouts/trained": 3,
            "rollouts/with_signal": 3,
            "rollouts/dropped": 4,
            "rollouts/dropped/no_signal": 2,
            "rollouts/dropped/score": 1,
            "rollouts/dropped/timeout": 1,
            "rollouts/error_rate": 2 / 8,
            "groups/signal_frac": 1 / 3,  # of groups 1, 2 and 3
            "filters/truncated_frac": 0.25,
            "filters/repetition_frac": 0,
            "filters/gibberish_frac": 0,
            "filters/zero_advantage_frac": 0.25,
            "filters/masked_frac": 0.25,
            "reward/a/mean": 0.5,
            "reward/a/std": 0.5,
            "env/a/group_std": 0.5,
            "env/a/error_rate": 1 / 5,
            "env/a/solve_none": 0,
            "env/a/solve_all": 0,
            "env/a/tokens_mean": 2.0,
            "env/a/truncated_frac": 0.5,
            "env/a/turns_mean": 2.0,
            "env/a/format": 0.5,
            "reward/b/mean": 1.0,
            "reward/b/std": 0.0,
            "env/b/group_std": 0.0,
            "env/b/error_rate": 0,
            "env/b/solve_none": 0,
            "env/b/solve_all": 1,
            "env/b/tokens_mean": 2.0,
            "env/b/truncated_frac": 0,
            "env/b/format": 0.25,  # and no turns, which were not counted
            "env/c/error_rate": 1,  # though no rollout of it is in the batch
        }
    )


def test_groups_solved_or_hopeless_are_counted_where_they_were_dropped_too() -> None:
    """Those of the batch by their rewards: the mean of -1 and 1 is 0, and of 0.5 and 1.5 it is 1."""
    rollouts = [*ROLLOUTS, rollout(8, -1.0, [3]), rollout(8, 1.0, [3]), rollout(9, 0.5, [3]), rollout(9, 1.5, [3])]
    means = {1: 0.5, 3: 0.0, 6: 0.0, 7: 1.0, 8: 0.0, 9: 1.0}
    outcomes = [Outcome(group, "a", group, mean) for group, mean in means.items()]
    found = batch_metrics(STEP, rollouts, DROPPED, config=RunConfig(), outcomes=outcomes)
    assert (found["env/a/solve_none"], found["env/a/solve_all"]) == (2 / 6, 1 / 6)
    assert found["env/b/solve_all"] == 1  # it has no outcomes: the batch's groups count


def test_no_advantage_is_no_signal_and_an_environments_own_number_wins() -> None:
    still = rollout(1, 0.5, [5], metrics={"tokens_mean": 99.0})
    still.samples = [sample([5], advantage=1e-17)]
    metrics = batch_metrics(STEP, [still, rollout(1, 0.5, [5])], [], config=RunConfig())
    assert (metrics["rollouts/trained"], metrics["rollouts/with_signal"]) == (2, 1)
    assert metrics["groups/signal_frac"] == 0
    assert metrics["env/a/tokens_mean"] == 99.0


def test_epochs_difficulty_and_curriculum_by_hand() -> None:
    state = State(
        cursors={"a": Cursor(epoch=2, position=5)},
        scores={"a": Scores(np.arange(5, dtype=np.int32), np.array([0.0, 0.05, 0.5, 0.9, 1.0]))},
        stage=1,
        stage_reward=0.5,
    )
    plain = state_metrics(state, config=RunConfig())
    assert plain == {"data/a/epoch": 2}
    sections = {"buffer": {"pools": {}}, "curriculum": [{"weights": {"a": 1.0}}]}
    told = state_metrics(state, config=RunConfig.model_validate({"orchestrator": sections}))
    assert told == plain | {
        "curriculum/stage": 1,
        "curriculum/reward": 0.5,
        "data/a/easy": 2,
        "data/a/normal": 1,
        "data/a/hard": 2,
    }


def test_failures_of_an_environment_are_counted_once() -> None:
    environment = SimpleNamespace(counts=Counter(timeout=2), num_rollouts=9)
    counts = EnvironmentCounts({"a": environment})
    assert counts.take() == {"env/a/timeout": 2}
    assert counts.take() == {}
    environment.counts += Counter(timeout=1, worker_death=1)
    assert counts.take() == {"env/a/timeout": 1, "env/a/worker_death": 1}


def test_error_rates_are_reported_while_no_batch_becomes_full() -> None:
    environment = SimpleNamespace(counts=Counter(timeout=20), num_rollouts=100)
    counts = EnvironmentCounts({"a": environment})
    counts.take()
    environment.num_rollouts += 63
    environment.counts += Counter(score_error=32, worker_death=7)  # a worker's death is no rollout's
    assert counts.lately() == {}  # too few to say
    environment.num_rollouts += 1
    assert counts.lately() == {"env/a/error_rate": 0.5, "rollouts/error_rate": 0.5}
    counts.take()
    assert counts.lately() == {}
