"""Supervised data: samples on disk, and the batches that are made of them.

At each start, rank 0 renders and tokenizes all conversations into `data/` in the run's folder. Every rank maps these
files into memory, so no rank holds all data. The samples of a batch are a function of the step, and of how many
samples the steps before it took.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path

import numpy as np

from trireme.algo.packing import Sample
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.base.paths import replace_folder
from trireme.messages import Picture, build_tokens
from trireme.trainer.sft.rendering import Tokenized

log = get_logger("data")

_ARRAYS = ("ids", "mask", "starts", "pictures")
_PICTURE = np.dtype([("place", "i8"), ("rows", "i4"), ("columns", "i4"), ("digest", "S64")])  # places count all samples
ENDLESS = 2**62  # steps
_SAY_EVERY = 10_000  # conversations


@dataclass
class Counts:
    """Counts of the conversations of one source and of their samples."""

    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    learned: int = 0  # tokens
    split: int = 0  # conversations of several samples, since the template rewrites earlier turns
    cut: int = 0  # samples, at the end
    dropped: int = 0  # samples, as too long
    parted: int = 0  # samples, as one of their pictures would be cut
    empty: int = 0  # samples of which nothing that is learned was left

    def __str__(self) -> str:
        tokens = f"{self.tokens} tokens, of which {self.learned} are learned"
        totals = f"{self.conversations} conversations, {self.samples} samples, {tokens}"
        events = [
            (self.split, "split, as the template rewrites earlier turns"),
            (self.cut, "cut to seq_len"),
            (self.dropped, "left out as longer than seq_len"),
            (self.parted, "left out as seq_len ends within a picture"),
            (self.empty, "left out as nothing to learn was left in seq_len"),
        ]
        return "; ".join([totals, *(f"{number} {what}" for number, what in events if number)])


class SampleWriter:
    """Collects the samples of one source and writes them to disk."""

    def __init__(self, *, seq_len: int, drop: bool) -> None:
        self.counts = Counts()
        self._seq_len = seq_len
        self._drop = drop
        self._ids, self._mask, self._starts = array("i"), bytearray(), array("q", [0])
        self._pictures: list[tuple[int, int, int, str]] = []  # see _PICTURE

    def add(self, samples: list[Tokenized]) -> None:
        """Add the samples of one conversation."""
        self.counts.conversations += 1
        self.counts.split += len(samples) > 1

        # Every sample that is left out is counted, so that the user sees what `seq_len` costs.
        for sample in samples:
            if len(sample.ids) > self._seq_len and self._drop:
                self.counts.dropped += 1
                continue

            ids, mask = sample.ids[: self._seq_len], sample.mask[: self._seq_len]
            # A cut must not go through a picture: the encoder needs all of its tokens.
            pictures = [picture for picture in sample.pictures if picture.place < self._seq_len]
            if pictures and pictures[-1].place + pictures[-1].num_tokens > self._seq_len:
                self.counts.parted += 1
                continue

            mask[:1] = [0]  # no token before the first one predicts it
            if not any(mask):
                self.counts.empty += 1
                continue

            self.counts.cut += len(ids) < len(sample.ids)
            self.counts.samples += 1
            self.counts.tokens += len(ids)
            self.counts.learned += sum(mask)

            # Places of pictures count the tokens of all samples, as the array of ids does.
            self._pictures += [(len(self._ids) + p.place, p.rows, p.columns, p.digest) for p in pictures]
            self._ids.extend(ids)
            self._mask.extend(mask)
            self._starts.append(len(self._ids))

    def write(self, folder: Path) -> None:
        """Write the samples into `folder`, replacing those of an earlier start.

        Raises:
            ConfigError: the folder holds anything else. It is not changed.
        """
        if folder.exists() and not (folder / "starts.npy").exists():
            raise ConfigError(
                f"{folder} holds no samples of an earlier start (it has no starts.npy) - expected that, or no such "
                "folder, because the samples of this run go there. Choose another `output_dir`."
            )

        # Written under another name first: a killed process leaves no half of the data to resume from.
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, values in self.arrays().items():
            np.save(partial / f"{name}.npy", values)
        replace_folder(partial, folder)

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "ids": np.frombuffer(self._ids, dtype=np.int32),
            "mask": np.frombuffer(self._mask, dtype=np.uint8),
            "starts": np.frombuffer(self._starts, dtype=np.int64),
            "pictures": np.array(self._pictures, dtype=_PICTURE),
        }

    def first_difference(self, folder: Path) -> int | None:
        """Return the first sample that differs from those that an earlier start wrote; None if all are the same.

        The number of samples is returned if all of the shorter of both are the same.
        """
        if not folder.exists():  # a source that was not there before
            return 0
        before = {name: np.load(folder / f"{name}.npy") for name in _ARRAYS}
        now = self.arrays()

        # Most resumed runs end here, without a look at single samples.
        if all(np.array_equal(before[name], now[name]) for name in _ARRAYS):
            return None
        for sample in range(min(len(before["starts"]), len(now["starts"])) - 1):
            parts = [slice(int(each["starts"][sample]), int(each["starts"][sample + 1])) for each in (before, now)]
            if any(not np.array_equal(before[name][parts[0]], now[name][parts[1]]) for name in ("ids", "mask")):
                return sample
        return min(len(before["starts"]), len(now["starts"])) - 1


class SampleFiles:
    """Reads what `SampleWriter` wrote; only what is asked for is read from disk."""

    def __init__(self, folder: Path) -> None:
        self._ids, self._mask, self._starts, self._pictures = (  # an empty array cannot be mapped
            np.load(path, mmap_mode="r" if path.stat().st_size > 4096 else None)
            for path in (folder / f"{name}.npy" for name in _ARRAYS)
        )
        self._places = np.ascontiguousarray(self._pictures["place"])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Sample:
        part = slice(int(self._starts[index]), int(self._starts[index + 1]))

        first, last = np.searchsorted(self._places, [part.start, part.stop])
        pictures = self._pictures[first:last].tolist()
        zeros = np.zeros(part.stop - part.start)

        # Behaviour logprobs, advantages and versions mean nothing here, but rows have these columns.
        tokens = build_tokens(
            ids=self._ids[part],
            loss_mask=self._mask[part],
            logprobs=zeros,
            advantages=zeros,
            versions=zeros - 1,
            pictures=[Picture(digest.decode(), place - part.start, *grid) for place, *grid, digest in pictures],
        )
        return Sample(tokens, 1.0)


def write_samples(
    conversations: Iterable[list[Tokenized]],
    train: SampleWriter,
    held_out: SampleWriter | None = None,
    *,
    held_out_fraction: float = 0.0,
) -> None:
    """Write samples, holding out some conversations evenly over the data, so that sorted data are represented."""
    for number, samples in enumerate(conversations):
        is_held_out = floor((number + 1) * held_out_fraction) > floor(number * held_out_fraction)
        writer = held_out if held_out and is_held_out else train
        writer.add(samples)
        if (number + 1) % _SAY_EVERY == 0:
            log.info("%d conversations read", number + 1)


@dataclass(frozen=True)
class Portion:
    """The samples of one source."""

    samples: SampleFiles | list[Sample]
    repeat: float = 1.0

    def of_epoch(self, epoch: int, seed: int) -> np.ndarray:
        """Return the indices of an epoch: all samples `repeat` times; of a fraction, other samples each epoch."""
        whole, rest = divmod(self.repeat, 1.0)
        part = round(rest * len(self.samples))
        if not part:
            return np.tile(np.arange(len(self.samples)), int(whole))

        # Passes over the samples follow each other in slices of `part`, so each sample comes equally often.
        passes, begin = divmod(epoch * part, len(self.samples))
        order = np.concatenate([_permutation([seed, passes + i, 1], len(self.samples)) for i in range(2)])
        return np.concatenate([np.tile(np.arange(len(self.samples)), int(whole)), order[begin : begin + part]])

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        whole, rest = divmod(self.repeat, 1.0)
        return int(whole) * len(self.samples) + round(rest * len(self.samples))


class Epochs:
    """Batches from fixed sets of samples, in a new seeded order each epoch.

    A run that is resumed with batches of another size continues with the sample after the last one that it trained on.
    """

    def __init__(
        self,
        portions: list[Portion],
        batch_size: int,
        seed: int,
        earlier: Sequence[tuple[int, int]] = (),
        *,
        begin: tuple[int, int] = (0, 0),
    ) -> None:
        """
        Args:
            earlier: other sizes of batches, each with the step until which it held, in order.
            begin: the first step of the run, and the samples that were taken before it.
        """
        self._begin = begin
        self._portions = portions
        self._sizes = [*earlier, (ENDLESS, batch_size)]
        self._seed = seed
        self._known: tuple[int, np.ndarray] | None = None  # the epoch and order that were computed last

    @property
    def length(self) -> int:
        """Return the samples of an epoch."""
        return sum(map(len, self._portions))

    def batch(self, step: int) -> list[Sample]:
        samples = []

        for place in range(self.taken(step), self.taken(step + 1)):
            epoch, index = divmod(place, self.length)
            portion, sample = self._order(epoch)[index]
            samples.append(self._portions[int(portion)].samples[int(sample)])
        return samples

    def passed(self, step: int) -> float:
        """Return the epochs that are complete before the step."""
        return self.taken(step) / self.length

    def taken(self, step: int) -> int:
        """Return the samples that the steps before this one take."""
        begin, taken = self._begin
        for end, size in self._sizes:
            taken += max(0, min(step, end) - begin) * size
            begin = max(begin, end)
        return taken

    def _order(self, epoch: int) -> np.ndarray:
        """Return [length, 2] the portion of each sample and its index there."""
        if self._known is None or self._known[0] != epoch:
            # The order is a function of seed and epoch, so resuming needs no state.
            shares = [portion.of_epoch(epoch, self._seed) for portion in self._portions]
            numbers = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
            listed = np.stack([numbers, np.concatenate(shares)], axis=1)
            self._known = (epoch, listed[_permutation([self._seed, epoch], len(listed))])
        return self._known[1]


def _permutation(seed: list[int], length: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(length)


def require_samples(writer: SampleWriter, what: str) -> None:
    """Check that samples are left.

    Raises:
        ConfigError: no sample is left to learn from.
    """
    if not writer.counts.samples:
        raise ConfigError(
            f"{what}: no sample is left ({writer.counts}) - expected at least one. Raise `seq_len`, or look at the "
            "data and at `loss_on`."
        )
