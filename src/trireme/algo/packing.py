"""Samples into packed rows, rows onto ranks. Pure and deterministic: the same samples give the same rows anywhere."""

from __future__ import annotations

import numpy as np

from trireme.messages import MicroBatch, Tokens, build_tokens, concat_tokens


class Sample:
    """A sequence to train on, with the temperature at which it was sampled."""

    __slots__ = ("temperature", "tokens")

    def __init__(self, tokens: Tokens, temperature: float) -> None:
        self.tokens = tokens
        self.temperature = temperature


def pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: at most 11/9 of the fewest rows possible, plus one (Johnson 1973).

    Args:
        lengths: tokens of each sample, none above `capacity`.
        capacity: tokens of a row.

    Returns:
        The indices of the samples of each row; longest first within a row, ties in the order given.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[index] <= capacity, f"a sample of {lengths[index]} tokens in rows of {capacity}"
        for row, free in enumerate(room):
            if lengths[index] <= free:
                rows[row].append(index)
                room[row] -= lengths[index]
                break
        else:
            rows.append([index])
            room.append(capacity - lengths[index])
    return rows


def micro_batches_of_rank(samples: list[Sample], *, capacity: int, rank: int, world: int) -> list[MicroBatch]:
    """This rank's rows. All ranks get equally many (collectives need it); where rows run out, empty ones fill up."""
    rows = pack([sample.tokens.length for sample in samples], capacity)
    per_rank = -(-len(rows) // world)
    mine = rows[rank::world]
    packed = [_to_micro_batch([samples[i] for i in row]) for row in mine]
    return packed + [empty_micro_batch()] * (per_rank - len(packed))


def _to_micro_batch(samples: list[Sample]) -> MicroBatch:
    return MicroBatch(
        tokens=concat_tokens([sample.tokens for sample in samples]),
        lengths=[sample.tokens.length for sample in samples],
        temperatures=[sample.temperature for sample in samples],
    )


def empty_micro_batch() -> MicroBatch:
    """One token that no loss looks at: keeps a rank in step with the others."""
    tokens = build_tokens(ids=[0], loss_mask=[0], logprobs=[0.0], advantages=[0.0], versions=[-1])
    return MicroBatch(tokens=tokens, lengths=[1], temperatures=[1.0])


def positions(lengths: list[int]) -> np.ndarray:
    """[T] positions that restart with each sample: transformers reads the sample borders off the restarts."""
    return np.concatenate([np.arange(length) for length in lengths]).astype(np.int64)
