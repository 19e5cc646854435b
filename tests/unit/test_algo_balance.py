"""Rows of about equal cost, and what a row costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.algo.balance import Table
from trireme.algo.cost import LINEAR, Cost, cost_of
from trireme.algo.packing import deal, pack

CAPACITY = 50

# What 7 billion parameters look like.
SEVEN_BILLION = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}

COSTS = {
    "tokens": LINEAR,
    "flash": Cost(linear=1.0, attention=((None, 0.2),)),
    "window": Cost(linear=1.0, attention=((8, 0.4), (None, 0.1))),
    "masked": Cost(linear=1.0, attention=((None, 0.05),), is_by_row=True),
}

Dealt = list[list[list[int]]]


def slowest(dealt: Dealt, lengths: list[int], cost: Cost) -> float:
    """All ranks wait for the slowest in each round."""
    rounds = zip(*dealt, strict=True)
    return sum(max(cost.of_row([lengths[i] for i in row]) for row in rows) for rows in rounds)


def imbalance(dealt: Dealt, lengths: list[int], cost: Cost) -> float:
    total = sum(cost.of_row([lengths[i] for i in row]) for rows in dealt for row in rows)
    return slowest(dealt, lengths, cost) * len(dealt) / total - 1


def in_turn(lengths: list[int], ranks: int) -> Dealt:
    """The rows of best fit, as they come."""
    rows = pack(lengths, CAPACITY)
    rounds = max(1, -(-len(rows) // ranks))
    return [rows[rank::ranks] + [[]] * (rounds - len(rows[rank::ranks])) for rank in range(ranks)]


@given(
    lengths=st.lists(st.integers(1, CAPACITY), max_size=40),
    ranks=st.integers(1, 5),
    name=st.sampled_from(sorted(COSTS)),
)
def test_every_sample_is_dealt_once_in_rows_that_hold_it_and_no_rank_has_more_rows(
    lengths: list[int], ranks: int, name: str
) -> None:
    dealt = deal(lengths, capacity=CAPACITY, ranks=ranks, cost=COSTS[name])
    assert {len(rows) for rows in dealt} == {len(in_turn(lengths, ranks)[0])}
    assert sorted(index for rows in dealt for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= CAPACITY for rows in dealt for row in rows)


@given(
    lengths=st.lists(st.integers(1, CAPACITY), max_size=40),
    ranks=st.integers(1, 5),
    name=st.sampled_from(sorted(COSTS)),
)
def test_nobody_waits_longer_than_if_rows_were_dealt_as_they_come(lengths: list[int], ranks: int, name: str) -> None:
    dealt = deal(lengths, capacity=CAPACITY, ranks=ranks, cost=COSTS[name])
    before = slowest(in_turn(lengths, ranks), lengths, COSTS[name])
    assert slowest(dealt, lengths, COSTS[name]) <= before * (1 + 1e-12)


@given(lengths=st.lists(st.integers(1, CAPACITY), max_size=30), ranks=st.integers(2, 4))
def test_no_rank_has_much_more_than_another_over_all_turns(lengths: list[int], ranks: int) -> None:
    """By no more than one row: who has had least is given the most expensive."""
    dealt = deal(lengths, capacity=CAPACITY, ranks=ranks)
    rows = [[sum(lengths[i] for i in row) for row in rows] for rows in dealt]
    totals = list(map(sum, rows))
    assert max(totals) - min(totals) <= max(map(max, rows))


@pytest.mark.parametrize("name", sorted(COSTS))
@pytest.mark.parametrize("seed", range(6))
def test_it_comes_near_the_best_there_is(name: str, seed: int) -> None:
    """By trying all ways of dealing six samples into four rows."""
    lengths = np.random.default_rng(seed).integers(5, 30, 6).tolist()
    dealt = deal(lengths, capacity=CAPACITY, ranks=2, cost=COSTS[name])
    num_rows = 2 * len(dealt[0])
    best = min(slowest(way, lengths, COSTS[name]) for way in ways(tuple(lengths), num_rows, ranks=2))
    assert best <= slowest(dealt, lengths, COSTS[name]) <= 1.1 * best


def ways(lengths: tuple[int, ...], num_rows: int, *, ranks: int) -> Iterator[Dealt]:
    for rows in rows_of_every_way(lengths, num_rows):
        for order in itertools.permutations(rows):
            yield [list(order[rank::ranks]) for rank in range(ranks)]


@cache
def rows_of_every_way(lengths: tuple[int, ...], num_rows: int) -> list[tuple[list[int], ...]]:
    found = {}
    for places in itertools.product(range(num_rows), repeat=len(lengths)):
        rows = [[i for i, place in enumerate(places) if place == row] for row in range(num_rows)]
        if all(sum(lengths[i] for i in row) <= CAPACITY for row in rows):
            found[frozenset(map(tuple, rows))] = tuple(rows)
    return list(found.values())


def realistic(num: int, capacity: int, seed: int = 0) -> list[int]:
    """Answers of a model that reasons: most are short, some are as long as they may be."""
    lengths = np.random.default_rng(seed).lognormal(np.log(capacity / 10), 0.8, num)
    return np.clip(lengths, 32, capacity).astype(int).tolist()


@pytest.mark.parametrize(("num", "capacity"), [(512, 16384), (1024, 8192)])
def test_rows_of_realistic_lengths_are_full(num: int, capacity: int) -> None:
    lengths = realistic(num, capacity)
    assert sum(lengths) / (capacity * len(pack(lengths, capacity))) > 0.97


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa"])
def test_ranks_wait_for_less_than_three_percent_on_realistic_lengths(ranks: int, attention: str) -> None:
    lengths, cost = realistic(512, 16384), cost_of(SEVEN_BILLION, attention=attention)
    dealt = deal(lengths, capacity=16384, ranks=ranks, cost=cost)
    assert imbalance(dealt, lengths, cost) < 0.03


def test_a_single_long_sample_is_given_out_beside_others_as_long() -> None:
    lengths = [40, 40, *[10] * 8]
    dealt = deal(lengths, capacity=40, ranks=2, cost=Cost(linear=1.0, attention=((None, 1.0),)))
    assert [[sorted(lengths[i] for i in row) for row in rows] for rows in dealt] == [[[40], [10] * 4]] * 2


@given(lengths=st.lists(st.integers(1, CAPACITY), max_size=30))
@settings(max_examples=30)
def test_the_same_lengths_are_dealt_alike(lengths: list[int]) -> None:
    once, again = (deal(list(lengths), capacity=CAPACITY, ranks=3, cost=COSTS["flash"]) for _ in range(2))
    assert once == again


# what a row costs


def test_costs_by_hand() -> None:
    cost = Cost(linear=10.0, attention=((None, 1.0), (2, 3.0)))
    # 1 + 2 + 3 + 4 pairs; with a window of 2 the last two tokens see 2 each: 1 + 2 + 2 + 2
    assert cost.of_sample(4) == 40 + 10 + 3 * 7
    assert cost.of_row([4, 1]) == cost.of_sample(4) + 10 + 1 + 3
    masked = replace(cost, is_by_row=True)
    assert masked.of_row([4, 1]) == 50 + 25 * 4
    assert masked.of_sample(4) == 40


def test_the_cost_of_a_model_by_hand() -> None:
    # a head of 16 x 100; in each of 2 layers 16 x 16 for queries and outputs, 16 x 8 for keys and values, 3 x 16 x 32
    shape = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 100,
    }
    weights = 1600 + 2 * (2 * 256 + 2 * 128 + 3 * 512)
    cost = cost_of(shape, attention="flash_attention_2")
    assert cost == Cost(linear=2 * weights, attention=((None, 4 * 16 * 2),))
    assert cost.of_sample(10) == 2 * weights * 10 + 4 * 16 * 2 * 55
    masked = replace(cost, is_by_row=True)
    assert cost_of(shape, attention="sdpa") == cost  # samples attend apart
    assert cost_of(shape, attention="eager") == cost_of(shape, attention="sdpa", cp=2) == masked
    windowed = cost_of(shape | {"model_type": "mistral", "sliding_window": 8}, attention="sdpa")
    assert windowed == Cost(linear=2 * weights, attention=((8, 4 * 16 * 2),), is_by_row=True)


def test_what_nothing_is_known_of_costs_its_tokens() -> None:
    assert cost_of({"model_type": "new"}, attention="sdpa") == LINEAR
    assert LINEAR.of_row([3, 4]) == 7


@pytest.mark.parametrize("seed", range(20))
def test_even_rows_are_those_that_looking_at_every_row_would_give(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, rng.integers(1, 80)).tolist()
    capacity, num_rows = 64, int(rng.integers(1, 60))
    found = Table(lengths, capacity, LINEAR).even_rows(num_rows)
    rows: list[list[int]] | None = [[] for _ in range(num_rows)]
    for index in sorted(range(len(lengths)), key=lambda i: (-LINEAR.of_sample(lengths[i]), i)):
        free = [row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= capacity]
        if not free:
            rows = None
            break
        min(free, key=lambda row: sum(LINEAR.of_sample(lengths[i]) for i in row)).append(index)
    assert found == rows
