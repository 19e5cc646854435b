"""A delta on the wire: for each bucket a head that says how each of its tensors comes, and a body with their patches.

The receiver keeps a copy of all that it was sent, in host memory and under the published names, and patches that; what
it hands on are whole tensors, the same as if all had been sent. Engines cannot patch what they compute with: on CPU it
is packed, elsewhere fused and split over ranks, and no digest of a published tensor could be taken of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from trireme.algo.patch import Form, Patch, apply_patch, sizes_of
from trireme.messages import TensorSpec
from trireme.transport.weights.buckets import dtype_of, pack_bytes, packed_size, unpack_bytes


def pack_head(patches: list[Patch], device: torch.device) -> torch.Tensor:
    """[tensors, 2] int64: form and number of changed values."""
    rows = [[int(patch.form), patch.num_changed] for patch in patches]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(len(patches), 2)


def empty_head(specs: list[TensorSpec], device: torch.device) -> torch.Tensor:
    """To be received into."""
    return torch.empty(len(specs), 2, dtype=torch.int64, device=device)


def pack_body(patches: list[Patch], device: torch.device) -> torch.Tensor:
    """One flat uint8 tensor."""
    return pack_bytes([part for patch in patches for part in (patch.where, patch.values)], device)


class HostCopy:
    """What a receiver holds. Nothing at first: then only whole tensors can be taken."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def body_size(self, specs: list[TensorSpec], head: torch.Tensor) -> int:
        """Bytes of the body that follows.

        Raises: RuntimeError where the head makes no sense, or patches what is not here.
        """
        return packed_size(size for sizes in self._sizes(specs, head) for size in sizes)

    def _sizes(self, specs: list[TensorSpec], head: torch.Tensor) -> Iterator[tuple[int, int]]:
        for spec, (form, count) in zip(specs, head.tolist(), strict=True):
            tensor = self._tensor(spec, is_whole=form == Form.WHOLE)
            if not (0 <= form < len(Form) and 0 <= count <= tensor.numel()):
                raise RuntimeError(
                    f"{spec.name} of {tensor.numel()} values is to change in {count} of them, told in form {form} - "
                    f"at most all, in a form below {len(Form)}, were expected. The transfer is broken; it is begun anew"
                )
            yield sizes_of(Form(form), count, tensor)

    def _tensor(self, spec: TensorSpec, *, is_whole: bool) -> torch.Tensor:
        found = self._tensors.get(spec.name)
        if found is not None and (found.dtype, list(found.shape)) == (dtype_of(spec), spec.shape):
            return found
        if not is_whole:
            raise RuntimeError(
                f"changes of {spec.name} came, and nothing that they change is here - the first transfer to an engine "
                "was expected to bring all values. The transfer is broken; it is begun anew"
            )
        fresh = torch.empty(spec.shape, dtype=dtype_of(spec))
        self._tensors[spec.name] = fresh
        return fresh

    def take(
        self, specs: list[TensorSpec], head: torch.Tensor, body: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Patches, and hands on the whole tensors: they stay as they are until the next transfer."""
        sizes = list(self._sizes(specs, head))
        parts = unpack_bytes((size for pair in sizes for size in pair), body.cpu())
        for spec, (form, count) in zip(specs, head.tolist(), strict=True):
            tensor = self._tensors[spec.name]
            apply_patch(Patch(Form(form), count, where=next(parts), values=next(parts)), tensor)
            yield spec.name, tensor


def patches_of(parts: Iterable[torch.Tensor | Patch]) -> list[Patch]:
    """The parts of a bucket, where they are sent as patches."""
    return [_as_patch(part) for part in parts]


def _as_patch(part: torch.Tensor | Patch) -> Patch:
    assert isinstance(part, Patch), "a delta is sent in patches"
    return part
