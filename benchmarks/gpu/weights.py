"""Sections of the transports of weights, between two processes and without an engine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty
from typing import Any, Literal

import torch

from benchmarks.gpu.section import FORK, part
from benchmarks.measuring import least
from trireme.algo.digest import tensor_digest
from trireme.algo.patch import Patch, apply_patch, build_patch, changed
from trireme.base.processes import free_port
from trireme.messages import InitInfo, TensorSpec
from trireme.transport.weights.backends import IpcReceiver, IpcSender
from trireme.transport.weights.buckets import spec_of
from trireme.transport.weights.collective import CollectiveReceiver, CollectiveSender

HOST = "127.0.0.1"
BUCKET_BYTES = 4 << 20
WAIT_S = 60.0
TIMEOUT_S = 15.0  # a broadcast's, if a peer has died

Hear = Callable[[], Any]
Say = Callable[[Any], None]


def delta(device: str) -> None:
    """Changed values are found on the device, and a copy on the host that is patched has the same digest."""
    torch.manual_seed(0)
    before = torch.randn(1 << (28 if device == "cuda" else 20), device=device, dtype=torch.bfloat16)
    for share in (0.01, 0.1, 1.0):
        with part(f"{share:g} changed") as found:
            after = torch.where(torch.rand(before.shape, device=device) < share, -before, before)
            patch = build_patch(after, changed(after, before))
            copy = before.cpu()
            apply_patch(Patch(patch.form, patch.num_changed, patch.where.cpu(), patch.values.cpu()), copy)
            assert tensor_digest(copy) == tensor_digest(after), "the patched copy differs"
            seconds = least(lambda after=after: build_patch(after, changed(after, before)), device)  # type: ignore[misc]
            found |= {"size": patch.num_bytes / after.nbytes, "gb_per_s": after.nbytes / seconds / 1e9}


def memory_handles(device: str) -> None:
    """Another process on the same GPU reads exactly what was sent, also if the sender leaves little memory free."""
    for name, free_gib in (("much memory", None), ("little memory", 3.0)):
        with part(name) as found, ranks(Rank(_receive_handles), Rank(_send_handles, free_gib)) as (receiver, sender):
            receiver.hear()  # it is ready, and its context has its memory
            sender.tell(None)
            receiver.tell(sender.hear())
            received = receiver.hear()
            sender.tell(None)
            sent, found["seconds"] = sender.hear()
            assert received == sent, "other values arrived"


def _send_handles(hear: Hear, say: Say, free_gib: float | None) -> None:
    """Send 2 GiB, of which a copy exists meanwhile. With `free_gib` all but this and the copy is taken before."""
    hear()
    tensors = _tensors("cuda")
    needed = sum(each.nbytes for each in tensors.values())
    free = torch.cuda.mem_get_info()[0] - needed
    taken = torch.empty(max(0, free - int(free_gib * 2**30)) if free_gib else 0, dtype=torch.uint8, device="cuda")
    sender, began = IpcSender(), time.perf_counter()
    say(json.dumps(sender.send(_specs("cuda"), tensors.values())))  # as it travels
    hear()
    say((_digests(tensors.items()), time.perf_counter() - began))
    del taken
    sender.close()


def _receive_handles(hear: Hear, say: Say) -> None:
    torch.zeros(1, device="cuda")
    say(None)
    say(_digests(IpcReceiver().tensors(_specs("cuda"), json.loads(hear()))))


def broadcast(device: str) -> None:
    """A transfer between two processes with a GPU each by NCCL; on a CPU by gloo."""
    with part(_kind(device)) as found:
        with ranks(Rank(_send, device, 2), Rank(_receive, device)) as (sender, receiver):
            receiver.tell(sender.hear())
            for _ in range(2):  # the first epoch opens the connections
                sent, num_bytes, seconds = sender.hear()
                assert receiver.hear() == sent, "other values arrived"
                found["gb_per_s"] = num_bytes / seconds / 1e9


def killed_peer(device: str) -> None:
    """A receiver is killed within a broadcast. The sender gets an error in time, lives on, and sends everything to a
    successor in the next epoch."""
    with part(_kind(device)) as found:
        with ranks(Rank(_send, device, 2), Rank(_die_within, device), Rank(_receive, device, 1)) as (sender, *others):
            port = sender.hear()
            others[0].tell(port)
            found["error"], _, found["seconds_to_the_error"] = sender.hear()
            assert others[0].has_died(), "the receiver is alive"
            assert isinstance(found["error"], str), "the transfer ended without an error"
            others[1].tell(port)
            sent, _, found["seconds_of_the_next"] = sender.hear()
            assert others[1].hear() == sent, "other values arrived at the successor"


def _send(hear: Hear, say: Say, device: str, num_epochs: int) -> None:
    """Say the port; then send in each epoch, and say digests or the error, bytes and seconds."""
    _take_gpu(device, 0)
    port, tensors = free_port(), _tensors(device)
    say(port)
    sender = CollectiveSender(_kind(device), HOST, port, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
    for epoch in range(num_epochs):
        answer: Any = _digests(tensors.items())
        sender.join(str(epoch), 2)
        began = time.perf_counter()
        try:
            sender.send(_specs(device), tensors.values())
        except RuntimeError as error:
            answer = str(error)
        say((answer, sum(each.nbytes for each in tensors.values()), time.perf_counter() - began))


def _receive(hear: Hear, say: Say, device: str, first: int = 0) -> None:
    """Hear the port; then receive in each epoch from the first one on, and say digests."""
    _take_gpu(device, 1)
    receiver = CollectiveReceiver(_info(device, hear()))
    for epoch in range(first, 2):
        receiver.join(str(epoch), 1, 2)
        say(_digests(receiver.tensors(_specs(device), {})))


def _die_within(hear: Hear, say: Say, device: str) -> None:
    _take_gpu(device, 1)
    receiver = CollectiveReceiver(_info(device, hear()))
    receiver.join("0", 1, 2)
    next(receiver.tensors(_specs(device), {}))
    os.kill(os.getpid(), signal.SIGKILL)


def _kind(device: str) -> Literal["nccl", "gloo"]:
    return "nccl" if device == "cuda" else "gloo"


def _take_gpu(device: str, number: int) -> None:
    if device == "cuda":
        torch.cuda.set_device(number)


def _info(device: str, port: int) -> InitInfo:
    options: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S}
    return InitInfo(_kind(device), HOST, port, "0", rank_offset=1, world_size=2, **options)


def _specs(device: str) -> list[TensorSpec]:
    """Describe 2 GiB of tensors, on a CPU 64 MiB: both are many buckets."""
    shape = (4096, 4096) if device == "cuda" else (512, 1024)
    return [spec_of(f"w{number}", torch.bfloat16, shape) for number in range(64)]


def _tensors(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {spec.name: torch.randn(*spec.shape, device=device, dtype=torch.bfloat16) for spec in _specs(device)}


def _digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors}


class Rank:
    """A process that runs `work(hear, say, *arguments)`: it hears what it is told, and what it says is heard here."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._inbox, self._outbox = FORK.Queue(), FORK.Queue()
        ends = (partial(self._inbox.get, timeout=WAIT_S), self._outbox.put)
        self._process = FORK.Process(target=work, args=(*ends, *arguments), daemon=True)
        self._process.start()

    def tell(self, value: Any) -> None:
        self._inbox.put(value)

    def hear(self) -> Any:
        """Raises: RuntimeError if the process has died, or says nothing for a minute."""
        ends_at = time.monotonic() + WAIT_S
        while time.monotonic() < ends_at:
            with suppress(Empty):
                return self._outbox.get(timeout=0.5)
            if self._process.exitcode:
                break
        raise RuntimeError(f"a rank said nothing; its exit code: {self._process.exitcode}")

    def has_died(self) -> bool:
        self._process.join(WAIT_S)
        return self._process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def ranks(*started: Rank) -> Iterator[tuple[Rank, ...]]:
    try:
        yield started
    finally:
        for rank in started:
            rank.end()
