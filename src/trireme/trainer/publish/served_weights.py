"""The weights as engines load them: whole tensors under the names of published checkpoints, one at a time; and what is
sent of a version: all of them, only the adapters, or changed values (`weight_broadcast.delta`).

Digests and a replay use the same tensors. Adapters are merged in, one tensor at a time, or follow the base model
(`lora.sync`).

For a delta, each rank keeps an equal slice of every served tensor in host memory, independent of sharding, names and
adapters. All ranks together hold one copy of the model in the precision in which it is served. A rank compares its
slice with that of the whole tensor, and rank 0 gathers one bit per value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TypeAlias

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from trireme.algo.digest import tensor_digest
from trireme.algo.patch import Patch, build_patch, changed, pack_bits, to_integers, unpack_bits, whole_patch
from trireme.algo.weight_checks import is_of_adapter
from trireme.base.faults import reach
from trireme.messages import TensorSpec
from trireme.trainer.model import lora
from trireme.trainer.model.hub_names import hub_names
from trireme.trainer.parallel.mesh import World
from trireme.trainer.parallel.shards import whole_tensor
from trireme.transport.weights.buckets import spec_of

Part: TypeAlias = torch.Tensor | Patch
"""The part of a tensor that is sent: all of it or, in a delta, a patch."""


def served_specs(model: PreTrainedModel, dtype: torch.dtype) -> list[TensorSpec]:
    """Return the specs of what `served_tensors` yields, without gathering anything."""
    names = hub_names(model)
    published = [spec for name in names.layouts for spec in names.specs(name)]
    if serves_adapters(model):
        published += [(lora.peft_name(name), parameter.shape) for name, parameter in _adapters(model)]
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
        yield from _published(model, dtype, lora.products(model))
        return
    if not only_adapters:
        yield from _published(model, dtype, {})

    # under PEFT's names, with the scale multiplied into B before rounding
    factors = {id(product.left): product.scale for product in lora.products(model).values()}
    for name, parameter in _adapters(model):
        yield lora.peft_name(name), (whole_tensor(parameter) * factors.get(id(parameter), 1.0)).to(dtype)


def serves_adapters(model: PreTrainedModel) -> bool:
    """Return whether engines hold the adapters apart from the base model."""
    adapters = lora.adapters_of(model)
    return adapters is not None and adapters.config.sync == "adapter"


def exported_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all that is trained, as a folder of adapters holds it: under PEFT's names, in float32. A collective."""
    for name, tensor in lora.trained_tensors(model).items():
        yield lora.peft_name(name), whole_tensor(tensor)


def _published(
    model: PreTrainedModel, dtype: torch.dtype, added: dict[str, lora.Product]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model with these products added: in float32, then rounded. A collective."""
    names = hub_names(model)

    # Names without the adapters' wrappers, as published checkpoints have them.
    held = {lora.base_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    for name in names.layouts:
        whole = whole_tensor(held[name])
        if (product := added.get(name)) is not None:
            whole = lora.merge(whole, whole_tensor(product.left), whole_tensor(product.right), product)
        for published, tensor in names.to_hub(name, whole.to(dtype)):
            yield published, tensor.contiguous()


def _adapters(model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if lora.is_adapter(name)]


# what is sent of a version


class OutgoingWeights:
    """A model's tensors as they are sent, and the digests by which engines confirm them. Each rank has one."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, world: World, *, delta: bool) -> None:
        self._model = model
        self._dtype = dtype
        self._world = world
        self.specs = served_specs(model, dtype)  # all tensors
        self._sent_weights = SentWeights(world) if delta else None
        self._base_digests: dict[str, str] = {}  # digests of the base model, which does not change under adapters
        self._transfer_size: TransferSize | None = None

    def digests(self) -> dict[str, str]:
        """Return the digests of all tensors on rank 0. A collective, as each tensor is gathered from all ranks."""
        digests: dict[str, str] = {}
        for _ in self._digested(digests):
            pass
        return digests

    def parts(self, digests: dict[str, str], *, is_first: bool) -> tuple[list[TensorSpec], Iterator[Part]]:
        """Return the specs of the tensors to send and, as they are iterated over, what is sent of each. A collective.

        An epoch continues only if all of its engines confirmed its last transfer. So engines of the epoch that was
        confirmed last hold exactly what was sent then. Other engines, and all after a broken transfer, get all.

        Args:
            digests: is filled in with those of all tensors that engines hold then.
            is_first: engines may hold something else than what was sent last.
        """
        size = self._transfer_size = TransferSize()

        # An engine's first transfer has all tensors, later ones only the adapters if there are any.
        only_adapters = serves_adapters(self._model) and not is_first
        specs = [spec for spec in self.specs if is_of_adapter(spec.name)] if only_adapters else self.specs
        tensors = self._digested(digests, only_adapters=only_adapters)
        if self._sent_weights is None:
            return specs, size.counted(tensor for _, tensor in tensors)
        return specs, size.counted(self._sent_weights.patches(tensors, whole=is_first))

    def _digested(self, digests: dict[str, str], *, only_adapters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors and fill in their digests; those of a base model that is not gathered again are kept."""
        if only_adapters:
            digests |= self._base_digests
        tensors = served_tensors(self._model, self._dtype, only_adapters=only_adapters)
        for number, (name, tensor) in enumerate(tensors):
            if self._world.is_main:
                digests[name] = tensor_digest(tensor)
            yield name, tensor
            if number == 0:
                reach("trainer.sending", rank=self._world.rank)

        # The digests are complete only after the last tensor.
        self._base_digests = {name: digest for name, digest in digests.items() if not is_of_adapter(name)}

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the last transfer on rank 0, once."""
        size, self._transfer_size = self._transfer_size, None
        return size.metrics(sum(prod(spec.shape) for spec in self.specs)) if size is not None else {}


class SentWeights:
    """One rank's slices of the weights that engines hold."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent_weights: dict[str, torch.Tensor] = {}

    def patches(self, tensors: Iterable[tuple[str, torch.Tensor]], *, whole: bool) -> Iterator[Patch]:
        """Yield the patches that bring engines to these tensors; only rank 0's are valid. A collective.

        The tensors count as sent from here on, so after a broken transfer the next one has to send whole tensors.

        Args:
            whole: engines hold nothing, or something else than what was sent last.
        """
        for name, tensor in tensors:
            # A slice of the values as they are served, in order, whichever rank holds which shard.
            size = _slice_size(tensor.numel(), self._world.size)
            own = to_integers(tensor)[size * self._world.rank : size * (self._world.rank + 1)]

            # Compared first, as the copy below makes the new values the sent ones.
            is_changed = None if whole else self._where_changed(name, own, tensor.numel())
            if name not in self._sent_weights:
                self._sent_weights[name] = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
            self._sent_weights[name].copy_(own)
            yield whole_patch(tensor) if is_changed is None else build_patch(tensor, is_changed)

    def _where_changed(self, name: str, own: torch.Tensor, count: int) -> torch.Tensor | None:
        """Return [count] bool, which values of the whole tensor changed, on rank 0; None elsewhere."""
        is_changed = changed(own, self._sent_weights[name].to(own.device, non_blocking=True))
        if self._world.size == 1:
            return is_changed

        # One bit per value crosses the network, not the values.
        bits = torch.zeros(_slice_size(count, self._world.size) // 8, dtype=torch.uint8, device=own.device)
        packed = pack_bits(is_changed)
        bits[: len(packed)] = packed
        gathered = [torch.empty_like(bits) for _ in range(self._world.size)] if self._world.is_main else None
        dist.gather(bits, gathered)
        return unpack_bits(torch.cat(gathered), count) if gathered else None


class TransferSize:
    """Counts the bytes and changed values of one transfer."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._num_changed: int | None = None

    def counted(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Patch):
                self._num_bytes += part.num_bytes
                self._num_changed = (self._num_changed or 0) + part.num_changed
            else:
                self._num_bytes += part.nbytes
            yield part

    def metrics(self, num_values: int) -> dict[str, float]:
        """Return the metrics of a model with this number of values."""
        found = {"weights/sent_bytes": float(self._num_bytes)}
        if self._num_changed is not None:
            found["weights/changed_frac"] = self._num_changed / num_values
        return found


def _slice_size(count: int, num_ranks: int) -> int:
    """Return the values of a rank's slice: a multiple of 8, so that all ranks' bits follow each other without gaps."""
    return -(-count // (8 * num_ranks)) * 8
