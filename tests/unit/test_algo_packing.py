"""Samples into rows, rows onto ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.algo.packing import Sample, micro_batches_of_rank, pack, positions
from trireme.messages import COLUMNS, Kept, MicroBatch, build_tokens

CAPACITY = 50


def samples_of(lengths: list[int]) -> list[Sample]:
    """Each sample's tokens are its own number."""
    return [_sample(number, length) for number, length in enumerate(lengths)]


def _sample(number: int, length: int) -> Sample:
    columns = {name: np.full(length, number) for name in COLUMNS} | {"loss_mask": np.ones(length)}
    return Sample(build_tokens(**columns), temperature=1.0 + number)


def random_lengths(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, CAPACITY + 1, size=1 + 5 * seed).tolist()


def content(micro_batch: MicroBatch) -> list[tuple[int, int, float]]:
    """(number, length, temperature) of each sample, from the tokens themselves."""
    borders = np.cumsum([0, *micro_batch.lengths])
    found = []
    for start, stop, temperature in zip(borders, borders[1:], micro_batch.temperatures, strict=False):
        numbers = set(micro_batch.tokens.ids[start:stop].tolist())
        assert len(numbers) == 1, "samples are mixed up"
        found.append((numbers.pop(), int(stop - start), temperature))
    assert borders[-1] == micro_batch.tokens.length
    return found


def is_filler(micro_batch: MicroBatch) -> bool:
    return micro_batch.tokens.length == 1 and not micro_batch.tokens.loss_mask.any()


def test_rows_by_hand() -> None:
    # longest first: 7 opens a row, 6 another, 4 fits beside 6, then 3 beside 7, then 2 opens a third
    assert pack([4, 2, 7, 6, 3], capacity=10) == [[2, 4], [3, 0], [1]]


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_is_in_exactly_one_row_and_no_row_is_too_long(seed: int) -> None:
    lengths = random_lengths(seed)
    rows = pack(lengths, CAPACITY)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert max(sum(lengths[index] for index in row) for row in rows) <= CAPACITY


@pytest.mark.parametrize("seed", range(8))
def test_no_more_rows_than_promised(seed: int) -> None:
    lengths = random_lengths(seed)
    fewest = max(-(-sum(lengths) // CAPACITY), sum(2 * length > CAPACITY for length in lengths))
    assert len(pack(lengths, CAPACITY)) <= 11 / 9 * fewest + 1


def test_a_sample_that_fits_no_row_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="51 tokens in rows of 50"):
        pack([3, 51], CAPACITY)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", [0, 1, 4])
def test_all_ranks_together_hold_every_sample_once_in_equally_many_rows(world: int, seed: int) -> None:
    lengths = random_lengths(seed)
    samples = samples_of(lengths)
    shares = [micro_batches_of_rank(samples, capacity=CAPACITY, rank=rank, world=world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    fillers = [row for share in shares for row in share if is_filler(row)]
    assert len(fillers) < world
    found = [entry for share in shares for row in share if not is_filler(row) for entry in content(row)]
    assert sorted(found) == [(number, length, 1.0 + number) for number, length in enumerate(lengths)]


def test_the_same_samples_give_the_same_rows() -> None:
    lengths = [9, 9, 9, 20, 20, 41]
    once, again = (
        [content(row) for row in micro_batches_of_rank(samples_of(lengths), capacity=CAPACITY, rank=1, world=2)]
        for _ in range(2)
    )
    assert once == again


def test_positions_restart_with_each_sample() -> None:
    assert positions([3, 1, 2]).tolist() == [0, 1, 2, 0, 0, 1]


@given(lengths=st.lists(st.integers(1, CAPACITY), max_size=40), world=st.integers(1, 5))
def test_whatever_the_lengths_every_token_is_in_one_row_of_one_rank(lengths: list[int], world: int) -> None:
    samples = samples_of(lengths)
    shares = [micro_batches_of_rank(samples, capacity=CAPACITY, rank=rank, world=world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) >= 1
    rows = [row for share in shares for row in share]
    assert all(row.tokens.length <= CAPACITY for row in rows)
    found = [entry for row in rows if not is_filler(row) for entry in content(row)]
    assert sorted(found) == [(number, length, 1.0 + number) for number, length in enumerate(lengths)]
    assert sum(map(is_filler, rows)) < world or not lengths


@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40))
def test_no_row_is_begun_while_another_has_room(lengths: list[int]) -> None:
    rows = pack(lengths, CAPACITY)
    for one in range(len(rows)):
        for later in rows[one + 1 :]:
            assert sum(lengths[i] for i in rows[one]) + lengths[later[0]] > CAPACITY


@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40))
def test_a_sample_goes_into_the_fullest_row_that_has_room(lengths: list[int]) -> None:
    free: list[int] = []
    for row, index in _in_order(pack(lengths, CAPACITY), lengths):
        fits = [room for room in free if room >= lengths[index]]
        assert (min(fits) == free[row]) if fits else row == len(free)
        free += [CAPACITY] * (row == len(free))
        free[row] -= lengths[index]


def _in_order(rows: list[list[int]], lengths: list[int]) -> list[tuple[int, int]]:
    """(row, sample), longest first, ties as they were given."""
    placed = [(row, index) for row, indices in enumerate(rows) for index in indices]
    return sorted(placed, key=lambda entry: (-lengths[entry[1]], entry[1]))


@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=20), seed=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_what_a_sampler_could_choose_from_stays_with_its_token(lengths: list[int], seed: int) -> None:
    """Some samples were drawn from a cut vocabulary, in part; each token's choices are named after its sample."""
    rng = np.random.default_rng(seed)
    samples = samples_of(lengths)
    for number, sample in enumerate(samples):
        if number % 2:
            counts = rng.integers(0, 4, sample.tokens.length).astype(np.int32)
            ids = np.full(counts.sum(), number, np.int32)
            columns = {name: getattr(sample.tokens, name) for name in COLUMNS}
            sample.tokens = build_tokens(kept=Kept(counts, ids), **columns)
    for row in micro_batches_of_rank(samples, capacity=CAPACITY, rank=0, world=1):
        kept = row.tokens.kept
        if kept is None:
            assert not (row.tokens.ids % 2).any()
            continue
        assert len(kept.counts) == row.tokens.length
        assert np.repeat(row.tokens.ids, kept.counts).tolist() == kept.ids.tolist()
        assert not kept.counts[row.tokens.ids % 2 == 0].any()
