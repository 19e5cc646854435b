"""The backends of weight transfers (`weight_broadcast.type`): open one, and those whose receivers pull.

    gloo, nccl    broadcasts, in which the sender waits for all receivers (`collective.py`)
    filesystem    a folder that trainer and engines share: slow, and works anywhere
    ipc           CUDA memory handles between two processes on one GPU

Senders of the latter two wait for no receiver: it pulls the tensors, by the payload that `send` returned.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from trireme.algo.patch import Patch
from trireme.base.paths import replace_folder, sync_folder
from trireme.messages import InitInfo, TensorSpec
from trireme.transport.weights.buckets import HostCopy, pack_patches, split_into_buckets
from trireme.transport.weights.collective import CollectiveReceiver, CollectiveSender
from trireme.transport.weights.transfer import Receiver, Sender

CPU = torch.device("cpu")
CURRENT = torch.device("cuda")  # the GPU that this process has chosen


def open_sender(
    kind: str, *, host: str, port: int, folder: Path, bucket_bytes: int, timeout_s: float, delta: bool = False
) -> Sender:
    """Open the trainer's end. With `delta` it sends patches, which receivers recognize."""
    if kind == "filesystem":
        return FilesystemSender(folder, bucket_bytes=bucket_bytes, delta=delta)
    if kind == "ipc":
        assert not delta, "memory handles carry whole tensors"
        return IpcSender()
    return CollectiveSender(kind, host, port, bucket_bytes=bucket_bytes, timeout_s=timeout_s, delta=delta)


def open_receiver(info: InitInfo, device: torch.device) -> Receiver:
    if info.kind == "filesystem":
        return FilesystemReceiver(device)
    if info.kind == "ipc":
        return IpcReceiver(device)
    return CollectiveReceiver(info)


class FilesystemSender(Sender):
    """Writes each version to files of at most a bucket each, in a folder that engines read too; keeps the last two.

    A version is whole or absent: it is written under another name, which is removed if writing fails. A file holds
    tensors under their names or, of a delta, the head and the body of a bucket of patches.
    """

    def __init__(self, folder: Path, *, bucket_bytes: int, delta: bool = False) -> None:
        self._folder = folder
        self._bucket_bytes = bucket_bytes
        self._delta = delta

    def send(self, specs: list[TensorSpec], parts: Iterable[torch.Tensor | Patch]) -> dict:
        """Write a version; return the payload with the folder that a receiver reads."""
        target, partial = self._next_folder(), self._folder / ".partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a trainer that was killed
        try:
            partial.mkdir()
            self._write(partial, specs, parts)
            replace_folder(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return {"folder": str(target), "bucket_bytes": self._bucket_bytes if self._delta else None}

    def _write(self, folder: Path, specs: list[TensorSpec], parts: Iterable[torch.Tensor | Patch]) -> None:
        stream = iter(parts)
        for index, bucket in enumerate(split_into_buckets(specs, self._bucket_bytes)):
            parts_of_bucket = (next(stream) for _ in bucket)
            if self._delta:
                head, body = pack_patches(parts_of_bucket, CPU)
                content = {"head": head, "body": body}
            else:
                content = {}
                for spec, part in zip(bucket, parts_of_bucket, strict=True):
                    assert isinstance(part, torch.Tensor), "patches are sent as a delta"
                    content[spec.name] = part.detach().cpu().contiguous()

            save_file(content, folder / f"{index:05d}.safetensors")
        sync_folder(folder)

    def _next_folder(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

        # Keep the newest version: an engine may still read it while the next is written.
        for number in numbers[:-1]:
            shutil.rmtree(self._folder / str(number))
        return self._folder / str(numbers[-1] + 1 if numbers else 0)


class FilesystemReceiver(Receiver):
    """Reads what the sender wrote."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy = HostCopy()  # belongs to one epoch: an engine opens another receiver for the next

    def tensors(self, specs: list[TensorSpec], payload: dict) -> Iterator[tuple[str, torch.Tensor]]:
        paths = sorted(Path(payload["folder"]).glob("*.safetensors"))

        # A delta has one file per bucket, and both ends split tensors in the same way.
        if bucket_bytes := payload.get("bucket_bytes"):
            for path, bucket in zip(paths, split_into_buckets(specs, bucket_bytes), strict=True):
                with safe_open(path, framework="pt") as file:
                    head, body = file.get_tensor("head"), file.get_tensor("body")
                for name, tensor in self._copy.take(bucket, head, body):
                    yield name, tensor.to(self._device)
        else:
            for path in paths:
                with safe_open(path, framework="pt", device=str(self._device)) as file:
                    for name in file.keys():  # noqa: SIM118 - not a dict
                        yield name, file.get_tensor(name)


class IpcSender(Sender):
    """Makes CUDA memory handles, without copying the bytes to the engine.

    The sender holds every gathered tensor until the engine has confirmed, so this takes one more copy of the model in
    GPU memory while an update runs. A handle is memory of the GPU on which the trainer's rank 0 runs: an engine on
    other GPUs cannot open it, and raises.
    """

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
    """Opens handles, on the GPU that this process has chosen unless another is named."""

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
