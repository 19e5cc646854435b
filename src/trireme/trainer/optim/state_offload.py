"""Optimizer state in CPU memory while the passes run: it is on the GPU only while its parameters are updated.

Parameters are updated in chunks, each of which fetches its state, takes the step and puts the state away again. So the
GPU never holds the state of more than one chunk, and every value is computed as without: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trireme.config.trainer import STATE_CHUNK
from trireme.trainer.parallel.shards import local_part


class OffloadsState(torch.optim.Optimizer):
    """Steps in chunks with state in CPU memory. `with_offload` puts this class in front of an optimizer's own."""

    param_groups: list[dict[str, Any]]
    _host: dict[torch.Tensor, dict[str, torch.Tensor]]  # pinned buffers by parameter and key, allocated once

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "no optimizer of the trainer's evaluates the loss again"
        groups = self.param_groups
        try:
            for group in groups:
                self.param_groups = [group]
                self._fetch(group["params"])
                super().step()
                self.put_away(group["params"])
        finally:
            self.param_groups = groups

        # Copies to the host are under way, and a checkpoint may read them next.
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _fetch(self, parameters: list[torch.Tensor]) -> None:
        for parameter, key, tensor in self._large(parameters):
            self._replace(parameter, key, local_part(tensor).to(parameter.device, non_blocking=True, copy=True))

    def put_away(self, parameters: list[torch.Tensor] | None = None) -> None:
        """Move state to CPU memory: of these parameters, or of all, as after it was loaded."""
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, key, tensor in self._large(every if parameters is None else parameters):
            local, buffers = local_part(tensor), self._host.setdefault(parameter, {})
            buffer = buffers.get(key)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=parameter.is_cuda)
                buffers[key] = buffer
            self._replace(parameter, key, buffer.copy_(local, non_blocking=parameter.is_cuda))

    def _large(self, parameters: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Yield the state of each parameter, but for step counters, which stay where the optimizer wants them."""
        for parameter in parameters:
            for key, tensor in list(self.state.get(parameter, {}).items()):
                if isinstance(tensor, torch.Tensor) and tensor.ndim:
                    yield parameter, key, tensor

    def _replace(self, parameter: torch.Tensor, key: str, local: torch.Tensor) -> None:
        tensor = self.state[parameter][key]
        if isinstance(tensor, DTensor):
            # The same shard in other memory: its mesh stays that of the parameter, with which it is saved.
            local = DTensor(local, tensor._spec, requires_grad=False)
        self.state[parameter][key] = local


def with_offload(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer, which keeps its state in CPU memory from now on."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (OffloadsState, kind), {})
    optimizer._host = {}
    optimizer.param_groups = [part for group in optimizer.param_groups for part in _in_chunks(group)]
    return optimizer


def _in_chunks(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    chunk: list[torch.Tensor] = []
    for parameter in group["params"]:
        if chunk and sum(local_part(each).nbytes for each in (*chunk, parameter)) > STATE_CHUNK:
            yield group | {"params": chunk}
            chunk = []
        chunk.append(parameter)
    yield group | {"params": chunk}
