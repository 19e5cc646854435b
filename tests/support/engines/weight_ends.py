"""A real sender of weights and its real receivers, each joining and working in a thread of its own."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from trireme.algo.digest import tensor_digest
from trireme.algo.patch import Patch
from trireme.base.processes import free_port
from trireme.messages import InitInfo, TensorSpec
from trireme.transport.weights.backends import open_receiver, open_sender
from trireme.transport.weights.buckets import spec_of
from trireme.transport.weights.transfer import Receiver, Sender

BUCKET_BYTES = 4096
DEADLINE_S = 60
SHORT_S = 8.0  # a peer that works, on a busy machine, is quicker

Tensors = dict[str, torch.Tensor]


def random_model(seed: int = 0) -> Tensors:
    """Tensors of several types; one larger than a bucket, one of an odd size, one number, one without numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(70, 33, generator=generator), "bias": torch.randn(13, generator=generator),
        "half": torch.randn(17, 3, generator=generator).bfloat16(), "scale": torch.randn((), generator=generator),
        "empty": torch.empty(0, 4), "norm": torch.randn(16, generator=generator).bfloat16(),
        "counts": torch.randint(0, 100, (5,), generator=generator),
    }  # fmt: skip


def specs_of(tensors: Tensors) -> list[TensorSpec]:
    return [spec_of(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def digests_of(tensors: Tensors) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def receive(receiver: Receiver, tensors: Tensors, payload: dict | None = None) -> dict[str, str]:
    return {name: tensor_digest(found) for name, found in receiver.tensors(specs_of(tensors), payload or {})}


class Ends:
    def __init__(self, num_receivers: int, *, timeout_s: float, delta: bool = False) -> None:
        port = free_port()
        options = {"host": "127.0.0.1", "port": port, "bucket_bytes": BUCKET_BYTES, "timeout_s": timeout_s}
        self.sender: Sender = open_sender("gloo", folder=Path("unused"), delta=delta, **options)
        self.info = InitInfo("gloo", epoch="", rank_offset=1, world_size=1 + num_receivers, **options)
        self.receivers = [open_receiver(self.info, torch.device("cpu")) for _ in range(num_receivers)]
        self._pool = ThreadPoolExecutor(num_receivers + 1)

    def send(
        self,
        tensors: Tensors,
        *,
        epoch: str,
        receivers: list[Receiver],
        join: bool = True,
        parts: Iterable[torch.Tensor | Patch] | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> list[Future]:
        """Return the sender's future, then the receivers'. `parts` is what is sent of each tensor, where not all."""
        world_size = len(self.receivers) + 1

        def work_as_sender() -> None:
            self.sender.is_wanted = is_wanted
            self.sender.join(epoch, world_size)
            self.sender.send(specs_of(tensors), iter(tensors.values() if parts is None else parts))

        def work_as_receiver(receiver: Receiver) -> dict[str, str]:
            if join:
                receiver.join(epoch, 1 + self.receivers.index(receiver), world_size)
            return receive(receiver, tensors)

        sending = self._pool.submit(work_as_sender)
        return [sending, *(self._pool.submit(work_as_receiver, receiver) for receiver in receivers)]

    def close(self) -> None:
        for end in [*self.receivers, self.sender]:
            end.close()
        self._pool.shutdown(wait=False)


def outcome(futures: list[Future]) -> list[dict[str, str] | None]:
    """None of the sender, and what receivers found."""
    return [future.result(DEADLINE_S) for future in futures]


def receive_a_part(specs: str, info: str) -> None:
    """Be the last of two receivers, and stop before any of the first broadcast has been sent."""
    receiver = open_receiver(msgspec.json.decode(info, type=InitInfo), torch.device("cpu"))
    receiver.join("a/1", 2, 3)
    wait = receiver._group.begin_broadcast(torch.empty(1 << 26, dtype=torch.uint8))  # type: ignore[attr-defined]
    time.sleep(0.5)  # gloo asks for it in a thread
    receiver.tensors(msgspec.json.decode(specs, type=list[TensorSpec]), {})  # says that it listens
    os.kill(os.getpid(), signal.SIGSTOP)
    wait()


if __name__ == "__main__":
    receive_a_part(*sys.argv[1:])
