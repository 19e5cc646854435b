"""The one table of how weights can travel: name -> the two ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Thread
from typing import Generic, Protocol, TypeVar

import torch

from trireme.algo.patch import Patch
from trireme.messages import TensorSpec


class Sender(Protocol):
    def join(self, epoch: str, world_size: int, *, is_wanted: Callable[[], bool] = lambda: True) -> None: ...
    def send(self, specs: list[TensorSpec], parts: Iterable[torch.Tensor | Patch]) -> dict: ...

    def release(self) -> None:
        """Receivers have all that was sent, or will never take it."""

    def close(self) -> None: ...


class Receiver(Protocol):
    def join(self, epoch: str, rank: int, world_size: int) -> None: ...
    def tensors(self, specs: list[TensorSpec], payload: dict) -> Iterator[tuple[str, torch.Tensor]]: ...
    def close(self) -> None: ...


def open_sender(
    kind: str, *, host: str, port: int, folder: Path, bucket_bytes: int, timeout_s: float, delta: bool = False
) -> Sender:
    """With `delta`, what is sent are patches; receivers are told by what they receive."""
    if kind == "filesystem":
        from trireme.transport.weights.filesystem import FilesystemSender

        return FilesystemSender(folder, bucket_bytes=bucket_bytes, delta=delta)
    if kind == "ipc":
        assert not delta, "memory handles carry whole tensors"
        from trireme.transport.weights.ipc import IpcSender

        return IpcSender()
    from trireme.transport.weights.collective import CollectiveSender

    return CollectiveSender(kind, host, port, bucket_bytes=bucket_bytes, timeout_s=timeout_s, delta=delta)


def open_receiver(
    kind: str, *, host: str, port: int, bucket_bytes: int, timeout_s: float, device: torch.device
) -> Receiver:
    if kind == "filesystem":
        from trireme.transport.weights.filesystem import FilesystemReceiver

        return FilesystemReceiver(device)
    if kind == "ipc":
        from trireme.transport.weights.ipc import IpcReceiver

        return IpcReceiver()
    from trireme.transport.weights.collective import CollectiveReceiver

    return CollectiveReceiver(kind, host, port, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


Part = TypeVar("Part")


class BackgroundReceive(Generic[Part]):
    """All that comes. A daemon: where a sender is gone for good, not even the end of the process waits for it."""

    def __init__(self, coming: Iterator[Part]) -> None:
        self._parts: list[Part] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._take_in, args=(coming,), name="weights", daemon=True)
        self._thread.start()

    def _take_in(self, coming: Iterator[Part]) -> None:
        try:
            self._parts.extend(coming)
        except BaseException as error:  # raised by `take`
            self._error = error

    def take(self, timeout_s: float) -> list[Part]:
        """Returns when all is there. Raises what the receiver raised, and TimeoutError."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"waited {timeout_s:.0f} s for the trainer to send what it had announced. Look at logs/trainer.stdout"
            )
        if self._error is not None:
            raise self._error
        return self._parts
