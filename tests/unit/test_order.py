"""The data order is a function of numbers alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from order_rules import order_rules
from trireme.algo.order import environment_of, example_order, names_and_shares
from trireme.ledger.records import State
from trireme.orchestrator.buffer import Buffer


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_example_once(shuffle):
    for epoch in range(5):
        assert sorted(example_order(4, 1, epoch, 23, shuffle)) == list(range(23))


def test_seed_environment_and_epoch_each_make_another_order():
    orders = [example_order(*which, 40, True) for which in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert len({tuple(order) for order in orders}) == 4


def test_without_shuffling_examples_come_as_they_lie():
    assert list(example_order(9, 2, 7, 5, False)) == [0, 1, 2, 3, 4]


def test_places_are_by_name_and_shares_sum_to_one():
    names, shares = names_and_shares({"b": 1.0, "a": 3.0})
    assert names == ["a", "b"]
    assert list(shares) == [0.75, 0.25]


def test_groups_draw_from_environments_by_their_shares():
    counts = Counter(environment_of(group, 5, np.array([0.6, 0.3, 0.1])) for group in range(10_000))
    shares = [counts[place] / 10_000 for place in range(3)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.02)  # four standard deviations


def test_a_group_draws_alike_whoever_asks_and_whenever():
    shares = np.array([0.5, 0.5])
    backwards = [environment_of(group, 1, shares) for group in reversed(range(50))]
    assert backwards[::-1] == [environment_of(group, 1, shares) for group in range(50)]


def test_the_order_is_the_one_that_runs_on_disk_have():
    """Written down in an earlier version: a run that goes on, or is audited, under a later one finds its place."""
    shares = np.array([2 / 3, 1 / 3])
    assert [environment_of(group, 3, shares) for group in range(12)] == [0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1]
    assert list(example_order(3, 0, 0, 7, True)) == [4, 0, 2, 1, 6, 3, 5]
    assert list(example_order(3, 1, 2, 5, True)) == [3, 1, 0, 4, 2]


def test_the_buffer_hands_out_what_these_functions_say():
    weights, sizes = {"x": 1.0, "w": 2.5}, {"x": 6, "w": 4}
    buffer = Buffer(sizes, order_rules(weights, seed=8), State())
    names, shares = names_and_shares(weights)
    handed_out: dict[str, int] = dict.fromkeys(names, 0)
    for group in range(60):
        place = environment_of(group, 8, shares)
        name = names[place]
        epoch, position = divmod(handed_out[name], sizes[name])
        handed_out[name] += 1
        task = buffer.take()
        assert (task.id, task.env) == (group, name)
        assert task.example == example_order(8, place, epoch, sizes[name], True)[position]
