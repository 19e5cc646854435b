"""Weight transfers between two processes on one GPU by CUDA memory handles, without copying the bytes.

The sender holds every gathered tensor until the engine has confirmed, so this takes one more copy of the model in GPU
memory while an update runs. A handle is memory of the GPU on which the trainer's rank 0 runs: an engine on other GPUs
cannot open it, and raises.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from trireme.algo.patch import Patch
from trireme.messages import TensorSpec
from trireme.transport.weights.backends import Receiver, Sender

CURRENT = torch.device("cuda")  # the GPU that this process has chosen


class IpcSender(Sender):
    """The trainer's end."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []

    def join(self, epoch: str, world_size: int) -> None:
        self.release()

    def send(self, specs: list[TensorSpec], parts: Iterable[torch.Tensor | Patch]) -> dict:
        """Return the payload: the GPU, and handles by tensor. The receiver is a process of the same user."""
        handles = {}
        for spec, part in zip(specs, parts, strict=True):
            assert isinstance(part, torch.Tensor), "memory handles carry whole tensors"

            # The engine reads this memory until it confirms, and a gathered tensor is freed before that.
            copy = part.detach().clone()
            self._held.append(copy)
            handles[spec.name] = to_handle(reduce_tensor(copy)[1])

        # The engine reads from another process, whose streams do not wait for these copies.
        torch.cuda.synchronize()
        return {"gpu": gpu_uuid(torch.cuda.current_device()), "handles": handles}

    def release(self) -> None:
        if self._held:
            self._held.clear()
            torch.cuda.ipc_collect()

    def close(self) -> None:
        self.release()


class IpcReceiver(Receiver):
    """An engine worker's end."""

    def __init__(self, device: torch.device = CURRENT) -> None:
        self._device = device

    def tensors(self, specs: list[TensorSpec], payload: dict) -> Iterator[tuple[str, torch.Tensor]]:
        """Open handles as they are iterated over.

        Raises:
            RuntimeError: the trainer sent memory of another GPU.
        """
        number = torch.cuda.current_device() if self._device.index is None else self._device.index
        if (own := gpu_uuid(number)) != payload["gpu"]:
            raise RuntimeError(
                f"The trainer's weights are on GPU {payload['gpu']}, and this engine worker is on GPU {own} - expected "
                'both on one, as memory handles (weight_broadcast.type = "ipc") open there alone. Give trainer and '
                'engine the same single GPU, or set `weight_broadcast.type = "nccl"`.'
            )
        for spec in specs:
            yield spec.name, rebuild_cuda_tensor(*from_handle(payload["handles"][spec.name], number))


def gpu_uuid(number: int) -> str:
    """Return the name of a GPU that is the same in every process, however CUDA_VISIBLE_DEVICES numbers the GPUs."""
    return str(torch.cuda.get_device_properties(number).uuid)


# A handle is the arguments of torch's own `rebuild_cuda_tensor` (torch 2.13), as numbers, and bytes in base64. So it
# travels as JSON, and nothing from a socket is unpickled. Two arguments are always the same types, one is a dtype, and
# one is the GPU as this process counts them.

_TYPES = {0: torch.Tensor, 4: torch.storage.TypedStorage}
_DTYPE, _DEVICE = 5, 6


def to_handle(arguments: Sequence[Any]) -> list[Any]:
    handle = [list(each) if isinstance(each, tuple) else each for each in arguments]
    handle = [{"bytes": base64.b64encode(each).decode()} if isinstance(each, bytes) else each for each in handle]
    handle[_DTYPE] = str(arguments[_DTYPE]).removeprefix("torch.")
    for place in (*_TYPES, _DEVICE):
        handle[place] = None
    return handle


def from_handle(handle: list[Any], device: int) -> tuple[Any, ...]:
    arguments = [tuple(each) if isinstance(each, list) else each for each in handle]
    arguments = [base64.b64decode(each["bytes"]) if isinstance(each, dict) else each for each in arguments]
    arguments[_DTYPE], arguments[_DEVICE] = getattr(torch, handle[_DTYPE]), device
    for place, kind in _TYPES.items():
        arguments[place] = kind
    return tuple(arguments)
