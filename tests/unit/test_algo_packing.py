"""Samples into rows, rows onto ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.algo.packing import Sample, micro_batches_of_rank, pack, positions
from trireme.messages import COLUMNS, Kept, MicroBatch, build_tokens

CAPACITY = 50


def samples_of(lengths: list[int]) -> list[Sample]:
    """Build samples whose tokens are their own number."""
    return [
        Sample(build_tokens(**{name: np.full(length, n) for name in COLUMNS} | {"loss_mask": np.ones(length)}), 1.0 + n)
        for n, length in enumerate(lengths)
    ]


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
def test_a_sample_goes_into_the_fullest_row_that_has_room(lengths: list[int]) -> None:
    free: list[int] = []
    placed = [(row, index) for row, indices in enumerate(pack(lengths, CAPACITY)) for index in indices]
    for row, index in sorted(placed, key=lambda entry: (-lengths[entry[1]], entry[1])):  # longest first
        fits = [room for room in free if room >= lengths[index]]
        assert (min(fits) == free[row]) if fits else row == len(free)
        free += [CAPACITY] * (row == len(free))
        free[row] -= lengths[index]


@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=20), seed=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_the_choices_of_a_sampler_stay_with_their_token(lengths: list[int], seed: int) -> None:
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
