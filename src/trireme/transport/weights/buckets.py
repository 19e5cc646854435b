"""Tensors travel in buckets: few, large, equal on both sides, and the only extra memory of a transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch

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


def pack_bucket(specs: list[TensorSpec], tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One flat uint8 tensor."""
    flat = torch.empty(bucket_size(specs), dtype=torch.uint8, device=device)
    for (start, stop), tensor in zip(_places(specs), tensors, strict=True):
        flat[start:stop].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return flat


def unpack_bucket(specs: list[TensorSpec], flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views into `flat`: use them before it is filled again."""
    for spec, (start, stop) in zip(specs, _places(specs), strict=True):
        yield spec.name, flat[start:stop].view(dtype_of(spec)).view(spec.shape)


def bucket_size(specs: list[TensorSpec]) -> int:
    return sum(_aligned(num_bytes(spec)) for spec in specs)


def _places(specs: list[TensorSpec]) -> Iterator[tuple[int, int]]:
    start = 0
    for spec in specs:
        size = num_bytes(spec)
        yield start, start + size
        start += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
