"""Advantage estimators, checked against loops over plain Python floats and numbers worked by hand."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trireme.algo.advantage import (
    OF_GROUP,
    GroupScores,
    check_custom,
    distillation_term,
    ema,
    estimate,
    process_advantages,
)
from trireme.algo.curriculum import Stage
from trireme.algo.difficulty import Pools
from trireme.algo.filters import FLAWS, FilterRules
from trireme.config.orchestrator import Advantage, DifficultyPools, Filters, LengthPenalty
from trireme.config.orchestrator import Stage as StageSection

KINDS = [*OF_GROUP, "ema", "batch", "group_batch"]
NAN = math.nan

rewards = st.floats(-3, 3, allow_nan=False, width=32)


def scores_of(groups: list[list[float]]) -> list[GroupScores]:
    return [GroupScores("a", n, np.array(group), np.ones(len(group), dtype=int)) for n, group in enumerate(groups)]


def by_definition(kind: str, groups: list[list[float]]) -> list[list[float]]:
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
@given(groups=st.lists(st.lists(rewards, min_size=2, max_size=6), min_size=1, max_size=5))
@example([[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]])
def test_each_estimator_agrees_with_its_definition_and_leaves_its_input_alone(
    kind: str, groups: list[list[float]]
) -> None:
    scored, baselines = scores_of(groups), {}
    found, _ = estimate(kind, scored, baselines, decay=0.9)
    for ours, theirs in zip(found, by_definition(kind, groups), strict=True):
        # near a mean or a deviation of 0 the quotients are large: compare by their own size
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6 * max(1.0, *map(abs, theirs)))
    found[0][:] = 9.0
    assert ([group.rewards.tolist() for group in scored], baselines) == (groups, {})


ROOT_5, ROOT_3_2 = 5**0.5, 1.5**0.5


@pytest.mark.parametrize(
    ("kind", "groups", "expected"),
    [
        ("group_mean", [[1.0, 0.0, 0.0, 1.0]], [[0.5, -0.5, -0.5, 0.5]]),
        # mean 2, deviations -2 0 2, standard deviation of the population sqrt(8/3)
        ("group_mean_std", [[0.0, 2.0, 4.0]], [[-ROOT_3_2, 0.0, ROOT_3_2]]),
        # the others of the first: (1 + 0) / 2
        ("leave_one_out", [[4.0, 1.0, 0.0]], [[3.5, -1.0, -2.5]]),
        ("leave_one_out", [[0.75]], [[0.75]]),  # nothing to compare with
        # one right answer of four, mean 1/4: a rare success counts three times what a failure does
        ("max_rl", [[1.0, 0.0, 0.0, 0.0]], [[3.0, -1.0, -1.0, -1.0]]),
        ("max_rl", [[-2.0, -1.0], [-1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]),  # never turns the gradient around
        # mean 3, deviations -3 -1 1 3, standard deviation sqrt(5)
        ("batch", [[0.0, 2.0], [4.0, 6.0]], [[-3 / ROOT_5, -1 / ROOT_5], [1 / ROOT_5, 3 / ROOT_5]]),
        # centred: -1 1 | -3 3, standard deviation sqrt(5)
        ("group_batch", [[0.0, 2.0], [4.0, 10.0]], [[-1 / ROOT_5, 1 / ROOT_5], [-3 / ROOT_5, 3 / ROOT_5]]),
    ],
)
def test_advantages_by_hand(kind: str, groups: list[list[float]], expected: list[list[float]]) -> None:
    found, _ = estimate(kind, scores_of(groups), {}, decay=0.9)
    assert [*map(list, found)] == [pytest.approx(values, rel=1e-5) for values in expected]


@pytest.mark.parametrize("kind", sorted({*OF_GROUP, "batch", "group_batch"} - {"none"}))
@pytest.mark.parametrize("reward", [0.07, 0.1, 0.55, 0.6, 0.99])
def test_equal_rewards_give_no_advantage_whatever_their_number(kind: str, reward: float) -> None:
    """In floating point the mean of three rewards of 0.1 is not 0.1, and 0.3 is not 0.1 + 0.2."""
    for number in range(2, 65):
        group = [reward] * (number - 1) + [reward - 0.2 + 0.2]
        (found,), _ = estimate(kind, scores_of([group]), {}, decay=0.9)
        assert not found.any()


def test_a_running_mean_by_hand() -> None:
    groups = [np.array([0.0, 1.0]), np.array([2.0, 4.0])]
    before = {"a": 0.25, "absent": 5.0}
    advantages, after = ema(groups, ["a", "b"], before, decay=0.9)
    # a: against what it was before, 0.25; b is new: against its own mean here, 3
    assert [list(values) for values in advantages] == [[-0.25, 0.75], [-1.0, 1.0]]
    assert after == pytest.approx({"a": 0.9 * 0.25 + 0.1 * 0.5, "b": 3.0, "absent": 5.0})
    assert before == {"a": 0.25, "absent": 5.0}


def test_a_custom_function_sees_groups_and_returns_a_number_per_rollout() -> None:
    def shortest_first(groups: list[GroupScores]) -> list[np.ndarray]:
        return [group.rewards / group.lengths for group in groups]

    scored = [GroupScores("a", 0, np.array([1.0, 1.0]), np.array([2, 4]))]
    (found,), _ = estimate("custom", scored, {}, decay=0.9, custom=shortest_first)
    assert found.tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "NoneType"),
        ([["a", "b"]], "expected"),
        ([[1.0]], r"\[\(1,\)\] - \[\(2,\)\]"),
        ([[1.0, 2.0], [3.0, 4.0]], r"\[\(2,\), \(2,\)\]"),
        ([[1.0, NAN]], "not finite"),
    ],
)
def test_a_custom_function_must_return_one_finite_number_per_rollout(found: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_custom(found, scores_of([[0.0, 1.0]]))


# per token


def test_rewards_of_steps_by_hand() -> None:
    """See `test_ledger_targets.py` for an independent implementation."""
    # steps 1 | 0, -1: mean 0, deviation sqrt(2/3); the first rollout's step ends at its second token of three
    first, second = process_advantages([np.array([NAN, 1.0, NAN]), np.array([0.0, NAN, -1.0])], eps=0.0)
    assert first == pytest.approx([ROOT_3_2, ROOT_3_2, 0.0])
    assert second == pytest.approx([-ROOT_3_2, -ROOT_3_2, -ROOT_3_2])
    alike = process_advantages([np.array([1.0, 1.0]), np.array([1.0])])
    assert [*map(list, alike)] == [[0.0, 0.0], [0.0]]


def test_a_teachers_term_by_hand() -> None:
    teacher = np.array([NAN, -1.0, -3.0], dtype=np.float32)
    logprobs = np.array([0.0, -2.0, -0.5], dtype=np.float32)
    assert distillation_term(teacher, logprobs, 0.5).tolist() == [0.0, 0.5, -1.25]
    # vLLM's floor; what it says no number for; and a token that the policy's own logprob rules out
    impossible, logprobs = np.array([-9999.0, -math.inf, -1.0, -math.inf]), np.array([-1.0, -1.0, -math.inf, -math.inf])
    assert distillation_term(impossible, logprobs, 0.5).tolist() == [-10.0, -10.0, 10.0, 0.0]


def test_everything_that_may_be_configured_is_implemented_and_documented() -> None:
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
