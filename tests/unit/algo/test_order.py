"""Which example comes next, with difficulty pools and a curriculum, for any history, stopped anywhere.

The oracle keeps its state in plain dictionaries and walks the positions one by one.
"""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.runs.order_rules import order_rules
from trireme.algo.data.curriculum import Place, after_batch, weights_in
from trireme.algo.data.difficulty import Outcome, left_out, to_scores
from trireme.algo.data.order import ENDLESS, draws_of, environment_of, example_order, names_and_shares
from trireme.algo.rules import Rules
from trireme.base.errors import ConfigError
from trireme.config.orchestrator import DifficultyPools, Stage
from trireme.journal.records import OpenGroup, State
from trireme.messages import decode_as, encode
from trireme.orchestrator.buffer import Buffer

SIZES = {"a": 9, "b": 4, "c": 1}


def pools_of(easy: float = 0.25, normal: float = 1.0, hard: float = 0.5, memory: float = 0.5) -> DifficultyPools:
    weights = {"easy_weight": easy, "normal_weight": normal, "hard_weight": hard}
    return DifficultyPools(easy_threshold=0.75, hard_threshold=0.25, memory=memory, **weights)


def build_stages(drawn: list[tuple[set[str], int, float | None, int]]) -> tuple[Stage, ...]:
    found = []
    for number, (names, step, reward, smoothing) in enumerate(drawn):
        condition = {"from_step": step} if reward is None else {"from_reward": reward}
        found.append(Stage(weights=dict.fromkeys(names, 1.0), smoothing=smoothing, **(condition if number else {})))
    return tuple(found)


one_of = st.sampled_from
weights = one_of([0.0, 0.25, 0.5, 1.0])
pools = st.builds(pools_of, weights, one_of([0.25, 1.0]), weights, one_of([0.0, 0.5, 0.75]))
names = st.sets(one_of("abc"), min_size=1)
stage = st.tuples(names, st.integers(1, 6), one_of([None, 0.25, 0.5]), st.integers(1, 4))
curriculum = st.lists(stage, max_size=3).map(build_stages)
drawn = {"seed": st.integers(0, 3), "shuffle": st.booleans(), "pools": st.none() | pools, "curriculum": curriculum}
rules = st.builds(order_rules, st.just({"a": 1.0, "b": 1.0, "c": 0.5}), **drawn)
histories = st.lists(st.lists(one_of([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=6), min_size=1, max_size=8)
"""For each batch the mean rewards of so many groups, taken and ended within it."""


class Naive:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.next_group = 0
        self.at = dict.fromkeys(SIZES, (0, 0))
        self.means: dict[tuple[str, int], float] = {}
        self.stage, self.reward = 0, math.nan

    def take(self) -> OpenGroup:
        group, self.next_group = self.next_group, self.next_group + 1
        rules, weights = self.rules, self.rules.weights
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
                return OpenGroup(group, name, example)

    def chance(self, name: str, example: int, pools: DifficultyPools | None) -> float:
        if pools is None:
            return 1.0
        present = [self.weight(name, other, pools) for other in range(SIZES[name])]
        return present[example] / max(present) if max(present) else 1.0

    def weight(self, name: str, example: int, pools: DifficultyPools) -> float:
        mean = self.means.get((name, example))
        if mean is None:
            return pools.normal_weight
        if mean >= pools.easy_threshold:
            return pools.easy_weight
        return pools.hard_weight if mean <= pools.hard_threshold else pools.normal_weight

    def close_batch(self, outcomes: list[Outcome], next_step: int) -> None:
        if self.rules.pools:
            for outcome in outcomes:
                which, memory = (outcome.env, outcome.example), self.rules.pools.memory
                before = self.means.get(which)
                self.means[which] = outcome.mean if before is None else memory * before + (1 - memory) * outcome.mean
        curriculum = self.rules.curriculum
        names = curriculum[self.stage].weights if curriculum else ()
        if own := [outcome.mean for outcome in outcomes if outcome.env in names]:
            mean = sum(own) / len(own)
            before = mean if math.isnan(self.reward) else self.reward
            self.reward = before + (mean - before) / curriculum[self.stage].smoothing
        for later in curriculum[self.stage + 1 :]:
            # a reward of NaN: not yet
            begins = self.reward >= later.from_reward if later.from_step is None else next_step >= later.from_step
            if not begins:
                break
            self.stage, self.reward = self.stage + 1, math.nan


def ended(groups: list[OpenGroup], means: list[float]) -> list[Outcome]:
    return [Outcome(group.id, group.env, group.example, mean) for group, mean in zip(groups, means, strict=True)]


def take(order: Buffer | Naive, count: int) -> list[OpenGroup]:
    return [order.take() for _ in range(count)]


def live_through(order: Buffer | Naive, history: list[list[float]], *, first: int = 0) -> list[OpenGroup]:
    groups = []
    for step, means in enumerate(history, start=first):
        taken = take(order, len(means))
        order.close_batch(ended(taken, means), next_step=step + 1)
        groups += taken
    return groups


def saved(buffer: Buffer, *open_groups: OpenGroup) -> State:
    """Through bytes, as the journal keeps it."""
    state = State(open_groups=[*open_groups, *buffer.reopened], **buffer.state())
    return decode_as(State, encode(state))


@given(rules=rules, history=histories, data=st.data())
def test_data_order_resumed_anywhere_equals_its_plain_definition(rules, history, data):
    buffer, naive = Buffer(SIZES, rules, State()), Naive(rules)
    stop = data.draw(st.integers(0, len(history)))
    groups = live_through(buffer, history[:stop])
    buffer = Buffer(SIZES, rules, saved(buffer))
    assert groups + live_through(buffer, history[stop:], first=stop) == live_through(naive, history)
    state = buffer.state()
    assert (state["stage"], state["stage_reward"]) == (naive.stage, None if math.isnan(naive.reward) else naive.reward)
    found = {
        (name, int(example)): mean
        for name, scores in state["scores"].items()
        for example, mean in zip(scores.examples, scores.means, strict=True)
    }
    assert found == naive.means


def test_open_groups_come_first_after_every_resume():
    buffer = Buffer({"a": 7}, order_rules(), State())
    groups = take(buffer, 6)
    second = Buffer({"a": 7}, order_rules(), saved(buffer, *groups[3:]))
    assert take(second, 1) == [groups[3]]
    third = Buffer({"a": 7}, order_rules(), saved(second, groups[3]))
    assert take(third, 5)[:3] == groups[3:]
    assert third.next_group == 8


def test_a_run_does_not_go_on_with_other_examples():
    state = saved(Buffer({"a": 7, "b": 4}, order_rules(), State()))
    changes = {"b had 4, now 5": {"b": 5}, "c had none, now 1": {"b": 4, "c": 1}, "b had 4, now none": {}}
    for words, others in changes.items():
        with pytest.raises(ConfigError, match=rf"{words} - the same examples were expected.*Restore the data.*new run"):
            Buffer({"a": 7} | others, order_rules(), state)


def test_tasks_without_end_come_in_their_order_and_go_on_after_a_stop():
    rules = order_rules({"a": 3.0, "b": 1.0}, pools=DifficultyPools())
    buffer = Buffer({"a": ENDLESS, "b": 5}, rules, State())
    groups = take(buffer, 40)
    groups += take(Buffer({"a": ENDLESS, "b": 5}, rules, saved(buffer)), 40)
    drawn = [group.example for group in groups if group.env == "a"]
    assert sorted(set(drawn)) == list(range(max(drawn) + 1)), "none is left out"


@pytest.mark.parametrize("shares", [[0.6, 0.0, 0.3, 0.1], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.1] * 3 + [0.7, 0.0]])
def test_environments_come_by_their_weights_in_the_long_run(shares):
    counts = Counter(environment_of(group, 0, np.array(shares)) for group in range(4000))
    found = [counts[place] / 4000 for place in range(len(shares))]
    assert found == pytest.approx(shares, abs=0.03)  # four standard deviations
    assert set(counts) == set(np.flatnonzero(shares)), "no environment without weight"


def test_the_order_is_the_one_that_runs_on_disk_have():
    """Written down in an earlier version: a run that goes on, or is audited, under a later one finds its place."""
    names, shares = names_and_shares({"b": 1.0, "a": 2.0})
    assert (names, list(shares)) == (["a", "b"], [2 / 3, 1 / 3])
    assert [environment_of(group, 3, shares) for group in range(12)] == [0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1]
    assert list(example_order(3, 0, 0, 7, True)) == [4, 0, 2, 1, 6, 3, 5]
    assert list(example_order(3, 1, 2, 5, True)) == [3, 1, 0, 4, 2]
    assert list(example_order(9, 2, 7, 5, False)) == [0, 1, 2, 3, 4]
    orders = [example_order(*which, 40, True) for which in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert len({tuple(order) for order in orders}) == 4


def test_examples_are_all_used_if_pools_leave_every_one_out(caplog):
    buffer = Buffer({"a": 5}, order_rules(pools=pools_of(easy=0.0)), State(scores={"a": to_scores(np.ones(5))}))
    for step in range(1, 4):
        groups = take(buffer, 5)
        assert sorted(group.example for group in groups) == list(range(5))
        buffer.close_batch(ended(groups, [1.0] * 5), next_step=step)
    assert caplog.text.count("all examples of a are in difficulty pools of weight 0") == 1
    assert not left_out(np.array([1.0, np.nan]), pools_of(easy=0.0))


def test_curriculum_ignores_rewards_of_other_stages():
    curriculum = (Stage(weights={"a": 1.0, "c": 0.0}, smoothing=4), Stage(weights={"b": 1.0}, from_reward=0.5))
    for env in ("b", "c"):
        assert after_batch(Place(), curriculum, [Outcome(0, env, 0, 1.0)], next_step=1) == Place(0, None)
    assert weights_in(Place(5), (Stage(weights={"b": 1.0}),), {"a": 1.0, "b": 1.0}) == {"a": 0.0, "b": 1.0}
    assert after_batch(Place(5, 0.5), (), [], next_step=9) == Place()
