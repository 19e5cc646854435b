"""Layouts of tensors: where the values of a tensor are in other tensors, without any values.

`TensorLayout` can be stacked, joined, cut and transposed like a tensor. What transformers does with a checkpoint's
tensors, done with these instead, shows which slice of which of them each part of a parameter is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

Region = tuple[slice, ...]
Read = Callable[[str, Region], torch.Tensor]  # name, and which part of it


class UnsupportedLayout(TypeError):
    """The values are computed, or moved in another way than by slices."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor whose values come from one other tensor, its source."""

    source: str  # name of the source
    starts: tuple[int, ...]  # per dimension of the source: where the box begins there
    axes: tuple[int | None, ...]  # per dimension of the tensor: that of the source; None for one of size 1
    offsets: tuple[int, ...]  # per dimension of the tensor: where the box begins here
    sizes: tuple[int, ...]  # per dimension of the tensor

    def within(self, dim: int, start: int, size: int) -> Part | None:
        """Return what is between `start` and `start + size` in a dimension, as a part of that slice."""
        first = max(start, self.offsets[dim])
        last = min(start + size, self.offsets[dim] + self.sizes[dim])
        if first >= last:
            return None

        # The box begins later in its source as well, unless the dimension is new and has no axis there.
        starts, axis = self.starts, self.axes[dim]
        if axis is not None:
            starts = _with(starts, axis, starts[axis] + first - self.offsets[dim])
        offsets, sizes = _with(self.offsets, dim, first - start), _with(self.sizes, dim, last - first)
        return replace(self, starts=starts, offsets=offsets, sizes=sizes)

    def read(self, read: Read) -> torch.Tensor:
        """Return the values in the shape that they have here; a view if `read` returns one."""
        lengths = dict(zip(self.axes, self.sizes, strict=True))
        tensor = read(self.source, tuple(slice(at, at + lengths.get(i, 1)) for i, at in enumerate(self.starts)))

        # Dimensions of the source without a counterpart have size 1, so the reshape drops them.
        used = [axis for axis in self.axes if axis is not None]
        unused = [axis for axis in range(len(self.starts)) if axis not in used]
        return tensor.permute((*used, *unused)).reshape(self.sizes)


@dataclass(frozen=True)
class TensorLayout:
    """A tensor without values, as a set of parts."""

    shape: torch.Size
    parts: tuple[Part, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> TensorLayout:
        return self

    def narrow(self, dim: int, start: int, size: int) -> TensorLayout:
        dim %= self.ndim
        parts = (part.within(dim, start, size) for part in self.parts)
        return TensorLayout(torch.Size(_with(self.shape, dim, size)), tuple(part for part in parts if part))

    def at(self, region: Region) -> TensorLayout:
        """Return the layout of a region: one slice per dimension, with start and stop."""
        laid = self
        for dim, piece in enumerate(region):
            laid = laid.narrow(dim, piece.start, piece.stop - piece.start)
        return laid

    def transpose(self, dim0: int, dim1: int) -> TensorLayout:
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self._picked(order)

    def squeeze(self) -> TensorLayout:
        return self._picked([dim for dim, size in enumerate(self.shape) if size != 1])

    def _picked(self, dims: Sequence[int]) -> TensorLayout:
        def pick(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[dim] for dim in dims)

        parts = (
            replace(part, axes=pick(part.axes), offsets=pick(part.offsets), sizes=pick(part.sizes))
            for part in self.parts
        )
        return TensorLayout(torch.Size(pick(self.shape)), tuple(parts))

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(part.source for part in self.parts))

    def tensor(self, read: Read) -> torch.Tensor:
        """Return the values. A single part is a view if `read` returns views."""
        if len(self.parts) == 1:
            return self.parts[0].read(read)

        pieces = [part.read(read) for part in self.parts]
        whole = pieces[0].new_empty(self.shape)
        for part, piece in zip(self.parts, pieces, strict=True):
            _box(whole, part).copy_(piece)
        return whole

    def read_into(self, target: torch.Tensor, read: Read) -> None:
        """Copy the values, part by part, into a tensor of the same shape, on any device and of any dtype."""
        for part in self.parts:
            _box(target, part).copy_(part.read(read))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function not in _FUNCTIONS:
            raise UnsupportedLayout(f"{getattr(function, '__name__', function)} is not supported on layouts")
        return _FUNCTIONS[function](*args, **(kwargs or {}))


def identity_layout(name: str, shape: Sequence[int]) -> TensorLayout:
    """Return the layout of a tensor that is its own source."""
    dims = len(shape)
    part = Part(name, starts=(0,) * dims, axes=tuple(range(dims)), offsets=(0,) * dims, sizes=tuple(shape))
    return TensorLayout(torch.Size(shape), (part,))


def _stack(tensors: Sequence[TensorLayout], dim: int = 0) -> TensorLayout:
    if dim:
        raise UnsupportedLayout(f"stacked along dimension {dim}")
    unsqueezed = [
        [replace(p, axes=(None, *p.axes), offsets=(0, *p.offsets), sizes=(1, *p.sizes)) for p in tensor.parts]
        for tensor in tensors
    ]
    shapes = [torch.Size((1, *tensor.shape)) for tensor in tensors]
    return _cat([TensorLayout(shape, tuple(parts)) for shape, parts in zip(shapes, unsqueezed, strict=True)])


def _cat(tensors: Sequence[TensorLayout], dim: int = 0) -> TensorLayout:
    dim %= tensors[0].ndim
    shapes = {tuple(_with(tensor.shape, dim, 0)) for tensor in tensors}
    if len(shapes) > 1:
        raise UnsupportedLayout(f"joined along dimension {dim}: {sorted(tuple(tensor.shape) for tensor in tensors)}")

    parts: list[Part] = []
    begin = 0
    for tensor in tensors:
        parts += (replace(p, offsets=_with(p.offsets, dim, p.offsets[dim] + begin)) for p in tensor.parts)
        begin += tensor.shape[dim]
    return TensorLayout(torch.Size(_with(tensors[0].shape, dim, begin)), tuple(parts))


def _chunk(tensor: TensorLayout, chunks: int, dim: int = 0) -> tuple[TensorLayout, ...]:
    whole = tensor.shape[dim]
    size = math.ceil(whole / chunks)
    return tuple(tensor.narrow(dim, start, min(size, whole - start)) for start in range(0, whole, size))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.chunk: _chunk,
    torch.transpose: TensorLayout.transpose,
}


def _with(values: Sequence[int], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _box(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
