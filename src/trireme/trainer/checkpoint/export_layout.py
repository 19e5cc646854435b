"""The layout of an export: its tensors, and where the values of each are in a checkpoint of the trainer.

The layout is written into the checkpoint as JSON, so that an export needs neither the model's code nor a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
from transformers import PreTrainedModel

from trireme.base.errors import JournalCorrupt
from trireme.messages import TensorSpec
from trireme.trainer.checkpoint.state import MODEL
from trireme.trainer.model.hub_names import hub_names
from trireme.trainer.model.layouts import Part, Region, TensorLayout, identity_layout
from trireme.trainer.model.loading import untrained_of
from trireme.trainer.parallel.shards import StoredShards


class LaidTensor(TensorSpec, frozen=True):
    """A tensor of an export, and which parts of the trainer's tensors it consists of."""

    parts: tuple[Part, ...]


Layout: TypeAlias = Sequence[LaidTensor]
"""The tensors of an export, in the order in which they are written."""


def laid_tensor(name: str, dtype: torch.dtype, place: TensorLayout) -> LaidTensor:
    text = str(dtype).removeprefix("torch.")
    return LaidTensor(name=name, dtype=text, shape=list(place.shape), parts=place.parts)


def layout_of(model: PreTrainedModel, dtype: torch.dtype) -> Layout:
    """Return the layout of the whole model under the names of published checkpoints, untrained parts last."""
    names, tensors, untrained = hub_names(model), model.state_dict(keep_vars=True), untrained_of(model)
    trained = [
        laid_tensor(name, dtype if tensors[own].is_floating_point() else tensors[own].dtype, place)
        for own in names.parameters
        for name, place in names.laid(own).items()
    ]
    return trained + [
        laid_tensor(spec.name, getattr(torch, spec.dtype), identity_layout(spec.name, spec.shape))
        for spec in untrained.specs()
    ]


def read_layout(path: Path) -> Layout:
    """
    Raises:
        JournalCorrupt: the file is missing or damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[LaidTensor])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalCorrupt(f"{path} is no layout of an export: {error}. Export another step.") from error


def in_dtype(layout: Layout, dtype: str) -> Layout:
    """Return the layout with floating-point tensors in `dtype`; integers keep their type."""
    is_float = {name: getattr(torch, name).is_floating_point for name in {tensor.dtype for tensor in layout}}
    return [msgspec.structs.replace(each, dtype=dtype) if is_float[each.dtype] else each for each in layout]


def stored_tensors(layout: Layout, stored: StoredShards) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an export, one at a time."""

    def read(name: str, region: Region) -> torch.Tensor:
        return stored.read(f"{MODEL}.{name}", region)

    for each in layout:
        whole = TensorLayout(torch.Size(each.shape), each.parts).tensor(read)
        yield each.name, whole.to(getattr(torch, each.dtype))
