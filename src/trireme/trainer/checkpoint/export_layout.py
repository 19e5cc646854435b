"""Which tensors an exported model has, and where the values of each lie in a checkpoint of the trainer.

It is written into the checkpoint, so that an export needs neither the model's code nor a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel

from trireme.base.errors import JournalCorrupt
from trireme.messages import TensorSpec
from trireme.trainer.checkpoint.state import MODEL
from trireme.trainer.model.hub_names import hub_names
from trireme.trainer.model.layouts import Part, Region, TensorLayout
from trireme.trainer.parallel.shards import StoredShards


class _Part(msgspec.Struct, array_like=True):
    source: str
    starts: tuple[int, ...]
    axes: tuple[int | None, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Tensor(msgspec.Struct):
    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class Layout:
    """Of all tensors, in the order in which they are written."""

    specs: tuple[TensorSpec, ...]
    laid: tuple[TensorLayout, ...]  # over the names of the trainer's model

    def tensors(self, stored: StoredShards) -> Iterator[tuple[str, torch.Tensor]]:
        """One at a time."""

        def read(name: str, region: Region) -> torch.Tensor:
            return stored.read(f"{MODEL}.{name}", region)

        for spec, laid in zip(self.specs, self.laid, strict=True):
            yield spec.name, laid.tensor(read).to(getattr(torch, spec.dtype))

    def in_dtype(self, dtype: str) -> Layout:
        """The same with other numbers; whole numbers stay what they are."""
        specs = (
            TensorSpec(name=spec.name, dtype=dtype if _is_float(spec) else spec.dtype, shape=spec.shape)
            for spec in self.specs
        )
        return Layout(tuple(specs), self.laid)


def layout_of(model: PreTrainedModel, dtype: torch.dtype) -> Layout:
    """Of the whole model, under the names of published checkpoints. No values are looked at."""
    names, tensors = hub_names(model), model.state_dict(keep_vars=True)
    specs, laid = [], []
    for own in names.parameters:
        kept = dtype if tensors[own].is_floating_point() else tensors[own].dtype
        for name, place in names.laid(own).items():
            specs.append(TensorSpec(name=name, dtype=_word(kept), shape=list(place.shape)))
            laid.append(place)
    return Layout(tuple(specs), tuple(laid))


def write_layout(path: Path, layout: Layout) -> None:
    tensors = [
        _Tensor(spec.name, spec.dtype, tuple(spec.shape), tuple(map(_to_written, laid.parts)))
        for spec, laid in zip(layout.specs, layout.laid, strict=True)
    ]
    path.write_bytes(msgspec.json.encode(tensors))


def read_layout(path: Path) -> Layout:
    """Raises: JournalCorrupt where it is not there, or is not what `write_layout` wrote."""
    try:
        tensors = msgspec.json.decode(path.read_bytes(), type=list[_Tensor])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalCorrupt(f"{path} does not say what the model consists of: {error}. Take another step.") from error
    return Layout(
        tuple(TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=list(tensor.shape)) for tensor in tensors),
        tuple(TensorLayout(torch.Size(tensor.shape), tuple(map(_from_written, tensor.parts))) for tensor in tensors),
    )


def _to_written(part: Part) -> _Part:
    return _Part(part.source, part.starts, part.axes, part.offsets, part.sizes)


def _from_written(part: _Part) -> Part:
    return Part(part.source, part.starts, part.axes, part.offsets, part.sizes)


def _is_float(spec: TensorSpec) -> bool:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype.is_floating_point


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
