"""Weights by broadcast: gloo between CPUs, NCCL between GPUs. The same code but for the process group's class.

The sender is rank 0, each engine worker one rank above. A group lives for an epoch: whenever a peer has come or gone,
the orchestrator counts the epoch up and everyone joins anew, so a dead peer never blocks the living for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from trireme.messages import TensorSpec
from trireme.transport.weights.buckets import bucket_size, pack_bucket, split_into_buckets, unpack_bucket


class WeightGroup:
    """One rank's membership in the group of an epoch."""

    def __init__(self, kind: str, store: dist.Store, *, epoch: str, rank: int, world_size: int, timeout_s: float):
        prefixed = dist.PrefixStore(f"weights/{epoch}", store)
        self.device = torch.device("cpu") if kind == "gloo" else torch.device("cuda", torch.cuda.current_device())
        self._group = _process_group(kind, prefixed, rank, world_size, timedelta(seconds=timeout_s))
        self._kind = kind

    def broadcast(self, flat: torch.Tensor) -> None:
        """Fills `flat` on every rank with rank 0's. Raises RuntimeError when a peer is gone or the time is up."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([flat], options).wait()
        if self._kind == "nccl":
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        if self._kind == "nccl":
            self._group.abort()
        del self._group


def _process_group(
    kind: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def open_store(host: str, port: int, *, is_sender: bool, timeout_s: float) -> dist.Store:
    """The rendezvous; the sender hosts it for as long as it lives."""
    return dist.TCPStore(
        host, port, None, is_master=is_sender, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


class CollectiveSender:
    """The trainer's end."""

    def __init__(self, kind: str, host: str, port: int, *, bucket_bytes: int, timeout_s: float) -> None:
        self._kind = kind
        self._store = open_store(host, port, is_sender=True, timeout_s=timeout_s)
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None
        self._epoch: str | None = None

    def join(self, epoch: str, world_size: int) -> None:
        if self._group is not None and epoch == self._epoch:
            return
        self.close()
        self._group = WeightGroup(
            self._kind, self._store, epoch=epoch, rank=0, world_size=world_size, timeout_s=self._timeout_s
        )
        self._epoch = epoch

    def send(self, specs: list[TensorSpec], tensors: Iterable[torch.Tensor]) -> dict:
        """Sends all tensors, in the order of `specs`."""
        assert self._group is not None, "send before join"
        stream = iter(tensors)
        for bucket in split_into_buckets(specs, self._bucket_bytes):
            self._group.broadcast(pack_bucket(bucket, (next(stream) for _ in bucket), self._group.device))
        for _ in stream:  # a generator of tensors may finish its own bookkeeping after the last one
            raise AssertionError("more tensors than specs")
        return {}

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class CollectiveReceiver:
    """An engine worker's end."""

    def __init__(self, kind: str, host: str, port: int, *, bucket_bytes: int, timeout_s: float) -> None:
        self._kind = kind
        self._store = open_store(host, port, is_sender=False, timeout_s=timeout_s)
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None

    def join(self, epoch: str, rank: int, world_size: int) -> None:
        self.close()
        self._group = WeightGroup(
            self._kind, self._store, epoch=epoch, rank=rank, world_size=world_size, timeout_s=self._timeout_s
        )

    def tensors(self, specs: list[TensorSpec], payload: dict) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._group is not None, "receive before join"
        for bucket in split_into_buckets(specs, self._bucket_bytes):
            flat = torch.empty(bucket_size(bucket), dtype=torch.uint8, device=self._group.device)
            self._group.broadcast(flat)
            yield from unpack_bucket(bucket, flat)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
