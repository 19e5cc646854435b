"""Weights through a folder that trainer and engines share: slow, and works anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trireme.base.paths import sync_folder
from trireme.messages import TensorSpec
from trireme.transport.weights.buckets import split_into_buckets


class FilesystemSender:
    """Writes each version to files of at most a bucket each; keeps the last two versions."""

    def __init__(self, folder: Path, *, bucket_bytes: int) -> None:
        self._folder = folder
        self._bucket_bytes = bucket_bytes

    def join(self, epoch: str, world_size: int, *, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Nothing to join."""

    def send(self, specs: list[TensorSpec], tensors: Iterable[torch.Tensor]) -> dict:
        """Returns the payload that tells a receiver where to read."""
        target = self._next_folder()
        stream = iter(tensors)
        for index, bucket in enumerate(split_into_buckets(specs, self._bucket_bytes)):
            content = {spec.name: next(stream).detach().cpu().contiguous() for spec in bucket}
            save_file(content, target / f"{index:05d}.safetensors")
        sync_folder(target)
        return {"folder": str(target)}

    def _next_folder(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())
        for number in numbers[:-1]:
            for file in (self._folder / str(number)).iterdir():
                file.unlink()
            (self._folder / str(number)).rmdir()
        target = self._folder / str(numbers[-1] + 1 if numbers else 0)
        target.mkdir()
        return target

    def close(self) -> None:
        """Nothing is held open."""


class FilesystemReceiver:
    """Reads what the sender wrote."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def join(self, epoch: str, rank: int, world_size: int) -> None:
        """Nothing to join."""

    def tensors(self, specs: list[TensorSpec], payload: dict) -> Iterator[tuple[str, torch.Tensor]]:
        for path in sorted(Path(payload["folder"]).glob("*.safetensors")):
            with safe_open(path, framework="pt", device=str(self._device)) as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_tensor(name)

    def close(self) -> None:
        """Nothing is held open."""
