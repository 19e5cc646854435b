"""Shards of tensors in safetensors files: each rank writes its own shards, and any number of ranks reads them.

A file's metadata holds, for each tensor, which part of the whole it is. Nothing is pickled, so a changed checkpoint
cannot make the trainer run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.journal.manifest import read_manifest

Index = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One rank's part of a tensor."""

    tensor: torch.Tensor  # local; shares its memory with the model
    shape: Index  # shape of the whole tensor
    offset: Index  # place of this shard's first element in the whole tensor

    @property
    def region(self) -> tuple[slice, ...]:
        """The part of the whole tensor that this rank holds."""
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.tensor.shape, strict=True))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without gradient; it shares its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor, without gradient. A collective for sharded tensors."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_of(tensor: torch.Tensor) -> Shard:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Shard(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Shard(tensor.to_local(), tuple(tensor.shape), tuple(offset))


def is_written_by(tensor: torch.Tensor, rank: int) -> bool:
    """Return whether this rank writes its shard: of ranks with the same shard, the first does."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh of its own model"
    return all(
        index == 0 for index, placement in zip(coordinate, tensor.placements, strict=True) if not placement.is_shard()
    )


def write_shards(path: Path, pieces: Mapping[str, Shard]) -> None:
    places = {name: {"shape": piece.shape, "offset": piece.offset} for name, piece in pieces.items()}
    tensors = {name: piece.tensor for name, piece in pieces.items()}
    save_file(tensors, path, metadata={"format": "pt", "pieces": json.dumps(places)})


@dataclass(frozen=True)
class _StoredShard:
    """A shard in a file that is not read yet."""

    file: Any  # safetensors' open file, of which it exports no type
    name: str
    shape: Index  # shape of the whole tensor
    offset: Index
    size: Index

    def read(self, start: Index, size: Index) -> torch.Tensor:
        """Return the part that begins at `start` of the whole."""
        if not size:
            return self.file.get_tensor(self.name)
        begins = [at - offset for at, offset in zip(start, self.offset, strict=True)]
        return self.file.get_slice(self.name)[
            tuple(slice(begin, begin + length) for begin, length in zip(begins, size, strict=True))
        ]


class StoredShards:
    """The shards in all files of a checkpoint. Only what is asked for is read."""

    def __init__(self, pieces: Iterable[_StoredShard]) -> None:
        self.num_bytes_read = 0
        self._pieces: dict[str, list[_StoredShard]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)

    def names(self) -> list[str]:
        return list(self._pieces)

    def shape(self, name: str) -> Index:
        return self._pieces[name][0].shape

    def dtype(self, name: str) -> torch.dtype:
        first = self._pieces[name][0]
        return first.read(first.offset, tuple(min(1, length) for length in first.size)).dtype

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Fill this rank's shard of `tensor`.

        Raises:
            ConfigError: the checkpoint has it with another shape or not at all, so it is another model's.
            JournalCorrupt: no file holds some part of it.
        """
        # A missing tensor or another shape tells that the checkpoint belongs to another model.
        ours = shard_of(tensor)
        if name not in self._pieces or self.shape(name) != ours.shape:
            found = f"with shape {list(self.shape(name))}" if name in self._pieces else "not at all"
            raise ConfigError(
                f"The checkpoint has {name} {found}, the model has it with shape {list(ours.shape)} - a checkpoint of "
                "the same model and adapters was expected. Set `model.name`, and `lora` where adapters are trained, as "
                "they were when the run began, or start a new run."
            )
        self._fill(name, ours)

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """Read a region of a tensor.

        Raises:
            JournalCorrupt: no file holds some part of it.
        """
        starts, sizes = tuple(part.start for part in region), tuple(part.stop - part.start for part in region)
        ours = Shard(torch.empty(sizes, dtype=self.dtype(name)), self.shape(name), starts)
        self._fill(name, ours)
        return ours.tensor

    def read_whole(self, name: str) -> torch.Tensor:
        return self.read(name, tuple(slice(0, size) for size in self.shape(name)))

    def _fill(self, name: str, ours: Shard) -> None:
        # Shards never overlap, so the count shows whether every element was found.
        num_read = sum(_copy_overlap(stored, ours) for stored in self._pieces[name])
        self.num_bytes_read += num_read * ours.tensor.element_size()
        if num_read != ours.tensor.numel():
            raise JournalCorrupt(
                f"The checkpoint's files hold {num_read} of the {ours.tensor.numel()} elements of {name} that this "
                "rank needs. Files of some ranks are missing: restore them, or resume from another step."
            )


def _copy_overlap(stored: _StoredShard, ours: Shard) -> int:
    """Copy the elements that both have; return their number."""
    # Shards of any two layouts are boxes, and so is what they have in common.
    start = tuple(map(max, stored.offset, ours.offset))
    ends = zip(stored.offset, stored.size, ours.offset, ours.tensor.shape, strict=True)
    end = [min(theirs + their_size, mine + my_size) for theirs, their_size, mine, my_size in ends]
    size = tuple(last - first for first, last in zip(start, end, strict=True))
    if any(length <= 0 for length in size):
        return 0

    target = tuple(
        slice(first - mine, first - mine + length) for first, mine, length in zip(start, ours.offset, size, strict=True)
    )
    with torch.no_grad():
        ours.tensor[target].copy_(stored.read(start, size))
    return ours.tensor[target].numel()


def shard_files(checkpoint: Path) -> list[Path]:
    """Return the files of all ranks that the manifest lists. Others are not read."""
    return [checkpoint / name for name in sorted(read_manifest(checkpoint).files) if name.startswith("rank_")]


@contextmanager
def open_shards(paths: Iterable[Path]) -> Iterator[StoredShards]:
    """Open files of shards.

    Raises:
        JournalCorrupt: a file was not written by `write_shards`.
    """
    pieces = []
    with ExitStack() as stack:
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name, place in json.loads(file.metadata()["pieces"]).items():
                    size = tuple(file.get_slice(name).get_shape())
                    pieces.append(_StoredShard(file, name, tuple(place["shape"]), tuple(place["offset"]), size))
            except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
                # A file that is damaged, or none of a checkpoint, may fail in any of these ways.
                raise JournalCorrupt(
                    f"{path} holds no pieces of a checkpoint: {error!r}. Resume from another step."
                ) from error
        yield StoredShards(pieces)
