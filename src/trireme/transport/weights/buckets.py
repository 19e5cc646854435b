"""Buckets: tensors are packed into few large messages, which are the only extra memory of a transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from trireme.algo.patch import to_bytes
from trireme.messages import TensorSpec

_ALIGNMENT = 16


def spec_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(name=name, dtype=str(dtype).removeprefix("torch."), shape=list(shape))


def num_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * dtype_of(spec).itemsize


def dtype_of(spec: TensorSpec) -> torch.dtype:
    return getattr(torch, spec.dtype)


def split_into_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Split tensors into buckets, in order. A tensor larger than a bucket gets one of its own."""
    buckets: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        size = _aligned(num_bytes(spec))

        # A tensor larger than a bucket leaves negative room, so the next one begins a bucket again.
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(spec)
        room -= size
    return buckets


class BucketBuffers:
    """Two alternating buffers: one bucket travels while the next is filled, or the one before is read.

    On a CPU the buffers are reused, because the system would map new memory page by page for every bucket. A GPU's
    allocator reuses memory by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept = [torch.empty(0, dtype=torch.uint8)] * 2

    def take(self, size: int) -> torch.Tensor:
        """Return [size] uint8. The buffer taken two calls before may be overwritten."""
        if self.device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self.device)

        # The older of the two: the other one may still be read, or be on its way.
        flat = self._kept.pop(0)
        if len(flat) < size:
            flat = torch.empty(size, dtype=torch.uint8)
        self._kept.append(flat)
        return flat[:size]


def pack_bucket(specs: list[TensorSpec], tensors: Iterable[torch.Tensor], buffers: BucketBuffers) -> torch.Tensor:
    """Pack a bucket into a flat uint8 tensor. A tensor with a bucket of its own is not copied unless it must be."""
    if len(specs) == 1:
        (tensor,) = tensors
        return pack_bytes([to_bytes(tensor)], buffers.device)

    flat = buffers.take(bucket_size(specs))
    for place, tensor in zip(unpack_bytes(map(num_bytes, specs), flat), tensors, strict=True):
        place.copy_(to_bytes(tensor))
    return flat


def unpack_bucket(specs: list[TensorSpec], flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as views into `flat`, which are valid until it is filled again."""
    for spec, place in zip(specs, unpack_bytes(map(num_bytes, specs), flat), strict=True):
        yield spec.name, place.view(dtype_of(spec)).view(spec.shape)


def bucket_size(specs: list[TensorSpec]) -> int:
    return packed_size(map(num_bytes, specs))


def pack_bytes(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Pack parts into a flat uint8 tensor; each begins at a multiple of the alignment."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1 and len(parts[0]) % _ALIGNMENT == 0:
        return parts[0].to(device)
    flat = torch.empty(packed_size(map(len, parts)), dtype=torch.uint8, device=device)
    for place, part in zip(unpack_bytes(map(len, parts), flat), parts, strict=True):
        place.copy_(part)
    return flat


def unpack_bytes(sizes: Iterable[int], flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of these sizes into `flat`."""
    start = 0
    for size in sizes:
        yield flat[start : start + size]
        start += _aligned(size)


def packed_size(sizes: Iterable[int]) -> int:
    return sum(map(_aligned, sizes))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
