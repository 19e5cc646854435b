"""Weights between processes on the same GPU: CUDA memory handles travel, the bytes stay where they are.

The sender holds every gathered tensor until the engines have confirmed, so this takes one more copy of the model in
GPU memory while an update runs.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator

import torch
from torch.multiprocessing.reductions import reduce_tensor

from trireme.messages import TensorSpec


class IpcSender:
    """The trainer's end."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []

    def join(self, epoch: str, world_size: int) -> None:
        """Lets go of what the last update held."""
        self._held.clear()

    def send(self, specs: list[TensorSpec], tensors: Iterable[torch.Tensor]) -> dict:
        """Returns the payload: pickled handles. Receivers are processes of the same user on this machine."""
        handles = []
        for spec, tensor in zip(specs, tensors, strict=True):
            copy = tensor.detach().clone()
            self._held.append(copy)
            handles.append((spec.name, reduce_tensor(copy)))
        torch.cuda.synchronize()
        return {"handles": base64.b64encode(pickle.dumps(handles)).decode()}

    def close(self) -> None:
        self._held.clear()


class IpcReceiver:
    """An engine worker's end."""

    def join(self, epoch: str, rank: int, world_size: int) -> None:
        """Nothing to join."""

    def tensors(self, specs: list[TensorSpec], payload: dict) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (rebuild, arguments) in pickle.loads(base64.b64decode(payload["handles"])):
            yield name, rebuild(*arguments)

    def close(self) -> None:
        """The handles close with their tensors."""
