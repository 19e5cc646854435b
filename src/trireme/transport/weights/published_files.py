"""The safetensors files of a published model. Low-bit weights in them are read as the bfloat16 values that they mean.

    MXFP4       table[nibble] * 2^(scale - 127), low nibble first, one scale for 32 values in a row
    FP8 blocks  value * scale, one scale for each block of 128 x 128 values; blocks at the edges are smaller

Values of MXFP4 are exact in bfloat16, those of FP8 are rounded to it. Only the requested region is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trireme.algo.digest import tensor_digest
from trireme.base.errors import ConfigError
from trireme.config.model.folder import FP8, MXFP4
from trireme.messages import TensorSpec
from trireme.transport.weights.buckets import spec_of

Shape = tuple[int, ...]
Region = tuple[slice, ...]
Read = Callable[[str, Region], torch.Tensor]

MXFP4_GROUP = 32  # values with one scale

_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
_PAIRS = torch.tensor([[_FP4[byte % 16], _FP4[byte // 16]] for byte in range(256)], dtype=torch.bfloat16)
"""The two values in each byte."""

_UNREADABLE = ("F8_", "F4", "F6_")  # beginnings of types whose values mean nothing without their scales


class PublishedFiles:
    """The safetensors files of a model. Any region of a tensor can be read.

    Example:
        files = PublishedFiles([Path("model.safetensors")], {"quant_method": "mxfp4"})
        files.shapes  # {"….experts.down_proj": (32, 2880, 2880), …}: not ….down_proj_blocks and ….down_proj_scales
        files.read("….experts.down_proj", (slice(0, 1), slice(0, 2880), slice(0, 2880)))  # bfloat16
    """

    def __init__(self, files: list[Path], quantization: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            quantization: `config.model.folder.quantization_of` of the model's config.json.

        Raises:
            ConfigError: values and scales do not belong together.
            SafetensorError: a file is damaged.
        """
        self.num_bytes_read = 0
        self.shapes: dict[str, Shape] = {}
        self._file_of: dict[str, Any] = {}  # safetensors exports no type of an open file
        types: dict[str, str] = {}
        for path in files:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                part = file.get_slice(name)
                self._file_of[name], self.shapes[name], types[name] = file, tuple(part.get_shape()), part.get_dtype()

        # Names of stored values and scales give way to the names of the tensors that they mean.
        self._low_bit = _find_low_bit(self.shapes, types, quantization or {})
        for name, low_bit in self._low_bit.items():
            del self.shapes[low_bit.scales], self.shapes[low_bit.values]
            self.shapes[name] = low_bit.shape

    def specs(self, names: Iterable[str] | None = None) -> list[TensorSpec]:
        """Return names, types and shapes of what `read` returns, for all names by default. Reads one value of each."""
        names = self.shapes if names is None else names
        values = ((name, self.read(name, tuple(slice(0, 1) for _ in self.shapes[name]))) for name in names)
        return [spec_of(name, value.dtype, self.shapes[name]) for name, value in values]

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Return a region of a tensor, or all of it for an empty region."""
        if name in self._low_bit:
            return self._low_bit[name].read(self._read, region or tuple(slice(0, size) for size in self.shapes[name]))
        return self._read(name, region)

    def digests(self) -> dict[str, str]:
        """Return the digest of each tensor, by its name."""
        return {name: tensor_digest(self.read(name, ())) for name in self.shapes}

    def _read(self, name: str, region: Region) -> torch.Tensor:
        tensor: torch.Tensor = (
            self._file_of[name].get_slice(name)[region] if region else self._file_of[name].get_tensor(name)
        )
        self.num_bytes_read += tensor.nbytes
        return tensor


@dataclass(frozen=True)
class _Fp8:
    """A tensor in blocks of two dimensions, the last two."""

    values: str
    scales: str
    shape: Shape
    block: tuple[int, int]

    def read(self, read: Read, region: Region) -> torch.Tensor:
        grid = tuple(_blocks(part, size) for part, size in zip(region[-2:], self.block, strict=True))
        scales = read(self.scales, (*region[:-2], *grid))

        # Scales are powers of two in one byte (E8M0), or floats.
        scales = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
        for dim, part, size in zip((-2, -1), region[-2:], self.block, strict=True):
            repeated = scales.repeat_interleave(size, dim)
            scales = repeated.narrow(dim, part.start % size, part.stop - part.start)
        return scales.mul_(read(self.values, region).float()).bfloat16()


@dataclass(frozen=True)
class _Mxfp4:
    """Experts [E, in, out], of which files have [E, out, in / 32, 16] bytes."""

    values: str
    scales: str
    shape: Shape

    def read(self, read: Read, region: Region) -> torch.Tensor:
        experts, inputs, outputs = region
        groups = _blocks(inputs, MXFP4_GROUP)

        # Look up both values of each byte, then scale 32 values at a time.
        pairs = _PAIRS[read(self.values, (experts, outputs, groups, slice(0, MXFP4_GROUP // 2))).int()]
        scales = read(self.scales, (experts, outputs, groups)).view(torch.float8_e8m0fnu).bfloat16()
        values = pairs.mul_(scales[..., None, None]).flatten(2)
        return values.narrow(2, inputs.start % MXFP4_GROUP, inputs.stop - inputs.start).transpose(1, 2)


def _blocks(part: slice, size: int) -> slice:
    """Return the blocks that a range touches."""
    return slice(part.start // size, -(-part.stop // size))


def _find_low_bit(
    shapes: Mapping[str, Shape], types: Mapping[str, str], quantization: Mapping[str, Any]
) -> dict[str, _Fp8 | _Mxfp4]:
    """Find values and their scales, by the name of the tensor that they mean."""
    found: dict[str, _Fp8 | _Mxfp4] = {}
    method = quantization.get("quant_method")

    # Pair values and scales by the names that each format gives them.
    for scales, shape in shapes.items():
        if method == MXFP4 and scales.endswith("_scales") and (values := f"{scales[:-7]}_blocks") in shapes:
            _require(values, shapes[values], scales, shape, (*shape, MXFP4_GROUP // 2), len(shape) == 3)
            found[scales[:-7]] = _Mxfp4(values, scales, (shape[0], shape[2] * MXFP4_GROUP, shape[1]))

        elif method == FP8 and scales.endswith("_scale_inv") and (values := scales[:-10]) in shapes:
            block, whole = quantization["weight_block_size"], shapes[values]
            grid = tuple(-(-size // length) for size, length in zip(whole[-2:], block, strict=False))
            _require(scales, shape, values, whole, (*whole[:-2], *grid), len(whole) >= 2)
            found[values] = _Fp8(values, scales, whole, tuple(block))

    # Without its scale a low-bit value means nothing: refuse the model instead of training on wrong weights.
    stored = {name for each in found.values() for name in (each.values, each.scales)}
    for name in types.keys() - stored:
        if types[name].startswith(_UNREADABLE):
            raise ConfigError(
                f"The weights hold {name} as {types[name]} without scales (config.json: {dict(quantization) or 'none'})"
                " - expected float32, bfloat16 or float16, MXFP4 (…_blocks, …_scales), or FP8 in blocks "
                "(…weight_scale_inv). Take such a copy of the model."
            )
    return found


def _require(name: str, shape: Shape, other: str, other_shape: Shape, expected: Shape, is_known: bool) -> None:
    if shape != expected or not is_known:
        raise ConfigError(
            f"The weights hold {name} {list(shape)} and {other} {list(other_shape)} - expected {list(expected)} for "
            "the first. Copy or download the model again; its config.json and safetensors must belong together."
        )
