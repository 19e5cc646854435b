"""Which example comes next."""

from __future__ import annotations

from collections import Counter

import pytest

from order_rules import order_rules
from trireme.algo.curriculum import Stage
from trireme.algo.difficulty import Outcome, Pools
from trireme.base.errors import ConfigError
from trireme.ledger.records import OpenGroup, State
from trireme.messages import decode_as, encode
from trireme.orchestrator.buffer import Buffer


def build_buffer(sizes: dict[str, int], *, weights=None, seed=0, shuffle=True, state=None) -> Buffer:
    weights = weights or dict.fromkeys(sizes, 1.0)
    return Buffer(sizes, order_rules(weights, seed=seed, shuffle=shuffle), state or State())


def take(buffer: Buffer, count: int) -> list[OpenGroup]:
    return [buffer.take() for _ in range(count)]


def saved(buffer: Buffer, open_groups: list[OpenGroup]) -> State:
    """Through bytes, as the journal keeps it."""
    state = State(open_groups=open_groups + buffer.reopened, **buffer.state())
    return decode_as(State, encode(state))


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_example_comes_exactly_once_per_epoch(shuffle):
    buffer = build_buffer({"a": 7}, shuffle=shuffle)
    epochs = [[group.example for group in take(buffer, 7)] for _ in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == (4 if shuffle else 1)


def test_every_example_comes_exactly_once_per_epoch_of_its_own_environment():
    groups = take(build_buffer({"a": 5, "b": 11}, weights={"a": 3.0, "b": 1.0}), 400)
    for name, size in (("a", 5), ("b", 11)):
        examples = [group.example for group in groups if group.env == name]
        for start in range(0, len(examples) - size, size):
            assert sorted(examples[start : start + size]) == list(range(size))


def test_environments_come_by_their_weights_in_the_long_run():
    weights = {"a": 6.0, "b": 3.0, "c": 1.0}
    counts = Counter(group.env for group in take(build_buffer({"a": 50, "b": 50, "c": 50}, weights=weights), 10_000))
    shares = {name: counts[name] / 10_000 for name in weights}
    assert shares == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.1}, abs=0.02)  # four standard deviations


def test_groups_are_numbered_one_by_one():
    assert [group.id for group in take(build_buffer({"a": 3, "b": 3}), 20)] == list(range(20))


@pytest.mark.parametrize("stop", [0, 1, 10, 37])
def test_going_on_from_what_was_saved_gives_the_same_examples_as_never_having_stopped(stop):
    sizes, weights = {"a": 7, "b": 4}, {"a": 2.0, "b": 1.0}
    whole = take(build_buffer(sizes, weights=weights), 60)
    buffer = build_buffer(sizes, weights=weights)
    before = take(buffer, stop)
    again = build_buffer(sizes, weights=weights, state=saved(buffer, []))
    assert before + take(again, 60 - stop) == whole


def test_groups_that_were_open_come_first_also_when_it_stops_once_more_among_them():
    buffer = build_buffer({"a": 7})
    groups = take(buffer, 6)
    second = build_buffer({"a": 7}, state=saved(buffer, groups[3:]))
    assert take(second, 1) == [groups[3]]
    third = build_buffer({"a": 7}, state=saved(second, [groups[3]]))
    assert take(third, 5)[:3] == groups[3:]
    assert third.next_group == 8


def test_the_order_depends_on_the_seed_alone():
    first, again, other = (take(build_buffer({"a": 30}, seed=seed), 30) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"a": 7, "b": 5}, "b had 4, now 5"),
        ({"a": 7}, "b had 4, now none"),
        ({"a": 7, "b": 4, "c": 1}, "c had none, now 1"),
    ],
)
def test_a_run_does_not_go_on_with_other_examples(sizes, words):
    """Positions in the data set would mean other examples, and nobody would notice."""
    state = saved(build_buffer({"a": 7, "b": 4}), [])
    with pytest.raises(ConfigError, match=rf"{words} - the same examples were expected.*Restore the data.*new run"):
        build_buffer(sizes, state=state)


def test_sizes_are_those_that_it_was_built_with():
    assert build_buffer({"a": 7, "b": 4}).sizes == {"a": 7, "b": 4}


# what it learns


def ended(groups: list[OpenGroup], mean: float) -> list[Outcome]:
    return [Outcome(group.id, group.env, group.example, mean) for group in groups]


def test_what_was_learnt_is_gone_on_from_and_refused_examples_stay_out():
    pools = Pools(0.9, 0.1, 0.0, 1.0, 1.0, 0.5)
    rules = order_rules({"a": 1.0}, pools=pools)
    buffer = Buffer({"a": 6}, rules, State())
    first = take(buffer, 3)
    buffer.close_batch(ended(first, 1.0), next_step=1)
    again = Buffer({"a": 6}, rules, saved(buffer, []))
    later = [group.example for group in take(again, 6)]
    assert later == [group.example for group in take(buffer, 6)]
    assert not {group.example for group in first} & set(later)


def test_that_every_example_is_left_out_is_said_once(caplog):
    rules = order_rules({"a": 1.0}, pools=Pools(0.9, 0.1, 0.0, 1.0, 1.0, 0.5))
    buffer = Buffer({"a": 4}, rules, State())
    for step in range(1, 4):
        buffer.close_batch(ended(take(buffer, 4), 1.0), next_step=step)
    assert caplog.text.count("all examples of a are in difficulty pools of weight 0") == 1


def test_a_stage_changes_what_is_drawn_from_when_a_batch_is_closed():
    rules = order_rules({"a": 1.0, "b": 1.0}, curriculum=(Stage({"a": 1.0}), Stage({"b": 1.0}, from_step=2)))
    buffer = Buffer({"a": 4, "b": 4}, rules, State())
    drawn = []
    for step in range(1, 4):
        drawn.append({group.env for group in take(buffer, 3)})
        buffer.close_batch([], next_step=step)
    assert drawn == [{"a"}, {"a"}, {"b"}]
