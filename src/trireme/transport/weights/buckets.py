"""Buckets: tensors are packed into few large messages, which are the only extra memory of a transfer.

A bucket of a delta has a head with the form of each patch, and a body with the patches. The receiver keeps a copy of
all weights in host memory, under their published names, patches it, and passes on whole tensors as if all had been
sent. Engines cannot patch the weights they compute with, which are packed on a CPU, and fused and split over ranks
elsewhere; nor could digests of published tensors be computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from trireme.algo.patch import Form, Patch, apply_patch, sizes_of, to_bytes
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


def pack_patches(parts: Iterable[torch.Tensor | Patch], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the head of a bucket, [tensors, 2] int64 form and number of changed values, and its body, flat uint8."""
    rows, data = [], []
    for part in parts:
        assert isinstance(part, Patch), "a delta is sent in patches"
        rows.append([int(part.form), part.num_changed])
        data += [part.where, part.values]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(len(rows), 2), pack_bytes(data, device)


class HostCopy:
    """A receiver's copy of the weights. It is empty at first and then accepts whole tensors only."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def body_size(self, specs: list[TensorSpec], head: torch.Tensor) -> int:
        """Return the bytes of the body that follows a head.

        Raises:
            RuntimeError: the head is invalid, or patches a tensor that was never received.
        """
        return packed_size(size for sizes in self._sizes(specs, head) for size in sizes)

    def _sizes(self, specs: list[TensorSpec], head: torch.Tensor) -> Iterator[tuple[int, int]]:
        for spec, (form, count) in zip(specs, head.tolist(), strict=True):
            tensor = self._tensors.get(spec.name)
            if tensor is None or (tensor.dtype, list(tensor.shape)) != (dtype_of(spec), spec.shape):
                if form != Form.WHOLE:
                    raise RuntimeError(
                        f"a patch of {spec.name} arrived before its values - the first transfer to an engine was "
                        "expected to bring all values. The transfer is broken and will be retried"
                    )
                tensor = self._tensors[spec.name] = torch.empty(spec.shape, dtype=dtype_of(spec))

            # The head came over a socket: a wrong count would make the body overrun the tensor.
            if not (0 <= form < len(Form) and 0 <= count <= tensor.numel()):
                raise RuntimeError(
                    f"a patch of {spec.name} changes {count} of {tensor.numel()} values in form {form} - at most all "
                    f"values and a form below {len(Form)} were expected. The transfer is broken and will be retried"
                )
            yield sizes_of(Form(form), count, tensor)

    def take(
        self, specs: list[TensorSpec], head: torch.Tensor, body: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Apply patches and yield whole tensors, which are valid until the next transfer."""
        sizes = list(self._sizes(specs, head))
        parts = unpack_bytes((size for pair in sizes for size in pair), body.cpu())
        for spec, (form, count) in zip(specs, head.tolist(), strict=True):
            tensor = self._tensors[spec.name]
            apply_patch(Patch(Form(form), count, where=next(parts), values=next(parts)), tensor)
            yield spec.name, tensor


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
