"""How much better a rollout was than what it is compared with. Oracles are loops over plain Python floats."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.algo.advantage import (
    OF_GROUP,
    GroupScores,
    batch,
    check_custom,
    distillation_term,
    ema,
    estimate,
    group_batch,
    group_mean,
    group_mean_std,
    leave_one_out,
    max_rl,
    process_advantages,
)
from trireme.algo.curriculum import Stage
from trireme.algo.difficulty import Pools
from trireme.algo.filters import FLAWS, FilterRules
from trireme.config.orchestrator import Advantage, DifficultyPools, Filters, LengthPenalty
from trireme.config.orchestrator import Stage as StageSection

KINDS = [*OF_GROUP, "ema", "batch", "group_batch"]

rewards = st.floats(-3, 3, allow_nan=False, width=32)
groups_of_rewards = st.lists(st.lists(rewards, min_size=2, max_size=6), min_size=1, max_size=5)


def scores_of(groups: list[list[float]], envs: str = "") -> list[GroupScores]:
    """Group n is of the environment that the n-th letter names."""
    return [
        GroupScores(env, n, np.array(group), np.ones(len(group), dtype=int))
        for n, (group, env) in enumerate(zip(groups, envs or "a" * len(groups), strict=True))
    ]


def by_hand(kind: str, groups: list[list[float]]) -> list[list[float]]:
    """Each estimator's definition, one number after the other."""
    everything = [reward for group in groups for reward in group]
    centred = [reward - statistics.fmean(group) for group in groups for reward in group]

    def one(reward: float, group: list[float]) -> float:
        mean = math.fsum(group) / len(group)
        match kind:
            case "group_mean":
                return reward - mean
            case "group_mean_std":
                return (reward - mean) / (statistics.pstdev(group) + 1e-6)
            case "leave_one_out":
                return reward - (math.fsum(group) - reward) / (len(group) - 1)
            case "max_rl":
                return (reward - mean) / mean if mean > 1e-6 else 0.0
            case "none":
                return reward
            case "batch":
                return (reward - statistics.fmean(everything)) / (statistics.pstdev(everything) + 1e-6)
            case "group_batch":
                return (reward - mean) / (statistics.pstdev(centred) + 1e-6)
            case "ema":  # the first batch of its only environment
                return reward - statistics.fmean(everything)
        raise AssertionError(kind)

    return [[one(reward, group) for reward in group] for group in groups]


@pytest.mark.parametrize("kind", KINDS)
@given(groups=groups_of_rewards)
def test_each_estimator_agrees_with_its_definition(kind: str, groups: list[list[float]]) -> None:
    found, _ = estimate(kind, scores_of(groups), {}, decay=0.9)
    for ours, theirs in zip(found, by_hand(kind, groups), strict=True):
        # near a mean or a deviation of 0 the quotients are large: compare by their own size
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6 * max(1.0, *map(abs, theirs)))


def test_group_mean_by_hand() -> None:
    assert group_mean(np.array([1.0, 0.0, 0.0, 1.0])).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_group_mean_std_by_hand() -> None:
    # mean 2, deviations -2 0 2, standard deviation of the population sqrt(8/3)
    assert group_mean_std(np.array([0.0, 2.0, 4.0]), eps=0.0) == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5])


def test_leave_one_out_by_hand() -> None:
    # the others of the first: (1 + 0) / 2
    assert leave_one_out(np.array([4.0, 1.0, 0.0])).tolist() == [3.5, -1.0, -2.5]


def test_leave_one_out_is_the_group_mean_stretched() -> None:
    """By G / (G - 1): the two differ by the step size only."""
    rewards_G = np.random.default_rng(0).normal(size=6)
    assert leave_one_out(rewards_G) == pytest.approx(6 / 5 * group_mean(rewards_G))


def test_a_single_rollout_keeps_its_reward_where_nothing_else_is_left() -> None:
    assert leave_one_out(np.array([0.75])).tolist() == [0.75]


def test_max_rl_by_hand() -> None:
    # one right answer of four, mean 1/4: a rare success counts three times what a failure does
    assert max_rl(np.array([1.0, 0.0, 0.0, 0.0])).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert max_rl(np.array([1.0, 1.0, 1.0, 0.0])) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])


def test_max_rl_never_turns_a_gradient_around() -> None:
    for rewards_G in ([0.0, 0.0], [-1.0, 1.0], [-1.0, 0.5], [-2.0, -1.0]):
        assert max_rl(np.array(rewards_G)).tolist() == [0.0, 0.0]


def test_the_gradient_of_max_rl_is_the_mean_over_right_answers() -> None:
    """Algorithm 1 of the paper without its control variate: sum of score functions of the successes, over their number.
    The control variate takes off the mean score, which is 0 in expectation."""
    rewards_G = np.array([1.0, 0.0, 1.0, 0.0, 0.0])
    scores = np.random.default_rng(1).normal(size=5)
    ours = (max_rl(rewards_G) * scores).mean()
    assert ours == pytest.approx(scores[rewards_G == 1].mean() - scores.mean())


def test_batch_by_hand() -> None:
    # rewards 0 2 | 4 6: mean 3, deviations -3 -1 1 3, standard deviation sqrt(5)
    first, second = batch([np.array([0.0, 2.0]), np.array([4.0, 6.0])], eps=0.0)
    assert [*first, *second] == pytest.approx([-3 / 5**0.5, -1 / 5**0.5, 1 / 5**0.5, 3 / 5**0.5])


def test_group_batch_by_hand() -> None:
    # centred: -1 1 | -3 3, standard deviation sqrt(5)
    first, second = group_batch([np.array([0.0, 2.0]), np.array([4.0, 10.0])], eps=0.0)
    assert [*first, *second] == pytest.approx([-1 / 5**0.5, 1 / 5**0.5, -3 / 5**0.5, 3 / 5**0.5])


def test_in_a_batch_of_one_group_the_group_is_the_batch() -> None:
    (group,) = groups = [np.random.default_rng(3).normal(size=8)]
    assert batch(groups)[0] == pytest.approx(group_mean_std(group))
    assert group_batch(groups)[0] == pytest.approx(group_mean_std(group))


def test_a_running_mean_by_hand() -> None:
    groups = [np.array([0.0, 1.0]), np.array([2.0, 4.0])]
    advantages, after = ema(groups, ["a", "b"], {"a": 0.25}, decay=0.9)
    # a: against what it was before, 0.25; b is new: against its own mean here, 3
    assert [list(values) for values in advantages] == [[-0.25, 0.75], [-1.0, 1.0]]
    assert after == pytest.approx({"a": 0.9 * 0.25 + 0.1 * 0.5, "b": 3.0})


@given(batches=st.lists(st.lists(rewards, min_size=1, max_size=4), min_size=1, max_size=8))
def test_a_running_mean_over_many_batches_is_a_sum_of_them_with_falling_weights(batches: list[list[float]]) -> None:
    baselines: dict[str, float] = {}
    for rewards_of_batch in batches:
        _, baselines = estimate("ema", scores_of([rewards_of_batch]), baselines, decay=0.5)
    means = [statistics.fmean(each) for each in batches]
    weights = [0.5 ** len(means[1:]), *(0.5 ** (len(means) - n) for n in range(1, len(means)))]
    assert baselines["a"] == pytest.approx(sum(w * m for w, m in zip(weights, means, strict=True)), abs=1e-9)


def test_an_environment_that_a_batch_has_nothing_of_keeps_its_running_mean() -> None:
    _, after = estimate("ema", scores_of([[1.0]], "a"), {"a": 0.0, "b": 5.0}, decay=0.5)
    assert after == {"a": 0.5, "b": 5.0}


@pytest.mark.parametrize("kind", ["group_mean", "group_mean_std", "leave_one_out", "max_rl", "group_batch"])
@given(groups=groups_of_rewards)
def test_advantages_of_a_group_sum_to_zero(kind: str, groups: list[list[float]]) -> None:
    for values in estimate(kind, scores_of(groups), {}, decay=0.9)[0]:
        assert abs(values.sum()) <= 1e-9 * max(1.0, np.abs(values).max())


@pytest.mark.parametrize("kind", ["group_mean", "group_mean_std", "leave_one_out", "max_rl", "group_batch"])
def test_a_group_that_agrees_teaches_nothing(kind: str) -> None:
    for values in estimate(kind, scores_of([[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]]), {}, decay=0.9)[0]:
        assert values.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@given(groups=groups_of_rewards, data=st.data())
def test_the_order_of_rollouts_and_groups_does_not_matter(kind: str, groups: list[list[float]], data) -> None:
    order = data.draw(st.permutations(range(len(groups))))
    plain, _ = estimate(kind, scores_of(groups), {}, decay=0.9)
    other, _ = estimate(kind, scores_of([groups[n][::-1] for n in order]), {}, decay=0.9)
    for n, values in zip(order, other, strict=True):
        assert values[::-1] == pytest.approx(plain[n], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_went_in_is_not_changed(kind: str) -> None:
    scored = scores_of([[0.0, 1.0], [0.5, 2.0]], "ab")
    baselines = {"a": 0.25}
    estimate(kind, scored, baselines, decay=0.9)
    assert [group.rewards.tolist() for group in scored] == [[0.0, 1.0], [0.5, 2.0]]
    assert baselines == {"a": 0.25}


# a function of the user's


def test_a_function_of_the_users_sees_groups_and_gives_a_number_per_rollout() -> None:
    def shortest_first(groups: list[GroupScores]) -> list[np.ndarray]:
        return [group.rewards / group.lengths for group in groups]

    scored = [GroupScores("a", 0, np.array([1.0, 1.0]), np.array([2, 4]))]
    (found,), _ = estimate("custom", scored, {}, decay=0.9, custom=shortest_first)
    assert found.tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "gave NoneType"),
        ([["a", "b"]], "a list of arrays, one per group, expected"),
        ([[1.0]], r"shapes \[\(1,\)\] - \[\(2,\)\] were expected"),
        ([[1.0, 2.0], [3.0, 4.0]], r"shapes \[\(2,\), \(2,\)\]"),
        ([[1.0, math.nan]], "not finite"),
    ],
)
def test_what_is_no_number_per_rollout_is_refused(given, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_custom(given, scores_of([[0.0, 1.0]]))


# per token


def naive_process(group: list[list[float]]) -> list[list[float]]:
    """DeepSeekMath, section 4.1.3: for each token all steps that end at it or later."""
    steps = [reward for rollout in group for reward in rollout if not math.isnan(reward)]
    if not steps:
        return [[0.0] * len(rollout) for rollout in group]
    mean, deviation = statistics.fmean(steps), statistics.pstdev(steps)
    found = []
    for rollout in group:
        found.append(
            [
                sum((r - mean) / (deviation + 1e-6) for r in rollout[token:] if not math.isnan(r))
                for token in range(len(rollout))
            ]
        )
    return found


@given(
    group=st.lists(
        st.lists(st.one_of(st.just(math.nan), st.sampled_from([-1.0, 0.0, 0.5, 2.0])), min_size=1, max_size=7),
        min_size=1,
        max_size=4,
    )
)
def test_rewards_of_steps_agree_with_process_supervision(group: list[list[float]]) -> None:
    found = process_advantages([np.array(rollout) for rollout in group])
    for ours, theirs in zip(found, naive_process(group), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


def test_rewards_of_steps_by_hand() -> None:
    # steps 1 | 0, -1: mean 0, deviation sqrt(2/3); the first rollout's step ends at its second token of three
    nan = math.nan
    first, second = process_advantages([np.array([nan, 1.0, nan]), np.array([0.0, nan, -1.0])], eps=0.0)
    unit = 1.5**0.5
    assert first == pytest.approx([unit, unit, 0.0])
    assert second == pytest.approx([-unit, -unit, -unit])


def test_steps_that_all_went_alike_change_nothing() -> None:
    assert [list(v) for v in process_advantages([np.array([1.0, 1.0]), np.array([1.0])])] == [[0.0, 0.0], [0.0]]


def test_a_teachers_term_by_hand() -> None:
    teacher = np.array([np.nan, -1.0, -3.0], dtype=np.float32)
    logprobs = np.array([0.0, -2.0, -0.5], dtype=np.float32)
    assert distillation_term(teacher, logprobs, 0.5).tolist() == [0.0, 0.5, -1.25]


def test_on_average_a_teachers_term_is_minus_the_divergence_from_it() -> None:
    """Over what the policy samples: sum of mu (log q - log mu) = -KL(mu || q), which is at most 0."""
    chance = np.random.default_rng(5)
    mu, q = chance.dirichlet(np.ones(12)), chance.dirichlet(np.ones(12))
    mean = (mu * distillation_term(np.log(q), np.log(mu), 1.0)).sum()
    assert mean == pytest.approx(-sum(p * math.log(p / r) for p, r in zip(mu, q, strict=True)))
    assert mean < 0
    assert not distillation_term(np.log(mu), np.log(mu), 1.0).any()


# what may be configured


def test_whatever_may_be_configured_can_be_computed_and_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    kinds = {*get_args(Advantage.model_fields["type"].annotation)}
    assert kinds == {*KINDS, "custom"}
    penalties = {*get_args(LengthPenalty.model_fields["type"].annotation)}
    assert penalties == {"soft_overlong", "relative", "linear"}
    flaws = {name for name, field in Filters.model_fields.items() if get_args(field.annotation)[:1] == ("count",)}
    assert flaws == set(FLAWS)
    assert {*FilterRules.__struct_fields__} == {*Filters.model_fields}
    assert {*Pools.__struct_fields__} == {*DifficultyPools.model_fields}
    assert {*Stage.__struct_fields__} == {*StageSection.model_fields}
    assert [name for name in kinds | penalties | flaws if f"| `{name}`" not in text] == []
