"""The data order with difficulty pools and a curriculum, for any history, stopped anywhere.

The oracle keeps its state in plain dictionaries and walks the positions one by one.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from order_rules import order_rules
from trireme.algo.curriculum import Place, Stage, after_batch, weights_in
from trireme.algo.difficulty import Outcome, Pools, from_scores, left_out, to_scores
from trireme.algo.order import Cursor, DataOrder, draws_of, environment_of, example_order
from trireme.ledger.records import State
from trireme.ledger.rules import Rules
from trireme.messages import decode_as, encode

SIZES = {"a": 9, "b": 4, "c": 1}


def pools_of(easy: float = 0.25, normal: float = 1.0, hard: float = 0.5, memory: float = 0.5) -> Pools:
    return Pools(0.75, 0.25, easy, normal, hard, memory)


def build_stages(drawn: list[tuple[set[str], int, float | None, int]]) -> tuple[Stage, ...]:
    found = []
    for number, (names, step, reward, smoothing) in enumerate(drawn):
        condition = {"from_step": step} if reward is None else {"from_reward": reward}
        found.append(Stage(dict.fromkeys(names, 1.0), smoothing=smoothing, **(condition if number else {})))
    return tuple(found)


weights = st.sampled_from([0.0, 0.25, 0.5, 1.0])
pools = st.builds(pools_of, weights, st.sampled_from([0.25, 1.0]), weights, st.sampled_from([0.0, 0.5, 0.75]))

stages = st.lists(
    st.tuples(
        st.sets(st.sampled_from("abc"), min_size=1),
        st.integers(1, 6),
        st.sampled_from([None, 0.25, 0.5]),
        st.integers(1, 4),
    ),
    max_size=3,
)
rules = st.builds(
    lambda seed, shuffle, pools, drawn: order_rules(
        {"a": 1.0, "b": 1.0, "c": 0.5}, seed=seed, shuffle=shuffle, pools=pools, curriculum=build_stages(drawn)
    ),
    st.integers(0, 3),
    st.booleans(),
    st.none() | pools,
    stages,
)
histories = st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=6), min_size=1, max_size=8)
"""For each batch the mean rewards of so many groups, taken and ended within it."""


class Naive:
    """The same order, from its description."""

    def __init__(self) -> None:
        self.at = dict.fromkeys(SIZES, (0, 0))
        self.means: dict[tuple[str, int], float] = {}
        self.stage, self.reward = 0, math.nan

    def take(self, group: int, rules: Rules) -> tuple[str, int]:
        weights = rules.weights
        if rules.curriculum:
            weights = {name: rules.curriculum[self.stage].weights.get(name, 0.0) for name in weights}
        shares = np.array([weights[name] / sum(weights.values()) for name in "abc"])
        place = environment_of(group, rules.seed, shares)
        name = "abc"[place]
        while True:
            epoch, position = self.at[name]
            if position == SIZES[name]:
                epoch, position = epoch + 1, 0
            self.at[name] = epoch, position + 1
            example = int(example_order(rules.seed, place, epoch, SIZES[name], rules.shuffle)[position])
            draw = draws_of(rules.seed, place, epoch, SIZES[name])[position]
            if draw < self.chance(name, example, rules.pools):
                return name, example

    def chance(self, name: str, example: int, pools: Pools | None) -> float:
        if pools is None:
            return 1.0
        present = [self.weight(name, other, pools) for other in range(SIZES[name])]
        return present[example] / max(present) if max(present) else 1.0

    def weight(self, name: str, example: int, pools: Pools) -> float:
        mean = self.means.get((name, example))
        if mean is None:
            return pools.normal_weight
        if mean >= pools.easy_threshold:
            return pools.easy_weight
        return pools.hard_weight if mean <= pools.hard_threshold else pools.normal_weight

    def close(self, outcomes: list[Outcome], rules: Rules, next_step: int) -> None:
        if rules.pools:
            for outcome in outcomes:
                which, memory = (outcome.env, outcome.example), rules.pools.memory
                if which in self.means:
                    self.means[which] = memory * self.means[which] + (1 - memory) * outcome.mean
                else:
                    self.means[which] = outcome.mean
        if rules.curriculum:
            stage = rules.curriculum[self.stage]
            own = [outcome.mean for outcome in outcomes if outcome.env in stage.weights]
            if own:
                mean = sum(own) / len(own)
                before = mean if math.isnan(self.reward) else self.reward
                self.reward = before + (mean - before) / stage.smoothing
            while self.stage + 1 < len(rules.curriculum):
                following = rules.curriculum[self.stage + 1]
                if following.from_step is not None:
                    begins = next_step >= following.from_step
                else:
                    begins = self.reward >= following.from_reward  # NaN: not yet
                if not begins:
                    break
                self.stage, self.reward = self.stage + 1, math.nan


def live_through(order: Any, rules: Rules, history: list[list[float]], *, first: int = 0, group: int = 0):
    """Yields each group as it is taken, and None where a batch is closed."""
    for step, means in enumerate(history, start=first):
        taken = []
        for _ in means:
            taken.append(order.take(group, rules))
            yield group, taken[-1]
            group += 1
        outcomes = [
            Outcome(group - len(means) + n, *task, mean)
            for n, (task, mean) in enumerate(zip(taken, means, strict=True))
        ]
        close = order.close_batch if isinstance(order, DataOrder) else order.close
        close(outcomes, rules, next_step=step + 1)
        yield None


@given(rules=rules, history=histories)
def test_any_history_is_the_one_that_its_description_gives(rules: Rules, history: list[list[float]]) -> None:
    order, naive = DataOrder(SIZES), Naive()
    for ours, theirs in zip(live_through(order, rules, history), live_through(naive, rules, history), strict=True):
        assert ours == theirs
        assert order.place.stage == naive.stage
    found = {
        (name, int(example)): mean
        for name, scores in order.scores.items()
        for example, mean in zip(scores.examples, scores.means, strict=True)
    }
    assert found == naive.means


@given(rules=rules, history=histories, data=st.data())
def test_an_order_resumed_after_any_batch_continues_as_if_it_had_not_stopped(rules, history, data) -> None:
    stop = data.draw(st.integers(0, len(history)))
    whole, before = DataOrder(SIZES), DataOrder(SIZES)
    undisturbed = [*live_through(whole, rules, history)]
    first_part = [*live_through(before, rules, history[:stop])]
    again = DataOrder(SIZES)
    again.go_on_from(*saved(before))
    group = sum(len(means) for means in history[:stop])
    assert [*first_part, *live_through(again, rules, history[stop:], first=stop, group=group)] == undisturbed
    assert saved(again)[0] == saved(whole)[0]
    assert encode(saved(again)) == encode(saved(whole))


def saved(order: DataOrder) -> tuple[dict[str, Cursor], Any, Place]:
    """Through bytes, as the journal keeps it."""
    state = State(cursors=order.cursors, scores=order.scores, stage=order.place.stage, stage_reward=order.place.reward)
    state = decode_as(State, encode(state))
    return state.cursors, state.scores, Place(state.stage, state.stage_reward)


def test_in_the_long_run_pools_come_by_their_weights() -> None:
    size = 300
    means = np.repeat([1.0, 0.5, 0.0], size // 3)
    order = DataOrder({"a": size})
    order.go_on_from({}, {"a": to_scores(means)}, Place())
    own = order_rules({"a": 1.0}, pools=pools_of(easy=0.25, normal=1.0, hard=0.5))
    counts = Counter(order.take(group, own)[1] * 3 // size for group in range(7000))
    shares = [counts[pool] / 7000 for pool in range(3)]
    assert shares == pytest.approx([0.25 / 1.75, 1 / 1.75, 0.5 / 1.75], abs=0.02)  # four standard deviations


def test_where_all_is_left_out_everything_comes_in_its_order() -> None:
    order = DataOrder({"a": 5})
    order.go_on_from({}, {"a": to_scores(np.ones(5))}, Place())
    own = order_rules({"a": 1.0}, pools=pools_of(easy=0.0))
    assert order.left_out(own) == ["a"]
    assert sorted(order.take(group, own)[1] for group in range(5)) == list(range(5))
    assert not left_out(np.array([1.0, np.nan]), pools_of(easy=0.0))


@given(means=st.lists(st.sampled_from([math.nan, 0.0, 0.3, 1.0]), min_size=1, max_size=20))
def test_scores_come_back_as_they_were(means: list[float]) -> None:
    scores = to_scores(np.array(means))
    assert (np.diff(scores.examples) > 0).all()
    np.testing.assert_array_equal(from_scores(scores, len(means)), means)
    assert np.isnan(from_scores(None, 3)).all()


def test_a_stage_begins_once_the_one_before_has_reached_its_reward() -> None:
    def close(place: Place, *means: float, env: str = "a", next_step: int = 1) -> Place:
        outcomes = [Outcome(n, env, 0, mean) for n, mean in enumerate(means)]
        return after_batch(place, curriculum, outcomes, next_step=next_step)

    curriculum: tuple[Stage, ...] = (Stage({"a": 1.0, "c": 0.0}, smoothing=4), Stage({"b": 1.0}, from_reward=0.5))
    assert close(Place(), 1.0, env="b") == close(Place(), 1.0, env="c") == Place(0, None)
    place = close(Place(), 0.0, 0.4)
    assert place == Place(0, 0.2)
    place = close(place, 1.0)
    assert place == Place(0, 0.2 + 0.8 / 4)
    assert close(place, 1.0) == Place(1, None)
    curriculum = (Stage({"a": 1.0}), Stage({"a": 1.0}, from_step=1), Stage({"b": 1.0}, from_step=3))
    assert [close(Place(), next_step=step).stage for step in range(4)] == [0, 1, 1, 2]


def test_a_run_may_resume_with_fewer_stages_or_none() -> None:
    assert weights_in(Place(5), (Stage({"b": 1.0}),), {"a": 1.0, "b": 1.0}) == {"a": 0.0, "b": 1.0}
    assert after_batch(Place(5, 0.5), (), [], next_step=9) == Place()


def test_environments_without_weight_are_never_drawn() -> None:
    for shares in ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.0, 0.5], [0.1] * 3 + [0.7, 0.0]):
        drawn = {environment_of(group, 0, np.array(shares)) for group in range(300)}
        assert drawn == set(np.flatnonzero(shares).tolist())
