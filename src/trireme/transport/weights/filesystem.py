"""Weights through a folder that trainer and engines share: slow, and works anywhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trireme.algo.patch import Patch
from trireme.base.paths import replace_folder, sync_folder
from trireme.messages import TensorSpec
from trireme.transport.weights.backends import Receiver, Sender
from trireme.transport.weights.buckets import split_into_buckets
from trireme.transport.weights.deltas import HostCopy, pack_patches

_CPU = torch.device("cpu")


class FilesystemSender(Sender):
    """Writes each version to files of at most a bucket each; keeps the last two versions.

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
                head, body = pack_patches(parts_of_bucket, _CPU)
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
