"""Deltas on the wire: each bucket has a head with the form of each patch, and a body with the patches.

The receiver keeps a copy of all weights in host memory, under their published names, patches it, and passes on whole
tensors as if all had been sent. Engines cannot patch the weights they compute with, which are packed on a CPU, and
fused and split over ranks elsewhere; nor could digests of published tensors be computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from trireme.algo.patch import Form, Patch, apply_patch, sizes_of
from trireme.messages import TensorSpec
from trireme.transport.weights.buckets import dtype_of, pack_bytes, packed_size, unpack_bytes


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
