"""Pack samples into rows and rows onto ranks; find prefixes that samples of a row share.

All is deterministic: the same samples give the same rows on every machine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trireme.algo.balance import Table
from trireme.algo.model.flops import LINEAR, Cost
from trireme.messages import MicroBatch, Tokens, build_tokens, concat_tokens

GROWTH = 1.25


@dataclass(slots=True, eq=False)
class Sample:
    """A sequence to train on, with the temperature at which it was sampled."""

    tokens: Tokens
    temperature: float
    source: str = ""  # its environment, if that decides its loss


def num_learned(samples: Iterable[Sample]) -> list[int]:
    """Return the tokens of each sample that the policy loss trains. A first token never counts, as no token before it
    predicts it."""
    return [int(np.count_nonzero(sample.tokens.by_policy_loss[1:])) for sample in samples]


def pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack samples by best-fit decreasing: each sample, longest first, into the fullest row that has room for it.

    Takes at most 11/9 of the fewest possible rows, plus four (Johnson et al. 1974).

    Returns:
        The indices of the samples of each row; longest first within a row, ties in the order given.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row) of every row, in order
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[index] <= capacity, f"a sample of {lengths[index]} tokens in rows of {capacity}"
        # The first row in the order of room is the fullest that fits; if there is none, a new row begins.
        place = bisect_left(rooms, (lengths[index], 0))
        free, row = rooms.pop(place) if place < len(rooms) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(rooms, (free - lengths[index], row))
    return rows


def buckets(lengths: list[int]) -> list[list[int]]:
    """Group samples of similar length: padded to its longest sample, a bucket has less than `GROWTH` times the tokens.

    Returns:
        The indices of each bucket's samples, in the order given; shortest bucket first.
    """
    found: list[list[int]] = []
    shortest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if not found or lengths[index] > shortest * GROWTH:
            found.append([])
            shortest = lengths[index]
        found[-1].append(index)
    return [sorted(bucket) for bucket in found]


def deal(lengths: list[int], *, capacity: int, ranks: int, cost: Cost = LINEAR) -> list[list[list[int]]]:
    """Deal samples to ranks: return `[rank][micro-batch]` lists of indices.

    All ranks get equally many rows, as few as best-fit needs, and at least one (collectives need it). The ranks' first
    rows are trained on at the same time, then their second ones, and so on: in each of these rounds all wait for the
    slowest. So rows of about equal cost make a round, and samples change places between those until that helps no more.
    """
    packed = pack(lengths, capacity)
    num_rows = ranks * max(1, -(-len(packed) // ranks))
    table = Table(lengths, capacity, cost)

    # Best-fit fills rows unevenly. Even rows may not exist within the capacity, so the faster of both is taken.
    candidates = [packed + [[] for _ in range(num_rows - len(packed))]]
    if (evened := table.even_rows(num_rows)) is not None:
        candidates.append(evened)
    best = min((table.exchange(rows, ranks) for rows in candidates), key=lambda rows: table.slowest(rows, ranks))
    return table.to_ranks(best, ranks)


def micro_batches_of_rank(
    samples: list[Sample], *, capacity: int, rank: int, world: int, cost: Cost = LINEAR
) -> list[MicroBatch]:
    """Return this rank's rows, with empty ones if samples run out."""
    dealt = deal([sample.tokens.length for sample in samples], capacity=capacity, ranks=world, cost=cost)
    return rows_of(samples, dealt[rank])


def rows_of(samples: list[Sample], rows: list[list[int]]) -> list[MicroBatch]:
    return [
        MicroBatch(
            tokens=concat_tokens([samples[i].tokens for i in row]),
            lengths=[samples[i].tokens.length for i in row],
            temperatures=[samples[i].temperature for i in row],
            sources=[samples[i].source for i in row] if any(samples[i].source for i in row) else [],
        )
        if row
        else unsampled_row([0], [1])  # keeps a rank in step with the others
        for row in rows
    ]


def unsampled_row(ids: list[int], lengths: list[int]) -> MicroBatch:
    """Build a row of tokens that no policy sampled and no loss looks at."""
    zeros = [0.0] * len(ids)
    tokens = build_tokens(ids=ids, loss_mask=[0] * len(ids), logprobs=zeros, advantages=zeros, versions=[-1] * len(ids))
    return MicroBatch(tokens=tokens, lengths=lengths, temperatures=[1.0] * len(lengths))


def positions(lengths: list[int]) -> np.ndarray:
    """[T] positions that restart with each sample: transformers reads the sample borders off the restarts."""
    return np.concatenate([np.arange(length) for length in lengths]).astype(np.int64)


@dataclass(frozen=True)
class SharedPrefixes:
    """The tokens of a row that are computed, and which of them stands for each of the row's T tokens.

    A causal model computes a token from the tokens before it alone. Rollouts of a group begin with the same prompt and
    often continue alike for a while; up to there, one sample stands for all of them.

    Example:
        share_prefixes(ids=[7, 8, 9, 7, 8, 5], lengths=[3, 3])  # kept=[0, 1, 2, 5], places=[0, 1, 2, 0, 1, 3]
    """

    kept: np.ndarray  # [P] int64: tokens of the row that are computed, ascending
    places: np.ndarray  # [T] int64: the index in `kept` of the token that stands for each token


def share_prefixes(ids: np.ndarray, lengths: list[int]) -> SharedPrefixes:
    """Find the tokens before which samples are the same.

    In alphabetical order, each sample shares its longest prefix with a neighbour, so neighbours are compared.
    """
    starts = np.cumsum([0, *lengths[:-1]])
    samples = [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    owners = np.arange(len(ids))

    # Big-endian bytes sort as the ids do, so that samples which begin alike become neighbours.
    in_order = sorted(range(len(samples)), key=lambda number: samples[number].astype(">i8").tobytes())
    for before, number in pairwise(in_order):
        shortest = min(lengths[before], lengths[number])
        different = np.flatnonzero(samples[before][:shortest] != samples[number][:shortest])
        alike = int(different[0]) if len(different) else shortest
        # Owners are passed on: the neighbour's prefix may belong to a sample before it already.
        owners[starts[number] : starts[number] + alike] = owners[starts[before] : starts[before] + alike]
    kept = np.unique(owners)
    return SharedPrefixes(kept, np.searchsorted(kept, owners))


def num_distinct(samples: list[np.ndarray]) -> int:
    """Count the tokens of samples of one type, those that stand behind the same beginning once."""
    # As bytes, because thousands of short samples would spend most of their time in numpy's calls.
    in_order = sorted(sample.tobytes() for sample in samples)
    shared = sum(_num_alike(*both) // samples[0].itemsize for both in pairwise(in_order))
    return sum(map(len, samples)) - shared


def _num_alike(one: bytes, other: bytes) -> int:
    """Return how many bytes are the same before the first that differs."""
    shortest = min(len(one), len(other))
    bits = int.from_bytes(one[:shortest], "little") ^ int.from_bytes(other[:shortest], "little")
    return ((bits & -bits).bit_length() - 1) // 8 if bits else shortest
