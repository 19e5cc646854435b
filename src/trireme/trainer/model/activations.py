"""Activation checkpointing, compilation and offloading of transformer blocks.

Each wraps the block's own `forward`, inside of FSDP's hooks. So when a block is recomputed, its parameters are already
gathered for its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trireme.config.trainer import ActivationCheckpointing, TrainerModel

Forward = Callable[..., Any]

KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "flex_attention",
}
"""Operations whose results `selective` keeps."""

CHANGED_BY_EXPERTS = {"aten::_grouped_mm", "aten::bmm"}
"""Products to which transformers adds experts' biases in place, so that a kept result would be changed."""

OFFLOADED_BYTES = 1 << 20  # smaller tensors stay: copying them costs more than it saves


def wrap_layers(layers: Sequence[torch.nn.Module], config: TrainerModel, device: torch.device) -> None:
    """Wrap blocks from the inside out: compiled ones are recomputed, and offloading sees what recomputed ones keep.

    Not the other way round: nothing is compiled of a block that is recomputed inside of a compiled function, if part of
    it cannot be compiled, as attention over packed samples.
    """
    offload = Offload(device, smallest_bytes=OFFLOADED_BYTES) if config.activation_offload else None
    for index, layer in enumerate(layers):
        forward: Forward = layer.forward
        if config.compile:
            forward = torch.compile(forward)
        if config.ac and index % config.ac.freq == 0:
            forward = _recomputed(forward, layer, config.ac)
        if offload:
            forward = offload.around(forward, layer, is_first=index == 0)
        layer.forward = forward


def _recomputed(forward: Forward, layer: torch.nn.Module, config: ActivationCheckpointing) -> Forward:
    if config.mode == "full":
        return partial(checkpoint, forward, use_reentrant=False)

    has_biases = any(".experts." in name and name.endswith("_bias") for name, _ in layer.named_parameters())
    kept = KEPT - CHANGED_BY_EXPERTS if has_biases else KEPT
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _policy(kept: Set[str], _: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name() in kept else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(eq=False)
class _Layer:
    """The tensors that one pass through one block has saved."""

    parameters: set[int]  # addresses of memory that is not moved
    before: _Layer | None  # the block whose backward pass comes next
    kept: list[_Kept] = field(default_factory=list)  # until their copies back have started
    seen: dict[tuple[Any, ...], tuple[torch.Tensor, _Kept]] = field(default_factory=dict)


@dataclass(eq=False)
class _Kept:
    """A saved tensor in CPU memory."""

    layer: _Layer
    tensor: torch.Tensor
    back: torch.Tensor | None = None  # the copy on the device, once it has started


class Offload:
    """Moves what blocks save for their backward pass to CPU memory and back.

    On a GPU both copies run on a stream of their own, in parallel to the computation: when a block's backward pass
    begins, the tensors of the block before it are fetched. The block's parameters are not moved, because FSDP gathers
    them again.
    """

    def __init__(self, device: torch.device, *, smallest_bytes: int) -> None:
        self.num_bytes = 0  # moved so far
        self._device = device
        self._smallest_bytes = smallest_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._layer: _Layer | None = None

    def around(self, forward: Forward, module: torch.nn.Module, *, is_first: bool) -> Forward:
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)

            # Blocks' own parameters stay: FSDP gathers them again for the backward pass.
            # A DTensor is still sharded: float32 routers are FSDP units of their own, gathered when they run.
            gathered = (each for each in module.parameters() if not isinstance(each, DTensor))
            stay = {parameter.untyped_storage().data_ptr() for parameter in gathered}
            layer = self._layer = _Layer(stay, before=None if is_first else self._layer)
            with saved_tensors_hooks(partial(self._pack, layer), self._unpack):
                output = forward(*args, **kwargs)
            layer.seen.clear()
            return output

        return offloaded

    def _pack(self, layer: _Layer, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        memory = tensor.untyped_storage().data_ptr()
        if tensor.device != self._device or tensor.nbytes < self._smallest_bytes or memory in layer.parameters:
            return tensor

        # The version is part of the key: a tensor that is changed in place has other values at the same address.
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key in layer.seen:  # the shared input of several matrices is moved once
            return layer.seen[key][1]

        source = tensor.detach()
        self.num_bytes += source.nbytes
        # Page-locked memory lets the GPU copy while it computes.
        copy = torch.empty_like(source, device="cpu", pin_memory=self._stream is not None)
        if self._stream is None:
            copy.copy_(source)
        else:
            # The copy waits for what computes the tensor, whose memory is not reused before the copy is done.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                copy.copy_(source, non_blocking=True)
            source.record_stream(self._stream)

        kept = _Kept(layer, copy)
        layer.kept.append(kept)
        layer.seen[key] = (tensor, kept)
        return kept

    def _unpack(self, kept: torch.Tensor | _Kept) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept

        # Fetched one block ahead, so that the copies run while this block's gradients are computed.
        self._fetch(kept)
        for layer in (kept.layer, kept.layer.before):
            if layer is not None:
                for other in layer.kept:
                    self._fetch(other)
                layer.kept.clear()
        # Without this, each block would keep all blocks before it in memory.
        kept.layer.before = None
        tensor = kept.back
        assert tensor is not None, "fetched before it is taken"

        # The computation waits for the copy, and the allocator knows that both streams use the memory.
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)
        return tensor

    def _fetch(self, kept: _Kept) -> None:
        if kept.back is not None:
            return
        if self._stream is None:
            kept.back = kept.tensor
        else:
            with torch.cuda.stream(self._stream):
                kept.back = kept.tensor.to(self._device, non_blocking=True)
