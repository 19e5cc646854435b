"""Copies of tensors in CPU memory, for a thread that writes them while training changes the originals."""

from __future__ import annotations

import torch


class Staging:
    """Buffers by name, allocated once and used for every checkpoint.

    Where the tensors are on a GPU, their memory is pinned, for which the driver copies without a detour. It is held as
    long as the run goes on; a copy's content, until the next one under its name.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Begun when this returns, done after `finish`."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=self._on_gpu)

    def finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
