"""Patches: the changed values of a tensor in few bytes, exact to the bit.

Values are compared by their bits: a NaN with the same bits is unchanged, and -0.0 differs from 0.0. A patch holds the
new values, not differences, so applying it is idempotent. The places of the values take the form with the fewest bytes:

    whole    nowhere: all values follow
    bits     a bit per value of the tensor, set where it changed
    gaps     per changed value, two bytes: the distance from the one before, if all of them fit
    places   per changed value, four bytes: its flat index

Flat indices in the published shape and final values: so vLLM's `sparse_nccl` has them as well. That one marks what is
unchanged by NaN and writes into a model that serves, so it cannot carry every value, nor say afterwards what the whole
tensor is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch.nn.functional import pad

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer types by their size
_LONGEST_GAP = (1 << 16) - 1
_LAST_PLACE = (1 << 31) - 1


class Form(IntEnum):
    """The ways in which a patch locates its values."""

    WHOLE = 0
    BITS = 1
    GAPS = 2
    PLACES = 3


@dataclass(frozen=True)
class Patch:
    """The patch of one tensor.

    Example:
        # [5., 5., 7.] that was [5., 6., 7.], in float32
        Patch(Form.GAPS, num_changed=1, where=[1, 0], values=[0, 0, 160, 64])
    """

    form: Form
    num_changed: int  # values that differ; all of them if nothing was compared
    where: torch.Tensor  # [bytes] uint8
    values: torch.Tensor  # [bytes] uint8

    @property
    def num_bytes(self) -> int:
        return self.where.numel() + self.values.numel()


def changed(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return [N] bool: where two tensors of the same type and size differ in their bits."""
    return to_integers(tensor) != to_integers(before)


def to_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return [N] the bits as integers; a view if the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def whole_patch(tensor: torch.Tensor) -> Patch:
    data = to_bytes(tensor)
    return Patch(Form.WHOLE, tensor.numel(), data[:0], data)


def build_patch(tensor: torch.Tensor, is_changed: torch.Tensor) -> Patch:
    """Build the smallest patch with the changed values."""
    count = int(is_changed.count_nonzero())
    bits = -(-tensor.numel() // 8)

    # In bytes: at two for each change, a list of places is shorter than a bit for each value only below this.
    if 2 * count < bits:
        places = is_changed.nonzero().view(-1)
        gaps = places.diff(prepend=places.new_zeros(1))
        fits = not len(gaps) or int(gaps.max()) <= _LONGEST_GAP
        assert fits or tensor.numel() <= _LAST_PLACE + 1, f"{tensor.numel()} values have no index of 4 bytes"
        where = to_bytes(gaps.to(torch.uint16) if fits else places.to(torch.int32))
        if where.numel() <= bits:
            form = Form.GAPS if fits else Form.PLACES
            return Patch(form, count, where, to_bytes(to_integers(tensor)[places]))

    # Otherwise a bit for each value, or the whole tensor if even that is smaller.
    if bits + count * tensor.element_size() < tensor.nbytes:
        return Patch(Form.BITS, count, pack_bits(is_changed), to_bytes(to_integers(tensor)[is_changed]))
    return Patch(Form.WHOLE, count, to_bytes(tensor)[:0], to_bytes(tensor))


def sizes_of(form: Form, num_changed: int, tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of `where` and `values` of a patch for `tensor`."""
    if form is Form.WHOLE:
        return 0, tensor.nbytes
    where = {Form.BITS: -(-tensor.numel() // 8), Form.GAPS: 2 * num_changed, Form.PLACES: 4 * num_changed}[form]
    return where, num_changed * tensor.element_size()


def apply_patch(patch: Patch, tensor: torch.Tensor) -> None:
    """Write the changed values into a contiguous tensor."""
    target = tensor.view(-1).view(_INTEGERS[tensor.element_size()])
    values = _aligned(patch.values).view(target.dtype)
    if patch.form is Form.WHOLE:
        target.copy_(values)
    elif patch.form is Form.BITS:
        target.masked_scatter_(unpack_bits(patch.where, len(target)), values)
    elif patch.form is Form.GAPS:
        target[_aligned(patch.where).view(torch.uint16).to(torch.int64).cumsum(0)] = values
    else:
        target[_aligned(patch.where).view(torch.int32).to(torch.int64)] = values


def _aligned(data: torch.Tensor) -> torch.Tensor:
    # Patches are slices of a received buffer, and a view as wider values needs an aligned offset.
    return data if data.storage_offset() % 8 == 0 else data.clone()


_SPREAD = 0x0102040810204080  # brings the lowest bit of byte i to bit 56 + i; no two others meet there


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Pack [N] bool into [N / 8, rounded up] uint8: element 8 i + j is bit j of byte i."""
    padded = pad(mask.view(torch.uint8), (0, -len(mask) % 8))
    return ((padded.view(torch.int64) * _SPREAD) >> 56).to(torch.uint8)


def unpack_bits(data: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack [count] bool."""
    each = torch.arange(8, dtype=torch.uint8, device=data.device)
    return data[:, None].bitwise_right_shift(each).bitwise_and_(1).view(-1)[:count].view(torch.bool)
