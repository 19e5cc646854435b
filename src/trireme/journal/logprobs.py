"""The trainer's logprobs of the tokens that a step trained on. (The engine's are in the journal.)

One file per rank and step, written after the step, for display only: a run does not depend on it, and it may be
missing. Samples are found by their content, so it does not matter how they were packed or by how many ranks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from trireme.messages import COLUMNS, MicroBatch, Tokens, decode_as, encode


class Scored(msgspec.Struct, frozen=True):
    """The logprobs of one rank in one step.

    Example:
        Scored(step=12, samples=[b"...", b"..."], counts=[3, 2], logprobs=[-0.1, -2.3, -0.4, -0.9, -1.2])
    """

    step: int
    samples: list[bytes]  # the `identity` of each of S samples
    counts: np.ndarray  # [S] int32: number of trained tokens of each sample
    logprobs: np.ndarray  # [sum of counts] float32, at the sampling temperature, before the step


def path_of(folder: Path, step: int, rank: int) -> Path:
    return folder / f"batch_{step:06d}.rank_{rank}.msgpack"


def write_logprobs(folder: Path, step: int, rank: int, rows: Sequence[MicroBatch], logprobs: np.ndarray) -> None:
    """Write a rank's logprobs without syncing: readers skip a file that a crash has truncated.

    Args:
        logprobs: those of the trained tokens of all rows, one row after the other.

    Raises: OSError if it cannot be written.
    """
    # Take packed rows apart again: readers look samples up by content, whatever row they were packed into.
    samples = []
    for row in rows:
        begin = 0
        for length in row.lengths:
            part = slice(begin, begin + length)
            columns = {name: getattr(row.tokens, name)[part] for name in COLUMNS}
            pictures = [picture for picture in row.tokens.pictures if part.start <= picture.place < part.stop]
            weights = None if row.tokens.ce_weights is None else row.tokens.ce_weights[part]
            samples.append(Tokens(**columns, pictures=pictures, ce_weights=weights))
            begin += length

    counts = np.array([int(counting(sample).sum()) for sample in samples], np.int32)
    assert len(logprobs) == counts.sum(), f"{len(logprobs)} logprobs for {counts.sum()} tokens that count"

    # Renamed when complete, so that a reader never sees half a file of a running trainer.
    path = path_of(folder, step, rank)
    partial = path.with_name(f".{path.name}.partial")
    folder.mkdir(exist_ok=True)
    try:
        partial.write_bytes(encode(Scored(step, [identity(sample) for sample in samples], counts, logprobs)))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_logprobs(folder: Path, step: int) -> dict[bytes, np.ndarray]:
    """Return logprobs by sample. Files that are missing or cannot be read are skipped."""
    found: dict[bytes, np.ndarray] = {}
    for path in folder.glob(f"batch_{step:06d}.rank_*.msgpack"):
        # A file of another version, or one that a crash has cut short, costs only the display of its samples.
        with suppress(OSError, msgspec.DecodeError, ValueError, TypeError):
            scored: Scored = decode_as(Scored, path.read_bytes())
            parts = np.split(scored.logprobs, np.cumsum(scored.counts)[:-1])
            found |= dict(zip(scored.samples, parts, strict=True))
    return found


def logprobs_of(sample: Tokens, known: dict[bytes, np.ndarray]) -> np.ndarray | None:
    """Return [T] float32, NaN for tokens that are not trained on; None if the logprobs are unknown."""
    counts, said = counting(sample), known.get(identity(sample))
    if said is None or len(said) != counts.sum():
        return None

    logprobs = np.full(sample.length, np.nan, np.float32)
    logprobs[counts] = said
    return logprobs


def counting(sample: Tokens) -> np.ndarray:
    """Return [T] bool: the tokens that the policy loss trains, never the first of a sample, which has no prefix."""
    counts = sample.by_policy_loss
    counts[:1] = False
    return counts


def identity(sample: Tokens) -> bytes:
    """Return a key of a sample: a digest of its token ids, the engine's logprobs, the versions and the pictures."""
    digest = hashlib.blake2b(digest_size=8)
    for column in (sample.ids, sample.logprobs, sample.versions):
        digest.update(np.ascontiguousarray(column).data)
    for picture in sample.pictures:
        digest.update(picture.digest.encode())
    return digest.digest()
