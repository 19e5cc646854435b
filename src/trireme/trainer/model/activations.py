"""What a transformer block keeps for its backward pass: everything, what is dear, or nothing; on GPU or in CPU memory.

Each of these changes the block's own `forward`, inside of FSDP's hooks: when a block is recomputed, its parameters have
been gathered for its backward pass already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
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
    "flex_attention",
}
"""Operations whose results `selective` keeps; and all those of `KEPT_LIBRARIES`."""

CHANGED_BY_EXPERTS = {"aten::_grouped_mm", "aten::bmm"}
"""To these products, transformers adds experts' biases in place: what was kept would be another tensor."""

KEPT_LIBRARIES = ("flash_attn", "flash_attn_3", "_flash_attn2", "_flash_attn3")

OFFLOADED_BYTES = 1 << 20  # smaller tensors stay: a copy costs more than it frees


def wrap_layers(layers: Sequence[torch.nn.Module], config: TrainerModel, device: torch.device) -> None:
    """From inside out: what is recomputed is compiled as well, and offloading sees what a compiled block keeps."""
    offload = Offload(device, smallest_bytes=OFFLOADED_BYTES) if config.activation_offload else None
    for index, layer in enumerate(layers):
        forward: Forward = layer.forward
        if config.ac and index % config.ac.freq == 0:
            forward = _recomputed(forward, layer, config.ac)
        if config.compile:
            forward = torch.compile(forward)
        if offload:
            forward = offload.around(forward, layer, is_first=index == 0)
        layer.forward = forward


def _recomputed(forward: Forward, layer: torch.nn.Module, config: ActivationCheckpointing) -> Forward:
    if config.mode == "full":
        return partial(checkpoint, forward, use_reentrant=False)
    kept = KEPT - CHANGED_BY_EXPERTS if _have_biases(layer) else KEPT
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _have_biases(layer: torch.nn.Module) -> bool:
    """Whether it has experts, and these have biases."""
    return any(".experts." in name and name.endswith("_bias") for name, _ in layer.named_parameters())


def _policy(kept: Set[str], _: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    library = operation.name().partition("::")[0]
    is_kept = operation.name() in kept or library in KEPT_LIBRARIES
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(eq=False)
class _Layer:
    """What one pass through one block has saved."""

    parameters: set[int]  # addresses of memory that stays where it is
    before: _Layer | None  # whose backward pass comes next
    kept: list[_Kept] = field(default_factory=list)  # until they are on their way back
    seen: dict[tuple[Any, ...], tuple[torch.Tensor, _Kept]] = field(default_factory=dict)


@dataclass(eq=False)
class _Kept:
    """A tensor in CPU memory."""

    layer: _Layer
    tensor: torch.Tensor
    back: torch.Tensor | None = None  # the copy on the device, once it was asked for


class Offload:
    """Moves what blocks save for their backward pass to CPU memory, and back in time.

    On a GPU both ways run beside the computation, on a stream of their own: as a block's backward pass begins, what the
    block before it saved is fetched. Parameters stay: FSDP gathers them again.
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
            stay = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
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
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in layer.seen:  # the same input of several matrices is moved once
            layer.seen[key] = (tensor, self._move(layer, tensor))
        return layer.seen[key][1]

    def _move(self, layer: _Layer, tensor: torch.Tensor) -> _Kept:
        source = tensor.detach()
        self.num_bytes += source.nbytes
        copy = torch.empty_like(source, device="cpu", pin_memory=self._stream is not None)
        if self._stream is None:
            copy.copy_(source)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                copy.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
        kept = _Kept(layer, copy)
        layer.kept.append(kept)
        return kept

    def _unpack(self, kept: torch.Tensor | _Kept) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        self._fetch(kept)
        for layer in (kept.layer, kept.layer.before):
            if layer is not None:
                for other in layer.kept:
                    self._fetch(other)
                layer.kept.clear()
        kept.layer.before = None
        return self._take(kept)

    def _fetch(self, kept: _Kept) -> None:
        if kept.back is not None:
            return
        if self._stream is None:
            kept.back = kept.tensor
        else:
            with torch.cuda.stream(self._stream):
                kept.back = kept.tensor.to(self._device, non_blocking=True)

    def _take(self, kept: _Kept) -> torch.Tensor:
        tensor = kept.back
        assert tensor is not None, "fetched before it is taken"
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)
        return tensor
