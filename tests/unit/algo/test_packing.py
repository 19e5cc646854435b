"""Samples into rows of about equal cost, rows onto ranks, and what a row costs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.algo.balance import Table
from trireme.algo.model.flops import LINEAR, Cost, cost_of
from trireme.algo.packing import Sample, deal, micro_batches_of_rank, pack, positions
from trireme.messages import COLUMNS, Kept, MicroBatch, build_tokens

CAPACITY = 50
batches = st.lists(st.integers(1, CAPACITY), max_size=40)  # lengths of samples

COSTS = {
    "tokens": LINEAR, "flash": Cost(linear=1.0, attention=((None, 0.2),)),
    "window": Cost(linear=1.0, attention=((8, 0.4), (None, 0.1))),
    "masked": Cost(linear=1.0, attention=((None, 0.05),), is_by_row=True),
}  # fmt: skip


def samples_of(lengths: list[int]) -> list[Sample]:
    """Build samples whose tokens are their own number. Tokens of every other one were drawn from 0 to 3 of these."""
    samples = []
    for n, length in enumerate(lengths):
        columns = {name: np.full(length, n) for name in COLUMNS} | {"loss_mask": np.ones(length)}
        counts = (np.arange(length, dtype=np.int32) + n) % 4
        kept = Kept(counts, np.full(counts.sum(), n, np.int32)) if n % 2 else None
        samples.append(Sample(build_tokens(kept=kept, **columns), 1.0 + n))
    return samples


def content(micro_batch: MicroBatch) -> list[tuple[int, int, float]]:
    """(number, length, temperature) of each sample, from the tokens themselves."""
    parts = np.split(micro_batch.tokens.ids, np.cumsum(micro_batch.lengths))
    assert len(parts.pop()) == 0
    assert [len(set(part.tolist())) for part in parts] == [1] * len(parts), "samples are mixed up"
    lengths = map(len, parts)
    return list(zip((int(part[0]) for part in parts), lengths, micro_batch.temperatures, strict=True))


def is_filler(micro_batch: MicroBatch) -> bool:
    return micro_batch.tokens.length == 1 and not micro_batch.tokens.loss_mask.any()


@given(lengths=batches, world=st.integers(1, 5))
def test_whatever_the_lengths_every_token_is_in_one_row_of_one_rank(lengths, world):
    samples = samples_of(lengths)
    shares = [micro_batches_of_rank(samples, capacity=CAPACITY, rank=rank, world=world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) >= 1
    rows = [row for share in shares for row in share]
    assert all(row.tokens.length <= CAPACITY for row in rows)
    found = [entry for row in rows if not is_filler(row) for entry in content(row)]
    assert sorted(found) == [(number, length, 1.0 + number) for number, length in enumerate(lengths)]
    assert sum(map(is_filler, rows)) < world or not lengths
    for row in rows:
        numbers = row.tokens.ids
        counts = np.where(numbers % 2, (positions(row.lengths) + numbers) % 4, 0)
        kept = row.tokens.kept or Kept(0 * numbers, numbers[:0])
        assert kept.counts.tolist() == counts.tolist()
        assert kept.ids.tolist() == np.repeat(numbers, counts).tolist()


def fitted(lengths: list[int], num_rows: int, pick) -> list[list[int]] | None:
    """Each sample, longest first, into the fullest or emptiest row that has room; None where there is none."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        free = [row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= CAPACITY]
        if not free:
            return None
        pick(free, key=lambda row: sum(lengths[i] for i in row)).append(index)
    return rows


@given(lengths=batches, num_rows=st.integers(1, 40))
def test_a_sample_goes_into_the_row_that_a_look_at_every_row_finds(lengths, num_rows):
    assert pack(lengths, CAPACITY) == [row for row in fitted(lengths, len(lengths), max) if row]
    assert Table(lengths, CAPACITY, LINEAR).even_rows(num_rows) == fitted(lengths, num_rows, min)


def slowest(dealt: list[list[list[int]]], lengths: list[int], cost: Cost) -> float:
    rounds = zip(*dealt, strict=True)
    return sum(max(cost.of_row([lengths[i] for i in row]) for row in rows) for rows in rounds)


@given(lengths=batches, ranks=st.integers(1, 5), name=st.sampled_from(sorted(COSTS)))
@settings(max_examples=150)
def test_samples_are_dealt_once_in_as_few_rows_and_no_slower_than_in_turn(lengths, ranks, name):
    cost = COSTS[name]
    dealt, rows = deal(lengths, capacity=CAPACITY, ranks=ranks, cost=cost), pack(lengths, CAPACITY)
    rows += [[]] * (-len(rows) % ranks if rows else ranks)
    in_turn = [rows[rank::ranks] for rank in range(ranks)]
    assert {len(own) for own in dealt} == {len(in_turn[0])}
    assert sorted(index for rows in dealt for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= CAPACITY for rows in dealt for row in rows)
    assert slowest(dealt, lengths, cost) <= slowest(in_turn, lengths, cost) * (1 + 1e-12)
    # the rank that has had least gets the most expensive row of a round: totals differ by one row at most
    costs = [[cost.of_row([lengths[i] for i in row]) for row in rows] for rows in dealt]
    totals = list(map(sum, costs))
    assert max(totals) - min(totals) <= max(map(max, costs)) * (1 + 1e-12)


@pytest.mark.parametrize("name", sorted(COSTS))
@pytest.mark.parametrize("seed", range(4))
def test_the_deal_comes_near_the_best_of_all(name, seed):
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


QWEN_7B = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN_7B |= {"model_type": "qwen2", "intermediate_size": 18944, "vocab_size": 152064}


@pytest.mark.parametrize(("num", "capacity", "ranks"), [(512, 16384, 8), (1024, 8192, 8), (256, 4096, 16)])
def test_ranks_with_realistic_rows_wait_less_than_three_percent(num, capacity, ranks):
    """Answers of a reasoning model: most are short, some are as long as they may be."""
    lengths = np.random.default_rng(0).lognormal(np.log(capacity / 10), 0.8, num)
    lengths = np.clip(lengths, 32, capacity).astype(int).tolist()
    assert sum(lengths) / (capacity * len(pack(lengths, capacity))) > 0.97
    for attention in ("flash_attention_2", "sdpa"):
        cost = cost_of(QWEN_7B, attention=attention)
        dealt = deal(lengths, capacity=capacity, ranks=ranks, cost=cost)
        total = sum(cost.of_row([lengths[i] for i in row]) for rows in dealt for row in rows)
        assert slowest(dealt, lengths, cost) * ranks < 1.03 * total


def test_costs_of_samples_and_models_and_positions_by_hand():
    cost = Cost(linear=10.0, attention=((None, 1.0), (2, 3.0)))
    # 1 + 2 + 3 + 4 pairs; with a window of 2 the last two tokens see 2 each: 1 + 2 + 2 + 2
    assert cost.of_sample(4) == 40 + 10 + 3 * 7
    assert cost.of_row([4, 1]) == cost.of_sample(4) + 10 + 1 + 3
    masked = replace(cost, is_by_row=True)
    assert masked.of_row([4, 1]) == 50 + 25 * 4
    assert masked.of_sample(4) == 40
    assert cost_of({"model_type": "new"}, attention="sdpa") == LINEAR  # nothing is known of it
    assert LINEAR.of_row([3, 4]) == 7
    assert positions([3, 1, 2]).tolist() == [0, 1, 2, 0, 0, 1]
    # a head of 16 x 100; in each of 2 layers 16 x 16 for queries and outputs, 16 x 8 for keys and values, 3 x 16 x 32
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"model_type": "llama", "intermediate_size": 32, "vocab_size": 100}
    weights = 1600 + 2 * (2 * 256 + 2 * 128 + 3 * 512)
    cost = cost_of(shape, attention="flash_attention_2")
    assert cost == Cost(linear=2 * weights, attention=((None, 4 * 16 * 2),))
    assert cost.of_sample(10) == 2 * weights * 10 + 4 * 16 * 2 * 55
    masked = replace(cost, is_by_row=True)
    assert cost_of(shape, attention="sdpa") == cost  # samples attend apart
    assert cost_of(shape, attention="eager") == cost_of(shape, attention="sdpa", cp=2) == masked
    windowed = cost_of(shape | {"model_type": "mistral", "sliding_window": 8}, attention="sdpa")
    assert windowed == Cost(linear=2 * weights, attention=((8, 4 * 16 * 2),), is_by_row=True)
