"""A transfer of weights: what each backend's sender and receiver can do, and how to wait for one in the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from trireme.algo.patch import Patch
from trireme.messages import TensorSpec

T = TypeVar("T")


class Sender(ABC):
    """The trainer's end of a backend. The methods here do nothing, for backends without connections."""

    is_wanted: Callable[[], bool] = staticmethod(lambda: True)
    """Whether what is waited for may still come. Asked once a second while receivers are waited for; may block."""

    def join(self, epoch: str, world_size: int) -> None:
        """Wait until all receivers of the epoch are there."""

    @abstractmethod
    def send(self, specs: list[TensorSpec], parts: Iterable[torch.Tensor | Patch]) -> dict:
        """Send all tensors; return the payload with which receivers find them."""

    def release(self) -> None:
        """Free what is held for receivers, which have all of it or will never take it."""

    def close(self) -> None:
        """Close connections."""


class Receiver(ABC):
    """An engine worker's end."""

    def join(self, epoch: str, rank: int, world_size: int) -> None:
        """Join the peers of an epoch."""

    @abstractmethod
    def tensors(self, specs: list[TensorSpec], payload: dict) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive tensors as they are iterated over."""

    def close(self) -> None:
        """Close connections."""


def take_transfer(transfer: Future[list[T]], timeout_s: float) -> list[T]:
    """Wait for a transfer that is received in the background. Raises what the receiver raised, and TimeoutError."""
    if not wait([transfer], timeout_s).done:
        raise TimeoutError(
            f"The trainer did not send the announced weights within {timeout_s:.0f} s. See logs/trainer.stdout"
        )
    return transfer.result()
