"""Weight transfers between processes on the same GPU by CUDA memory handles, without copying the bytes.

The sender holds every gathered tensor until the engines have confirmed, so this takes one more copy of the model in
GPU memory while an update runs.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from trireme.algo.patch import Patch
from trireme.messages import TensorSpec
from trireme.transport.weights.backends import Receiver, Sender


class IpcSender(Sender):
    """The trainer's end."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []

    def join(self, epoch: str, world_size: int) -> None:
        self.release()

    def send(self, specs: list[TensorSpec], parts: Iterable[torch.Tensor | Patch]) -> dict:
        """Returns the payload: handles by tensor. Receivers are processes of the same user on this machine."""
        handles = {}
        for spec, part in zip(specs, parts, strict=True):
            assert isinstance(part, torch.Tensor), "memory handles carry whole tensors"
            copy = part.detach().clone()
            self._held.append(copy)
            handles[spec.name] = _to_handle(copy)
        torch.cuda.synchronize()
        return {"handles": handles}

    def release(self) -> None:
        if self._held:
            self._held.clear()
            torch.cuda.ipc_collect()

    def close(self) -> None:
        self.release()


class IpcReceiver(Receiver):
    """An engine worker's end."""

    def tensors(self, specs: list[TensorSpec], payload: dict) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in specs:
            yield spec.name, _from_handle(payload["handles"][spec.name])


# A handle is what torch's own `rebuild_cuda_tensor` takes (torch 2.13), its three types left out: numbers, and bytes in
# base64. So it travels as JSON, and nothing from a socket is unpickled.

_TYPES = {0: torch.Tensor, 4: torch.storage.TypedStorage}
_DTYPE = 5


def _to_handle(tensor: torch.Tensor) -> list[Any]:
    handle: list[Any] = []
    for argument in reduce_tensor(tensor)[1]:
        if isinstance(argument, bytes):
            argument = {"bytes": base64.b64encode(argument).decode()}
        handle.append(list(argument) if isinstance(argument, (tuple, torch.Size)) else argument)
    handle[_DTYPE] = str(tensor.dtype).removeprefix("torch.")
    for place in _TYPES:
        handle[place] = None
    return handle


def _from_handle(handle: list[Any]) -> torch.Tensor:
    arguments: list[Any] = []
    for argument in handle:
        if isinstance(argument, dict):
            argument = base64.b64decode(argument["bytes"])
        arguments.append(tuple(argument) if isinstance(argument, list) else argument)
    arguments[_DTYPE] = getattr(torch, handle[_DTYPE])
    for place, kind in _TYPES.items():
        arguments[place] = kind
    return rebuild_cuda_tensor(*arguments)
