"""The layout of an export: its tensors, and where the values of each are in a checkpoint of the trainer.

The layout is written into the checkpoint, so that an export needs neither the model's code nor a trainer.
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
    """The tensors of an export, in the order in which they are written."""

    specs: tuple[TensorSpec, ...]
    sources: tuple[TensorLayout, ...]  # by the names of the trainer's model

    def tensors(self, stored: StoredShards) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors one at a time."""

        def read(name: str, region: Region) -> torch.Tensor:
            return stored.read(f"{MODEL}.{name}", region)

        for spec, source in zip(self.specs, self.sources, strict=True):
            yield spec.name, source.tensor(read).to(getattr(torch, spec.dtype))

    def in_dtype(self, dtype: str) -> Layout:
        """Return the layout with floating-point tensors in `dtype`; integers keep their type."""
        specs = (
            TensorSpec(
                name=spec.name,
                dtype=dtype if getattr(torch, spec.dtype).is_floating_point else spec.dtype,
                shape=spec.shape,
            )
            for spec in self.specs
        )
        return Layout(tuple(specs), self.sources)


def layout_of(model: PreTrainedModel, dtype: torch.dtype) -> Layout:
    """Return the layout of the whole model under the names of published checkpoints. Reads no values."""
    names, tensors = hub_names(model), model.state_dict(keep_vars=True)
    specs, sources = [], []
    for own in names.parameters:
        kept = dtype if tensors[own].is_floating_point() else tensors[own].dtype
        for name, place in names.laid(own).items():
            specs.append(TensorSpec(name=name, dtype=str(kept).removeprefix("torch."), shape=list(place.shape)))
            sources.append(place)
    return Layout(tuple(specs), tuple(sources))


def write_layout(path: Path, layout: Layout) -> None:
    tensors = [
        _Tensor(
            spec.name,
            spec.dtype,
            tuple(spec.shape),
            tuple(_Part(part.source, part.starts, part.axes, part.offsets, part.sizes) for part in source.parts),
        )
        for spec, source in zip(layout.specs, layout.sources, strict=True)
    ]
    path.write_bytes(msgspec.json.encode(tensors))


def read_layout(path: Path) -> Layout:
    """Read what `write_layout` wrote.

    Raises:
        JournalCorrupt: the file is missing or damaged.
    """
    try:
        tensors = msgspec.json.decode(path.read_bytes(), type=list[_Tensor])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalCorrupt(f"{path} is no layout of an export: {error}. Export another step.") from error
    return Layout(
        tuple(TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=list(tensor.shape)) for tensor in tensors),
        tuple(
            TensorLayout(
                torch.Size(tensor.shape),
                tuple(Part(part.source, part.starts, part.axes, part.offsets, part.sizes) for part in tensor.parts),
            )
            for tensor in tensors
        ),
    )
