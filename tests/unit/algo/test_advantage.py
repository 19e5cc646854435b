"""Advantages, length penalties and flaws of rollouts, against plain Python floats and numbers worked by hand.

Rewards of steps and a teacher's opinion are checked token by token in `test_targets.py`.
"""

import math
import statistics
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trireme.algo.advantage import OF_GROUP, GroupScores, check_custom, distillation_term, ema, estimate
from trireme.algo.filters import FLAWS, is_gibberish, repeats
from trireme.algo.length_penalty import with_length_penalty
from trireme.algo.staleness import groups_allowed
from trireme.config.orchestrator import Advantage, Filters, LengthPenalty

KINDS = [*OF_GROUP, "ema", "batch", "group_batch"]

rewards = st.integers(-30_000, 30_000).map(lambda number: number / 10_000)  # what differs does so by more than SAME


def scores_of(groups: list[list[float]]) -> list[GroupScores]:
    return [GroupScores("a", n, np.array(group), np.ones(len(group), dtype=int)) for n, group in enumerate(groups)]


def by_definition(kind: str, groups: list[list[float]]) -> list[list[float]]:
    everything = [reward for group in groups for reward in group]
    centred = [reward - statistics.fmean(group) for group in groups for reward in group]

    def one(reward: float, group: list[float]) -> float:
        mean = math.fsum(group) / len(group)
        return {
            "group_mean": lambda: reward - mean,
            "group_mean_std": lambda: (reward - mean) / (statistics.pstdev(group) + 1e-6),
            "leave_one_out": lambda: reward - (math.fsum(group) - reward) / max(1, len(group) - 1),
            "max_rl": lambda: (reward - mean) / mean if mean > 1e-6 else 0.0,
            "none": lambda: reward,
            "batch": lambda: (reward - statistics.fmean(everything)) / (statistics.pstdev(everything) + 1e-6),
            "group_batch": lambda: (reward - mean) / (statistics.pstdev(centred) + 1e-6),
            "ema": lambda: reward - statistics.fmean(everything),  # the first batch of its only environment
        }[kind]()

    return [[one(reward, group) for reward in group] for group in groups]


@pytest.mark.parametrize("kind", KINDS)
@given(groups=st.lists(st.lists(rewards, min_size=2, max_size=6), min_size=1, max_size=5))
@example([[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]])
@example([[-2.0, -1.0], [-1.0, 1.0]])  # `max_rl` never turns the gradient around
@example([[0.75]])  # nothing to compare with
def test_each_advantage_estimator_agrees_with_its_definition(kind, groups):
    scored, baselines = scores_of(groups), {}
    found, _ = estimate(kind, scored, baselines, decay=0.9)
    for ours, theirs in zip(found, by_definition(kind, groups), strict=True):
        # near a mean or a deviation of 0 the quotients are large: compare by their own size
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6 * max(1.0, *map(abs, theirs)))
    found[0][:] = 9.0
    assert ([group.rewards.tolist() for group in scored], baselines) == (groups, {})


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"none", "ema"}))
@pytest.mark.parametrize("reward", [0.07, 0.1, 0.55, 0.6, 0.99])
def test_equal_rewards_give_no_advantage_whatever_their_number(kind, reward):
    """In floating point the mean of three rewards of 0.1 is not 0.1, and 0.3 is not 0.1 + 0.2."""
    for number in range(2, 65):
        group = [reward] * (number - 1) + [reward - 0.2 + 0.2]
        (found,), _ = estimate(kind, scores_of([group]), {}, decay=0.9)
        assert not found.any()


def test_a_running_mean_by_hand():
    groups = [np.array([0.0, 1.0]), np.array([2.0, 4.0])]
    before = {"a": 0.25, "absent": 5.0}
    advantages, after = ema(groups, ["a", "b"], before, decay=0.9)
    # a: against what it was before, 0.25; b is new: against its own mean here, 3
    assert [list(values) for values in advantages] == [[-0.25, 0.75], [-1.0, 1.0]]
    assert after == pytest.approx({"a": 0.9 * 0.25 + 0.1 * 0.5, "b": 3.0, "absent": 5.0})
    assert before == {"a": 0.25, "absent": 5.0}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "NoneType"),
        ([["a", "b"]], "expected"),
        ([[1.0]], r"\[\(1,\)\] - \[\(2,\)\]"),
        ([[1.0, 2.0], [3.0, 4.0]], r"\[\(2,\), \(2,\)\]"),
        ([[1.0, math.nan]], "not finite"),
    ],
)
def test_a_custom_function_must_return_one_finite_number_per_rollout(found, words):
    with pytest.raises(ValueError, match=words):
        check_custom(found, scores_of([[0.0, 1.0]]))


@pytest.mark.parametrize(
    ("kind", "lengths", "rewards", "expected"),
    [
        # L_max 100, L_cache 20: nothing up to 80, half way down at 90, all of it at 100 and beyond
        ("soft_overlong", [0, 80, 85, 90, 100, 130], [0.0] * 6, [0.0, 0.0, -0.125, -0.25, -0.5, -0.5]),
        # shortest 10, longest 30: shares 0.5, 0, -0.5; a wrong answer never gains by being short, 0.5 is a right one
        ("relative", [10, 20, 30, 10, 30, 15], [1, 0.5, 1, 0, 0, 0.4], [1.25, 0.5, 0.75, 0.0, -0.25, 0.4]),
        ("relative", [10, 30], [0.5, 1.0], [0.75, 0.75]),
        ("relative", [7, 7], [1.0, 0.0], [1.0, 0.0]),
        ("linear", [25, 100, 125], [1.0, 1.0, 1.0], [0.875, 0.5, 0.5]),
        (None, [25, 100], [1.0, 1.0], [1.0, 1.0]),
    ],
)
def test_a_reward_loses_the_weighted_penalty(kind, lengths, rewards, expected):
    rules = LengthPenalty(type=kind, max_length=100, buffer=20, weight=0.5) if kind else None
    assert with_length_penalty(np.array(rewards), np.array(lengths), rules).tolist() == expected


def test_a_token_that_a_teacher_rules_out_has_a_bounded_advantage():
    """vLLM's floor, a logprob of 0 probability, and a token that the policy's own logprob rules out."""
    teacher, logprobs = np.array([-9999.0, -math.inf, -1.0, -math.inf]), np.array([-1.0, -1.0, -math.inf, -math.inf])
    assert distillation_term(teacher, logprobs, 0.5).tolist() == [-10.0, -10.0, 10.0, 0.0]


def test_everything_that_may_be_configured_is_implemented_and_documented():
    kinds = {*get_args(Advantage.model_fields["type"].annotation)}
    assert kinds == {*KINDS, "custom"}
    penalties = {*get_args(LengthPenalty.model_fields["type"].annotation)}
    assert penalties == {"soft_overlong", "relative", "linear"}
    flaws = {name for name, field in Filters.model_fields.items() if get_args(field.annotation)[:1] == ("count",)}
    assert flaws == set(FLAWS)
    text = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    assert [name for name in kinds | penalties | flaws if f"| `{name}`" not in text] == []


def naive_repeats(ids: list[int], window: int, period: int) -> bool:
    return any(
        all(ids[place] == ids[place - unit] for place in range(start, start + window))
        for unit in range(1, period + 1)
        for start in range(unit, len(ids) - window + 1)
    )


@given(ids=st.lists(st.integers(0, 2), max_size=24), window=st.integers(1, 8), period=st.integers(1, 6))
def test_repetitions_are_those_that_a_loop_finds(ids, window, period):
    assert repeats(np.array(ids, dtype=int), window=window, period=period) == naive_repeats(ids, window, period)


@given(logprobs=st.lists(st.sampled_from([-16.0, -8.0, -4.0, -1.0, -0.25]), max_size=20), window=st.integers(1, 6))
def test_gibberish_is_what_a_loop_finds(logprobs, window):
    means = [sum(logprobs[start : start + window]) / window for start in range(len(logprobs) - window + 1)]
    for least in (-6.1, -8.0):  # a mean of exactly -8 is not below it
        found = is_gibberish(np.array(logprobs, dtype=np.float32), window=window, least=least)
        assert found == any(mean < least for mean in means)


numbers = st.integers(0, 50)


@given(version=numbers, next_batch=numbers, level=st.integers(0, 8), groups=st.integers(1, 16))
def test_groups_are_allowed_for_exactly_the_batches_that_are_near_enough(version, next_batch, level, groups):
    """Batch by batch: batch n may be begun once version n - level is live."""
    batches = [batch for batch in range(next_batch, next_batch + 100) if version >= batch - level]
    allowed = groups_allowed(version=version, next_batch=next_batch, max_async_level=level, groups_per_batch=groups)
    assert allowed == len(batches) * groups
