"""What is wrong with a rollout, by its tokens and by their age."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trireme.algo.filters import FilterRules, find_flaws, flaw_with, is_gibberish, repeats
from trireme.algo.runs import longest_run, runs_of
from trireme.algo.staleness import groups_allowed, is_too_old, lags


@given(mask=st.lists(st.booleans(), max_size=30))
def test_runs_are_the_stretches_that_a_loop_finds(mask: list[bool]) -> None:
    expected, start = [], None
    for place, holds in enumerate([*mask, False]):
        if holds and start is None:
            start = place
        if not holds and start is not None:
            expected.append(slice(start, place))
            start = None
    assert list(runs_of(np.array(mask, dtype=np.uint8))) == expected
    assert longest_run(np.array(mask, dtype=bool)) == max((run.stop - run.start for run in expected), default=0)


def naive_repeats(ids: list[int], window: int, period: int) -> bool:
    return any(
        all(ids[place] == ids[place - unit] for place in range(start, start + window))
        for unit in range(1, period + 1)
        for start in range(unit, len(ids) - window + 1)
    )


@given(ids=st.lists(st.integers(0, 2), max_size=24), window=st.integers(1, 8), period=st.integers(1, 6))
def test_repetitions_are_those_that_a_loop_finds(ids: list[int], window: int, period: int) -> None:
    assert repeats(np.array(ids, dtype=int), window=window, period=period) == naive_repeats(ids, window, period)


@given(logprobs=st.lists(st.sampled_from([-16.0, -8.0, -4.0, -1.0, -0.25]), max_size=20), window=st.integers(1, 6))
def test_gibberish_is_what_a_loop_finds(logprobs: list[float], window: int) -> None:
    means = [sum(logprobs[start : start + window]) / window for start in range(len(logprobs) - window + 1)]
    for least in (-6.1, -8.0):  # a mean of exactly -8 is not below it
        found = is_gibberish(np.array(logprobs, dtype=np.float32), window=window, least=least)
        assert found == any(mean < least for mean in means)


def test_flaws_are_looked_for_turn_by_turn() -> None:
    """Two turns that each say the same short thing do not make a repetition together."""
    rules = FilterRules(repetition_window=4, repetition_period=4, gibberish_window=2, gibberish_logprob=-5.0)
    turn = (np.array([1, 2, 3, 4]), np.array([-0.1, -9.0, -0.1, -9.0]))
    assert find_flaws(False, [turn, turn], rules) == []
    joined = tuple(np.concatenate([column, column]) for column in turn)
    assert find_flaws(True, [joined], rules) == ["truncated", "repetition"]
    derailed = (np.arange(3), np.array([-0.1, -9.0, -9.0]))
    assert find_flaws(False, [turn, derailed], rules) == ["gibberish"]


def test_the_first_flaw_with_an_action_is_the_reason() -> None:
    rules = FilterRules(truncated="count", repetition="mask", gibberish="mask", zero_advantage="mask")
    assert flaw_with("mask", ["truncated", "gibberish", "zero_advantage"], rules) == "gibberish"
    assert flaw_with("mask", ["truncated"], rules) is None
    assert flaw_with("drop", ["truncated", "gibberish"], rules) is None
    assert flaw_with("drop", ["repetition"], FilterRules(repetition="drop")) == "repetition"


def test_tokens_may_be_as_old_as_the_bound() -> None:
    assert lags(5, np.array([-1, -1, 5, 4, 2])).tolist() == [0, 1, 3]  # of sampled tokens only
    assert not is_too_old(5, oldest_version=3, max_off_policy_steps=2)
    assert is_too_old(5, oldest_version=2, max_off_policy_steps=2)


numbers = st.integers(0, 50)


@given(version=numbers, next_batch=numbers, level=st.integers(0, 8), groups=st.integers(1, 16))
def test_groups_are_allowed_for_exactly_the_batches_that_are_near_enough(version, next_batch, level, groups) -> None:
    """Batch by batch: batch n may be begun once version n - level is live."""
    batches = [batch for batch in range(next_batch, next_batch + 100) if version >= batch - level]
    allowed = groups_allowed(version=version, next_batch=next_batch, max_async_level=level, groups_per_batch=groups)
    assert allowed == len(batches) * groups
