"""Tensors travel in buckets: few, large, equal on both sides, and the only extra memory of a transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch

from trireme.algo.patch import to_bytes
from trireme.messages import TensorSpec

_ALIGNMENT = 16


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Of a plain tensor or of a sharded one (then its global shape)."""
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))


def num_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * dtype_of(spec).itemsize


def dtype_of(spec: TensorSpec) -> torch.dtype:
    return getattr(torch, spec.dtype)


def split_into_buckets(specs: list[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """In order; a tensor larger than a bucket gets one of its own."""
    buckets: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        size = _aligned(num_bytes(spec))
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(spec)
        room -= size
    return buckets


class BucketBuffers:
    """Memory for buckets, one by turns with the other: one travels while the other is filled, or read.

    On a CPU it is kept: new memory of that size would be fetched from the system, page by page, for every bucket. A
    GPU's allocator keeps it by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept = [torch.empty(0, dtype=torch.uint8)] * 2

    def take(self, size: int) -> torch.Tensor:
        """[size] uint8. What was taken before the one before may be written over."""
        if self.device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        flat = self._kept.pop(0)
        if len(flat) < size:
            flat = torch.empty(size, dtype=torch.uint8)
        self._kept.append(flat)
        return flat[:size]


def pack_bucket(specs: list[TensorSpec], tensors: Iterable[torch.Tensor], buffers: BucketBuffers) -> torch.Tensor:
    """One flat uint8 tensor. A large tensor that has a bucket to itself is not copied, where it need not be."""
    if len(specs) == 1:
        (tensor,) = tensors
        return pack_bytes([to_bytes(tensor)], buffers.device)
    flat = buffers.take(bucket_size(specs))
    for (start, stop), tensor in zip(_places(specs), tensors, strict=True):
        flat[start:stop].copy_(to_bytes(tensor))
    return flat


def pack_bytes(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One flat uint8 tensor; each part begins at a multiple of the alignment."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1 and len(parts[0]) % _ALIGNMENT == 0:
        return parts[0].to(device)
    flat = torch.empty(packed_size(map(len, parts)), dtype=torch.uint8, device=device)
    start = 0
    for part in parts:
        flat[start : start + len(part)].copy_(part)
        start += _aligned(len(part))
    return flat


def packed_size(sizes: Iterable[int]) -> int:
    return sum(_aligned(size) for size in sizes)


def unpack_bytes(sizes: Iterable[int], flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views into `flat`, of these sizes."""
    start = 0
    for size in sizes:
        yield flat[start : start + size]
        start += _aligned(size)


def unpack_bucket(specs: list[TensorSpec], flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views into `flat`: use them before it is filled again."""
    for spec, (start, stop) in zip(specs, _places(specs), strict=True):
        yield spec.name, flat[start:stop].view(dtype_of(spec)).view(spec.shape)


def bucket_size(specs: list[TensorSpec]) -> int:
    return packed_size(map(num_bytes, specs))


def _places(specs: list[TensorSpec]) -> Iterator[tuple[int, int]]:
    start = 0
    for spec in specs:
        size = num_bytes(spec)
        yield start, start + size
        start += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
