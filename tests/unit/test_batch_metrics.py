"""What the orchestrator says about a batch, worked out by hand from a small one."""

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


@pytest.fixture(scope="module")
def metrics() -> dict[str, float]:
    config = RunConfig.model_validate({"max_async_level": 1})
    return batch_metrics(STEP, ROLLOUTS, DROPPED, config=config)


def test_rewards_and_lengths_of_the_batch_and_of_each_environment(metrics):
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == pytest.approx(np.sqrt(3) / 4)
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["reward/group_std"] == 0.25  # 0.5 and 0
    assert (metrics["reward/a/mean"], metrics["reward/a/std"], metrics["env/a/group_std"]) == (0.5, 0.5, 0.5)
    assert (metrics["reward/b/mean"], metrics["reward/b/std"]) == (1.0, 0.0)
    assert (metrics["tokens/completion_mean"], metrics["tokens/completion_max"]) == (2.0, 3)
    assert metrics["tokens/total"] == 4 * 2 + 8
    assert (metrics["env/a/tokens_mean"], metrics["env/b/tokens_mean"]) == (2.0, 2.0)
    assert (metrics["turns/mean"], metrics["env/a/turns_mean"]) == (2.0, 2.0)
    assert "env/b/turns_mean" not in metrics  # nobody counted them
    assert (metrics["env/a/format"], metrics["env/b/format"]) == (0.5, 0.25)
    assert (metrics["truncated_frac"], metrics["env/a/truncated_frac"], metrics["env/b/truncated_frac"]) == (
        0.25,
        0.5,
        0,
    )


def test_three_figures_of_staleness(metrics):
    ages = [0, 0, 0, 1, 2, 2, 2, 3]
    assert metrics["lag/mean"] == pytest.approx(np.mean(ages))
    assert metrics["lag/max"] == 3
    assert metrics["lag/beyond_frac"] == 4 / 8  # older than one step, which generation runs ahead


def test_what_became_of_rollouts_and_how_many_are_trained_on(metrics):
    assert metrics["rollouts/trained"] == 3
    assert metrics["rollouts/with_signal"] == 3
    assert metrics["rollouts/dropped"] == 4
    assert {name: value for name, value in metrics.items() if name.startswith("rollouts/dropped/")} == {
        "rollouts/dropped/no_signal": 2,
        "rollouts/dropped/score": 1,
        "rollouts/dropped/timeout": 1,
    }
    assert metrics["rollouts/error_rate"] == 2 / 8
    assert metrics["env/a/error_rate"] == 1 / 5
    assert metrics["env/b/error_rate"] == 0
    assert metrics["env/c/error_rate"] == 1  # though nothing of it is in the batch
    assert metrics["groups/signal_frac"] == pytest.approx(1 / 3)  # of groups 1, 2 and 3


def test_flaws_by_kind(metrics):
    shares = {name: value for name, value in metrics.items() if name.startswith("filters/")}
    assert shares == {
        "filters/truncated_frac": 0.25,
        "filters/repetition_frac": 0,
        "filters/gibberish_frac": 0,
        "filters/zero_advantage_frac": 0.25,
        "filters/masked_frac": 0.25,
    }


def test_groups_that_are_all_solved_or_not_at_all_are_counted_where_they_were_dropped_too(metrics):
    assert (metrics["env/a/solve_none"], metrics["env/a/solve_all"]) == (0, 0)
    assert (metrics["env/b/solve_none"], metrics["env/b/solve_all"]) == (0, 1)
    outcomes = [Outcome(group, "a", group, mean) for group, mean in ((1, 0.5), (3, 0.0), (6, 0.0), (7, 1.0))]
    config = RunConfig()
    told = batch_metrics(STEP, ROLLOUTS, DROPPED, config=config, outcomes=outcomes)
    assert (told["env/a/solve_none"], told["env/a/solve_all"]) == (0.5, 0.25)
    assert told["env/b/solve_all"] == 1  # nothing was told of it


def test_a_rollout_without_an_advantage_gives_no_signal():
    still = rollout(1, 0.5, [5])
    still.samples = [sample([5], advantage=0.0)]
    metrics = batch_metrics(STEP, [still, rollout(1, 0.5, [5])], [], config=RunConfig())
    assert (metrics["rollouts/trained"], metrics["rollouts/with_signal"]) == (2, 1)


def test_a_number_of_the_environments_own_goes_before_ours_of_the_same_name():
    metrics = batch_metrics(STEP, [rollout(1, 0.5, [5], metrics={"tokens_mean": 99.0})], [], config=RunConfig())
    assert metrics["env/a/tokens_mean"] == 99.0


def test_where_the_data_stands():
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


def test_what_went_wrong_in_an_environment_is_told_once():
    environment = SimpleNamespace(counts=Counter(timeout=2), num_rollouts=9)
    counts = EnvironmentCounts({"a": environment})
    assert counts.take() == {"env/a/timeout": 2}
    assert counts.take() == {}
    environment.counts += Counter(timeout=1, worker_death=1)
    assert counts.take() == {"env/a/timeout": 1, "env/a/worker_death": 1}


def test_rollouts_that_all_fail_are_told_of_though_no_batch_becomes_full():
    environment = SimpleNamespace(counts=Counter(timeout=20), num_rollouts=100)
    counts = EnvironmentCounts({"a": environment})
    counts.take()
    environment.num_rollouts += 40
    environment.counts["score_error"] += 40
    assert counts.lately() == {}  # too few to say
    environment.num_rollouts += 40
    environment.counts["worker_death"] += 7  # of workers, not of rollouts
    assert counts.lately() == {"env/a/error_rate": 0.5, "rollouts/error_rate": 0.5}
    counts.take()
    assert counts.lately() == {}
