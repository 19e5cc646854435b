"""Rows of about equal cost, and what a row costs."""

from __future__ import annotations

import itertools
from dataclasses import replace

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


def slowest(dealt: list[list[list[int]]], lengths: list[int], cost: Cost) -> float:
    """All ranks wait for the slowest in each round."""
    rounds = zip(*dealt, strict=True)
    return sum(max(cost.of_row([lengths[i] for i in row]) for row in rows) for rows in rounds)


def deal_in_turn(lengths: list[int], ranks: int) -> list[list[list[int]]]:
    """Deal the rows of best fit as they come."""
    rows = pack(lengths, CAPACITY)
    rounds = max(1, -(-len(rows) // ranks))
    return [rows[rank::ranks] + [[]] * (rounds - len(rows[rank::ranks])) for rank in range(ranks)]


@given(
    lengths=st.lists(st.integers(1, CAPACITY), max_size=40),
    ranks=st.integers(1, 5),
    name=st.sampled_from(sorted(COSTS)),
)
@settings(max_examples=150)
def test_samples_are_dealt_once_in_as_few_rows_and_no_slower_than_in_turn(
    lengths: list[int], ranks: int, name: str
) -> None:
    cost = COSTS[name]
    dealt, in_turn = deal(lengths, capacity=CAPACITY, ranks=ranks, cost=cost), deal_in_turn(lengths, ranks)
    assert {len(rows) for rows in dealt} == {len(in_turn[0])}
    assert sorted(index for rows in dealt for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= CAPACITY for rows in dealt for row in rows)
    assert slowest(dealt, lengths, cost) <= slowest(in_turn, lengths, cost) * (1 + 1e-12)
    # the rank that has had least gets the most expensive row of a round: totals differ by one row at most
    costs = [[cost.of_row([lengths[i] for i in row]) for row in rows] for rows in dealt]
    totals = list(map(sum, costs))
    assert max(totals) - min(totals) <= max(map(max, costs)) * (1 + 1e-12)


@pytest.mark.parametrize("name", sorted(COSTS))
@pytest.mark.parametrize("seed", range(4))
def test_the_deal_comes_near_the_best_of_all(name: str, seed: int) -> None:
    """All ways of dealing six samples into four rows are tried."""
    lengths = np.random.default_rng(seed).integers(12, 32, 6).tolist()
    cost = COSTS[name]
    dealt = deal(lengths, capacity=CAPACITY, ranks=2, cost=cost)
    num_rows, costs_of_each_way = 2 * len(dealt[0]), []
    for places in itertools.product(range(num_rows), repeat=len(lengths)):
        rows = [[length for length, place in zip(lengths, places, strict=True) if place == n] for n in range(num_rows)]
        if max(map(sum, rows)) <= CAPACITY:
            costs = sorted(map(cost.of_row, rows), reverse=True)
            costs_of_each_way.append(sum(costs[::2]))  # rows of about equal cost share a round
    assert min(costs_of_each_way) <= slowest(dealt, lengths, cost) * (1 + 1e-12)
    assert slowest(dealt, lengths, cost) <= 1.1 * min(costs_of_each_way)


@pytest.mark.parametrize(("num", "capacity"), [(512, 16384), (1024, 8192)])
def test_rows_of_realistic_lengths_are_full_and_ranks_wait_for_less_than_three_percent(num: int, capacity: int) -> None:
    """Answers of a reasoning model: most are short, some are as long as they may be."""
    lengths = np.random.default_rng(0).lognormal(np.log(capacity / 10), 0.8, num)
    lengths = np.clip(lengths, 32, capacity).astype(int).tolist()
    assert sum(lengths) / (capacity * len(pack(lengths, capacity))) > 0.97
    for attention in ("flash_attention_2", "sdpa"):
        cost = cost_of(SEVEN_BILLION, attention=attention)
        dealt = deal(lengths, capacity=capacity, ranks=8, cost=cost)
        total = sum(cost.of_row([lengths[i] for i in row]) for rows in dealt for row in rows)
        assert slowest(dealt, lengths, cost) * 8 < 1.03 * total


@pytest.mark.parametrize("seed", range(20))
def test_even_rows_are_those_found_by_looking_at_every_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, rng.integers(1, 80)).tolist()
    capacity, num_rows = 64, int(rng.integers(1, 60))
    found = Table(lengths, capacity, LINEAR).even_rows(num_rows)
    rows: list[list[int]] | None = [[] for _ in range(num_rows)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        free = [row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= capacity]
        if not free:
            rows = None
            break
        min(free, key=lambda row: sum(lengths[i] for i in row)).append(index)
    assert found == rows


def test_a_single_long_sample_is_dealt_in_one_round_with_others_as_long() -> None:
    lengths = [40, 40, *[10] * 8]
    dealt = deal(lengths, capacity=40, ranks=2, cost=Cost(linear=1.0, attention=((None, 1.0),)))
    assert [[sorted(lengths[i] for i in row) for row in rows] for rows in dealt] == [[[40], [10] * 4]] * 2


# what a row costs


def test_costs_by_hand() -> None:
    cost = Cost(linear=10.0, attention=((None, 1.0), (2, 3.0)))
    # 1 + 2 + 3 + 4 pairs; with a window of 2 the last two tokens see 2 each: 1 + 2 + 2 + 2
    assert cost.of_sample(4) == 40 + 10 + 3 * 7
    assert cost.of_row([4, 1]) == cost.of_sample(4) + 10 + 1 + 3
    masked = replace(cost, is_by_row=True)
    assert masked.of_row([4, 1]) == 50 + 25 * 4
    assert masked.of_sample(4) == 40
    assert cost_of({"model_type": "new"}, attention="sdpa") == LINEAR  # nothing is known of it
    assert LINEAR.of_row([3, 4]) == 7


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
