"""The mapping between the model's parameters and the tensors of published checkpoints, in both directions.

transformers holds the experts of a layer in one tensor (`mlp.experts.gate_up_proj`), while most checkpoints and the
engines have a tensor per expert. transformers knows which models differ from their checkpoints and how. Its own
conversions are run here on tensors without values (`layouts`).

Example:
    names = hub_names(model)  # no values are touched
    names.specs("model.layers.0.mlp.experts.down_proj")
    # [("model.layers.0.mlp.experts.0.down_proj.weight", Size([2048, 768])), ("model.layers.0.mlp.experts.1. …"), …]
    names.to_hub("model.layers.0.mlp.experts.down_proj", whole)  # [("….experts.0.down_proj.weight", view of it), …]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from trireme.base.errors import ConfigError
from trireme.trainer.model.layouts import TensorLayout, UnsupportedLayout, identity_layout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HubNames:
    """Maps the model's names, as they were when this was built, to those of its published checkpoints.

    `layouts` has the model's own names in its order, tied ones once, and then the buffers that checkpoints hold. For
    each it has, by published name, where a published tensor's values are in this tensor of the model.
    """

    layouts: dict[str, dict[str, TensorLayout]]

    def specs(self, name: str) -> list[tuple[str, torch.Size]]:
        """Return names and shapes of what `to_hub` returns."""
        return [(published, laid.shape) for published, laid in self.layouts[name].items()]

    def to_hub(self, name: str, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return the published tensors that a tensor of the model holds: views of it, of any dtype, on any device."""
        layouts = self.layouts[name].items()
        return [(published, laid.tensor(lambda _, region: whole[region])) for published, laid in layouts]


_known: WeakKeyDictionary[PreTrainedModel, HubNames] = WeakKeyDictionary()


def hub_names(model: PreTrainedModel) -> HubNames:
    """Return the mapping of a model, built once: after `sources_of`, as checkpoints of one model differ in their names,
    and before adapters are added.

    Raises:
        ConfigError: parameters are neither published tensors, nor slices of them, nor joined from them.
    """
    if model in _known:
        return _known[model]

    kept = model.state_dict()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    # Persistent buffers are part of a checkpoint though not trained, such as the corrections of some routers.
    shapes |= {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in kept}

    # transformers' own conversion, run on layouts instead of values, tells where each published tensor comes from.
    own: Any = {name: identity_layout(name, shape) for name, shape in shapes.items()}
    try:
        published: dict[str, TensorLayout] = revert_weight_conversion(model, own)
    except UnsupportedLayout as error:
        raise _unknown(model, str(error)) from error

    # Each published tensor must lie within one parameter, as a rank sends what one gathered parameter holds.
    by_own_name: dict[str, dict[str, TensorLayout]] = {name: {} for name in shapes}
    for name, layout in published.items():
        if len(layout.sources) != 1:
            raise _unknown(model, f"{name} would be made of {', '.join(layout.sources)}")
        by_own_name[layout.sources[0]][name] = layout

    _known[model] = HubNames(by_own_name)
    return _known[model]


@dataclass(frozen=True)
class Sources:
    """The tensors of a checkpoint that a model is loaded from."""

    layouts: dict[str, TensorLayout]  # places of the values in the checkpoint's tensors, by the model's names
    unexpected: list[str]  # names in the checkpoint that the model does not have
    untrained: list[str]  # those of parts that the model leaves out: heads for several next tokens, a vision tower


def sources_of(model: PreTrainedModel, published: Mapping[str, Shape]) -> Sources:
    """Find the model's tensors in a checkpoint.

    Records in the model which conversions the checkpoint needed, as transformers does, so that they can be reverted.

    Args:
        published: names and shapes of the checkpoint's tensors.

    Raises:
        ConfigError: the conversion is more than slicing and joining.
    """
    untrained = _untrained(model, published)
    transforms = get_model_conversion_mapping(model)
    try:
        found = _converted(model, {name: published[name] for name in published.keys() - {*untrained}}, transforms)
    except UnsupportedLayout as error:
        raise _unknown(model, str(error)) from error

    # What was used is what a checkpoint of this form needs, so exports revert just that.
    model._weight_conversions = [transform for transform in transforms if transform.was_used()]
    own = model.state_dict()
    # Old checkpoints hold buffers.
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    unexpected = [name for name in found if name not in own and not any(re.search(p, name) for p in ignored)]
    return Sources({name: laid for name, laid in found.items() if name in own}, unexpected, untrained)


def _untrained(model: PreTrainedModel, published: Mapping[str, Shape]) -> list[str]:
    """Find the tensors of parts that the model's class leaves out. They must not count as uses of a conversion."""
    own, modules = model.state_dict(), {name for name, _ in model.named_modules()}
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return [
        name
        for name, target, _ in _renamed(model, published, get_model_conversion_mapping(model))
        if target not in own and target.rpartition(".")[0] not in modules  # a buffer of old checkpoints
        if any(re.search(pattern, target) for pattern in patterns)
    ]


def _renamed(
    model: PreTrainedModel, published: Mapping[str, Shape], transforms: list[WeightTransform]
) -> Iterator[tuple[str, str, str | None]]:
    """Yield a checkpoint's names in their order, with the model's name of each and the pattern of its conversion."""
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    own, prefix = model.state_dict(), model.base_model_prefix
    for name in sorted(published, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        yield (name, name, None) if target not in own and name in own else (name, target, pattern)


def _converted(
    model: PreTrainedModel, published: Mapping[str, Shape], transforms: list[WeightTransform]
) -> dict[str, TensorLayout]:
    """Convert layouts as `transformers.core_model_loading` converts values."""
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    # As with values: several tensors that become one are collected first, then converted together.
    collected: dict[str, WeightTransform] = {}
    for name, target, pattern in _renamed(model, published, transforms):
        if pattern is None:
            transform: WeightTransform = collected.setdefault(target, WeightRenaming(name, target))
        else:
            transform = collected.setdefault(target, deepcopy(by_pattern[pattern]))
        future: Any = identity_layout(name, published[name])
        transform.add_tensor(target, name, pattern or name, future)

    laid: dict[str, TensorLayout] = {}
    for target, transform in collected.items():
        realized = transform.convert(target, model=model, config=model.config)
        laid |= {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in realized.items()}
    return laid


def _unknown(model: PreTrainedModel, detail: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__}: its parameters cannot be laid out from its published checkpoints ({detail}) - "
        "expected parameters that are published tensors, or slices of them, or joined from them. "
        "Choose another model."
    )
