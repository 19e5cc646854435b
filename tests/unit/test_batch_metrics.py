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
    mask, all_versions = np.array([0, 0] + [1] * len(versions)), [-1, -1, *versions]
    return build_tokens(ids=mask, loss_mask=mask, logprobs=0 * mask, advantages=advantage * mask, versions=all_versions)


def rollout(group: int, reward: float, versions: list[int], **fields) -> Rollout:
    given = {"env": "a", "place": 0, "attempt": 0, "example": group, "temperature": 1.0}
    return Rollout(group=group, reward=reward, samples=[sample(versions)], **given | fields)


def drop(group: int, reason: str, env: str = "a") -> Dropped:
    return Dropped(group=group, place=0, attempt=0, env=env, example=group, reason=reason)


def under(prefix: str, **numbers: float) -> dict[str, float]:
    return {f"{prefix}/{name}": number for name, number in numbers.items()}


CUT = {"truncated": True, "flaws": ["truncated"], "masked": "truncated"}
ROLLOUTS = [
    rollout(1, 1.0, [5, 5], num_turns=1, metrics={"format": 1.0}),
    rollout(1, 0.0, [5, 4], num_turns=3, metrics={"format": 0.0}, **CUT),
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
    lags = [0, 0, 0, 1, 2, 2, 2, 3]
    of_a = {"solve_none": 0, "solve_all": 0, "tokens_mean": 2.0, "truncated_frac": 0.5, "turns_mean": 2.0}
    of_b = {"solve_none": 0, "solve_all": 1, "tokens_mean": 2.0, "truncated_frac": 0}  # its turns were not counted
    assert found == pytest.approx(
        under("reward", mean=0.75, std=np.sqrt(3) / 4, min=0.0, max=1.0, group_std=0.25)  # of groups: 0.5 and 0
        | under("lag", mean=np.mean(lags), max=3, beyond_frac=4 / 8)  # beyond the step that generation runs ahead
        | under("tokens", completion_mean=2.0, completion_max=3, total=4 * 2 + 8)
        | {"truncated_frac": 0.25, "turns/mean": 2.0, "groups/signal_frac": 1 / 3}  # of groups 1, 2 and 3
        | under("rollouts", trained=3, with_signal=3, dropped=4, error_rate=2 / 8)
        | under("rollouts/dropped", no_signal=2, score=1, timeout=1)
        | under("filters", truncated_frac=0.25, repetition_frac=0, gibberish_frac=0, zero_advantage_frac=0.25)
        | {"filters/masked_frac": 0.25}
        | under("reward/a", mean=0.5, std=0.5)
        | under("env/a", group_std=0.5, error_rate=1 / 5, format=0.5, **of_a)
        | under("reward/b", mean=1.0, std=0.0)
        | under("env/b", group_std=0.0, error_rate=0, format=0.25, **of_b)
        | {"env/c/error_rate": 1}  # though no rollout of it is in the batch
    )


def test_groups_solved_or_hopeless_are_counted_where_they_were_dropped_too() -> None:
    outcomes = [Outcome(group, "a", group, mean) for group, mean in ((1, 0.5), (3, 0.0), (6, 0.0), (7, 1.0))]
    found = batch_metrics(STEP, ROLLOUTS, DROPPED, config=RunConfig(), outcomes=outcomes)
    assert (found["env/a/solve_none"], found["env/a/solve_all"]) == (0.5, 0.25)
    assert found["env/b/solve_all"] == 1  # it has no outcomes: the batch's groups count


def test_no_advantage_is_no_signal_and_an_environments_own_number_wins() -> None:
    still = rollout(1, 0.5, [5], metrics={"tokens_mean": 99.0})
    still.samples = [sample([5], advantage=0.0)]
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
    assert told == plain | under("curriculum", stage=1, reward=0.5) | under("data/a", easy=2, normal=1, hard=2)


def test_failures_of_an_environment_are_counted_once_and_told_while_no_batch_becomes_full() -> None:
    environment = SimpleNamespace(counts=Counter(timeout=20), num_rollouts=100)
    counts = EnvironmentCounts({"a": environment})
    assert counts.take() == {"env/a/timeout": 20}
    assert counts.take() == {}
    environment.num_rollouts += 63
    environment.counts += Counter(score_error=30, timeout=2, worker_death=7)  # a worker's death is no rollout's
    assert counts.lately() == {}  # too few to say
    environment.num_rollouts += 1
    assert counts.lately() == {"env/a/error_rate": 0.5, "rollouts/error_rate": 0.5}
    assert counts.take() == under("env/a", score_error=30, timeout=2, worker_death=7)
    assert counts.lately() == {}
