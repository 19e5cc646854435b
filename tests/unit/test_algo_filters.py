"""What is wrong with a rollout, by its tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.algo.filters import FilterRules, find_flaws, flaw_with, has_signal, is_gibberish, repeats
from trireme.algo.runs import longest_run, runs_of


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
    for unit in range(1, period + 1):
        for start in range(unit, len(ids) - window + 1):
            if all(ids[place] == ids[place - unit] for place in range(start, start + window)):
                return True
    return False


@given(
    ids=st.lists(st.integers(0, 2), max_size=24),
    window=st.integers(1, 8),
    period=st.integers(1, 6),
)
def test_repetitions_are_those_that_a_loop_finds(ids: list[int], window: int, period: int) -> None:
    assert repeats(np.array(ids, dtype=int), window=window, period=period) == naive_repeats(ids, window, period)


def test_a_repetition_by_hand() -> None:
    # 1 2 stands there, then once more and half: three tokens in a row are what stood two before
    ids = np.array([9, 1, 2, 1, 2, 1, 7])
    assert repeats(ids, window=3, period=2)
    assert not repeats(ids, window=4, period=2)
    assert not repeats(ids, window=3, period=1)


def naive_gibberish(logprobs: list[float], window: int, least: float) -> bool:
    return any(sum(logprobs[start : start + window]) / window < least for start in range(len(logprobs) - window + 1))


@given(
    logprobs=st.lists(st.sampled_from([-16.0, -8.0, -4.0, -1.0, -0.25]), max_size=20),
    window=st.integers(1, 6),
)
def test_gibberish_is_what_a_loop_finds(logprobs: list[float], window: int) -> None:
    found = is_gibberish(np.array(logprobs, dtype=np.float32), window=window, least=-6.1)
    assert found == naive_gibberish(logprobs, window, -6.1)


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


@pytest.mark.parametrize(
    ("rewards", "steps", "expected"),
    [
        ([0.5, 0.5], [], False),
        ([0.5, 0.25], [], True),
        ([0.5, 0.5], [1.0, 1.0], False),
        ([0.5, 0.5], [1.0, 0.0], True),
        ([1.0], [], False),
        ([0.3, 0.1 + 0.2], [0.3, 0.1 + 0.2], False),
    ],
)
def test_a_group_has_signal_where_rewards_or_rewards_of_steps_differ(rewards, steps, expected) -> None:
    assert has_signal(np.array(rewards), np.array(steps)) is expected
