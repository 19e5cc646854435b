"""The weights as engines load them: whole tensors under the names of published checkpoints, one at a time.

Digests and a replay use the same tensors. Adapters are merged in, one tensor at a time, or follow the base model
(`lora.sync`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from trireme.messages import TensorSpec
from trireme.trainer.model.hub_names import hub_names
from trireme.trainer.model.lora import (
    Product,
    adapters_of,
    base_name,
    is_adapter,
    merge,
    peft_name,
    products,
    trained_tensors,
)
from trireme.trainer.parallel.shards import whole_tensor
from trireme.transport.weights.buckets import spec_of


def served_specs(model: PreTrainedModel, dtype: torch.dtype) -> list[TensorSpec]:
    """Return the specs of what `served_tensors` yields, without gathering anything."""
    names = hub_names(model)
    published = [spec for name in names.layouts for spec in names.specs(name)]
    if serves_adapters(model):
        published += [(peft_name(name), parameter.shape) for name, parameter in _adapters(model)]
    return [spec_of(name, dtype, shape) for name, shape in published]


def served_tensors(
    model: PreTrainedModel, dtype: torch.dtype, *, only_adapters: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor whole, in the order of `served_specs`. A collective: all ranks iterate together.

    Tied parameters come once, under the name of the embedding.

    Args:
        only_adapters: leave out the base model, which does not change; only if `serves_adapters`.
    """
    if not serves_adapters(model):
        yield from _published(model, dtype, products(model))
        return
    if not only_adapters:
        yield from _published(model, dtype, {})

    # under PEFT's names, with the scale multiplied into B before rounding
    factors = {id(product.left): product.scale for product in products(model).values()}
    for name, parameter in _adapters(model):
        yield peft_name(name), (whole_tensor(parameter) * factors.get(id(parameter), 1.0)).to(dtype)


def serves_adapters(model: PreTrainedModel) -> bool:
    """Return whether engines hold the adapters apart from the base model."""
    adapters = adapters_of(model)
    return adapters is not None and adapters.config.sync == "adapter"


def exported_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all that is trained, as a folder of adapters holds it: under PEFT's names, in float32. A collective."""
    for name, tensor in trained_tensors(model).items():
        yield peft_name(name), whole_tensor(tensor)


def _published(
    model: PreTrainedModel, dtype: torch.dtype, added: dict[str, Product]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model with these products added: in float32, then rounded. A collective."""
    names = hub_names(model)

    # Names without the adapters' wrappers, as published checkpoints have them.
    held = {base_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    for name in names.layouts:
        whole = whole_tensor(held[name])
        if (product := added.get(name)) is not None:
            whole = merge(whole, whole_tensor(product.left), whole_tensor(product.right), product)
        for published, tensor in names.to_hub(name, whole.to(dtype)):
            yield published, tensor.contiguous()


def _adapters(model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if is_adapter(name)]
