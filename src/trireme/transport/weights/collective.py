"""Weight transfers by broadcast: gloo between CPUs, NCCL between GPUs. Only the class of the process group differs.

The sender is rank 0, and the engine workers are the other ranks. A group lives for an epoch: whenever a peer joins or
leaves, the orchestrator increments the epoch and all peers join again. So a dead peer never blocks the others for good.

No peer enters a group before all are there, and nothing is sent before all listen. Each announces both in the store,
and the sender, while it waits, that it is alive. If a peer were missing, forming a group or a broadcast would block
until the timeout, and a blocked engine notices nothing else: neither that its orchestrator died, nor another transfer.
A peer that dies during a broadcast may block it too: NCCL does not notice, and gloo wakes no thread that has received
or sent a part of a message. So each end that waits for a broadcast asks once a second whether it is still wanted.

NCCL has two more traps, which this module avoids by environment variables that hold while a group is made:
- NCCL makes its communicator in the first collective, and hangs if the ranks read different settings then. vLLM's
  batch-invariant mode sets some in the engine alone. So engines take the trainer's, and `WeightGroup` makes the
  communicator at once.
- When a collective fails, torch's watchdog ends the process, in torch 2.13 even if it is told to ignore errors: it
  signals the heartbeat monitor of the process's first group, which is FSDP's or vLLM's. So a weight group has none.

While one bucket travels, the next is filled and the one before is read. So a transfer takes the memory of two buckets
and one tensor at the sender, and of two buckets at a receiver.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from trireme.algo.patch import Patch
from trireme.base.background import in_background
from trireme.base.network import listening_address, watch_connections
from trireme.base.token import sealed
from trireme.messages import InitInfo, TensorSpec
from trireme.transport.weights.buckets import (
    BucketBuffers,
    HostCopy,
    bucket_size,
    pack_bucket,
    pack_patches,
    split_into_buckets,
    unpack_bucket,
)
from trireme.transport.weights.transfer import Receiver, Sender

STREAM_POLL_S = 1e-4

# torch reads this when a group is made. `wait` of a broadcast then blocks, so `_poll` comes before it.
WITHOUT_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1"}

AGREED = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_COLLNET_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_NET_DISABLE",
)
"""Settings that all ranks of an NCCL communicator must share, and that vLLM sets for its own communicators.

vLLM also lists them in `NCCL_NO_CACHE`, so that NCCL (2.29.7 and later) reads them again for each communicator.
"""


class WeightGroup:
    """One rank's membership in the process group of an epoch."""

    def __init__(
        self,
        kind: str,
        store: dist.Store,
        *,
        epoch: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
        settings: Mapping[str, str | None] | None = None,
    ):
        """Form the group; with NCCL also the communicator.

        Args:
            is_wanted: whether what is waited for may still come. Asked once a second.
            settings: environment variables under which NCCL makes the communicator; None unsets one.

        Raises:
            RuntimeError: a peer died or is missing.
        """
        prefixed = dist.PrefixStore(f"weights/{epoch}", store)
        self.device = torch.device("cpu") if kind == "gloo" else torch.device("cuda", torch.cuda.current_device())
        self._kind = kind
        self._timeout_s = timeout_s
        self.is_wanted = is_wanted
        self.buffers = BucketBuffers(self.device)

        open_group = partial(_process_group, kind, prefixed, rank, world_size, timedelta(seconds=timeout_s))
        if kind == "gloo":
            self._group = open_group()
        else:
            # torch reads `WITHOUT_WATCHDOG` when it makes the group, NCCL reads `settings` for the communicator.
            with environment(WITHOUT_WATCHDOG | dict(settings or {})):
                self._group = open_group()
                self._make_communicator(world_size)
        watch_connections()

    def _make_communicator(self, world_size: int) -> None:
        """Broadcast one byte, in a thread: NCCL connects its ranks in C++, without a deadline."""
        flat = torch.zeros(1, dtype=torch.uint8, device=self.device)
        connecting = in_background(partial(self._start_broadcast, flat), name="a new NCCL communicator")
        try:
            self._poll(connecting.done, f"NCCL did not connect the {world_size} ranks of the weight group")
            self._await(connecting.result(), flat)
        except BaseException:
            # NCCL cannot abort a communicator that it is still making. If the last rank comes after all, this does.
            connecting.add_done_callback(lambda _: self.close())
            raise

    def broadcast(self, flat: torch.Tensor) -> None:
        """Fill `flat` on every rank with rank 0's. Raises RuntimeError if a peer died, or at the timeout."""
        self.begin_broadcast(flat)()

    def begin_broadcast(self, flat: torch.Tensor) -> Callable[[], None]:
        """Start a broadcast; return the function that waits for its end. Until then `flat` must not be written to."""
        if not flat.numel():
            return lambda: None
        return partial(self._await, self._start_broadcast(flat), flat)

    def _start_broadcast(self, flat: torch.Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([flat], options)

    def _await(self, work: dist.Work, _: torch.Tensor) -> None:
        """Wait for a broadcast; keeps its tensor alive until then."""
        # gloo waits in short pieces, between which this end can give up. A wait that times out breaks nothing.
        while self._kind == "gloo":
            try:
                work.wait(timedelta(seconds=CHECK_WANTED_S))
                return
            except RuntimeError:
                if work.is_completed():  # broken, or complete just after this wait has timed out
                    work.wait()
                    return
            self._require_wanted()

        self._poll(work.is_completed, "a peer of the weight group took no part in a broadcast")
        work.wait()  # raises what broke it; else the current stream may read the tensor from here on

    def _poll(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait for NCCL, whose own waits would block until a timeout that ends more than this transfer."""
        began = looked = time.monotonic()
        while not is_over():
            # `is_wanted` may ask a store over the network, so not in every poll.
            now = time.monotonic()
            if now - looked > CHECK_WANTED_S:
                looked = now
                self._require_wanted()

            if now - began > self._timeout_s:
                raise RuntimeError(
                    f"{what} within {self._timeout_s:g} s (`weight_broadcast.timeout_s`) - all ranks were expected to. "
                    "If none of them died, compare the NCCL_* variables and the network of trainer and engines"
                )
            time.sleep(STREAM_POLL_S)

    def _require_wanted(self) -> None:
        if not self.is_wanted():
            raise RuntimeError("a peer died, or this transfer was abandoned")

    def close(self) -> None:
        """End the group, in the background, as either library may block in it."""
        last = [self._group]
        del self._group

        def end() -> None:
            group = last.pop()
            if self._kind == "nccl":
                group.abort()

        # gloo cannot abort: the end of a group waits for its broadcasts, which end at the timeout
        ending = in_background(end, name="a closed weight group")
        if self._kind == "nccl":  # its kernels occupy the GPU until they are aborted
            wait([ending], self._timeout_s)


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, and unset those that are None; restore all at the end."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _process_group(
    kind: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def open_store(host: str, port: int, *, is_sender: bool, timeout_s: float) -> dist.Store:
    """Open the rendezvous store, which the sender hosts as long as it lives.

    Neither the store nor gloo can check a token. With a token, the names under which peers find each other are secret;
    digests, which are sent over authenticated connections, show whether the right weights arrived.
    """
    listener = None
    if is_sender:  # torch by itself would listen on all interfaces
        listener = socket.create_server((listening_address(host), port), backlog=1024).detach()
    store = dist.TCPStore(
        host,
        port,
        None,
        is_master=is_sender,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    watch_connections()
    return dist.PrefixStore(sealed("weights"), store)


POLL_S = 0.01
SHORTEST_POLL_S = 0.001  # peers mostly arrive within moments, and engines are paused meanwhile
CHECK_WANTED_S = 1.0
SILENCE_S = 15.0  # how long an engine waits for a sender that gives no sign of life


def _pause_s(began: float) -> float:
    """Return the time until the next poll, growing up to `POLL_S`."""
    return min(POLL_S, max(SHORTEST_POLL_S, 0.1 * (time.monotonic() - began)))


def _here(epoch: str, rank: int) -> str:
    return f"weights/{epoch}/here/{rank}"


def _listens(epoch: str, transfer: int, rank: int) -> str:
    return f"weights/{epoch}/listens/{transfer}/{rank}"


def _over(epoch: str) -> str:
    return f"weights/{epoch}/over"


def _begun(epoch: str) -> str:
    """Return the key that holds the form in which tensors travel in an epoch."""
    return f"weights/{epoch}/begun"


AS_TENSORS, AS_PATCHES = b"tensors", b"patches"
SETTINGS = "weights/nccl"  # the key that holds the sender's `AGREED`


class CollectiveSender(Sender):
    """The trainer's end."""

    def __init__(
        self, kind: str, host: str, port: int, *, bucket_bytes: int, timeout_s: float, delta: bool = False
    ) -> None:
        self._kind = kind
        self._store = open_store(host, port, is_sender=True, timeout_s=timeout_s)
        self._store.set(SETTINGS, msgspec.json.encode({name: os.environ.get(name) for name in AGREED}))
        self._bucket_bytes = bucket_bytes
        self._delta = delta
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None
        self._epoch: str | None = None
        self._num_transfers = 0  # transfers in this epoch so far

    def join(self, epoch: str, world_size: int) -> None:
        """Wait until all receivers are in the group and listen.

        Raises:
            RuntimeError: receivers do not come in time, or `is_wanted` returns False.
        """
        receivers = range(1, world_size)

        # Receivers announce themselves before they enter the group: forming it would block while one is missing.
        if epoch != self._epoch:
            self.close()
            self._epoch, self._num_transfers = epoch, 0  # `close` wakes receivers from here on
        if self._group is None:
            self._await([_here(epoch, rank) for rank in receivers], _here(epoch, 0))
            self._store.set(_begun(epoch), AS_PATCHES if self._delta else AS_TENSORS)
            self._group = WeightGroup(
                self._kind,
                self._store,
                epoch=epoch,
                rank=0,
                world_size=world_size,
                timeout_s=self._timeout_s,
                is_wanted=self.is_wanted,
            )

        # A broadcast to a rank that does not listen would block too, so each transfer waits for all of them.
        listen = [_listens(epoch, self._num_transfers, rank) for rank in range(world_size)]
        self._await(listen[1:], listen[0])
        for key in listen:  # each transfer has its own, and the store lives as long as the run
            self._store.delete_key(key)
        self._num_transfers += 1

    def _await(self, keys: list[str], sign_of_life: str) -> None:
        began = looked = time.monotonic()
        while not self._store.check(keys):
            self._store.add(sign_of_life, 1)
            time.sleep(_pause_s(began))
            now = time.monotonic()
            if now - began > self._timeout_s:
                raise RuntimeError(f"not all of {len(keys)} engine workers came within {self._timeout_s:.0f} s")
            if now - looked > CHECK_WANTED_S:
                looked = now
                if not self.is_wanted():
                    raise RuntimeError("an engine died, or this transfer was abandoned")

    def send(self, specs: list[TensorSpec], parts: Iterable[torch.Tensor | Patch]) -> dict:
        """Send all tensors, in the order of `specs`.

        Raises:
            RuntimeError: a receiver died, or `is_wanted` returns False.
        """
        assert self._group is not None, "send before join"
        self._group.is_wanted = self.is_wanted

        # Wait for a broadcast only after the next has begun, so that one bucket travels while another is packed.
        stream = iter(parts)
        await_last: Callable[[], None] | None = None

        for bucket in split_into_buckets(specs, self._bucket_bytes):
            for flat in self._flats(bucket, (next(stream) for _ in bucket)):
                await_this = self._group.begin_broadcast(flat)
                if await_last is not None:
                    await_last()
                await_last = await_this

        if await_last is not None:
            await_last()
        for _ in stream:  # a generator of tensors may finish its own bookkeeping after the last one
            raise AssertionError("more tensors than specs")
        return {}

    def _flats(self, specs: list[TensorSpec], parts: Iterator[torch.Tensor | Patch]) -> Iterator[torch.Tensor]:
        """Yield what is broadcast for a bucket."""
        assert self._group is not None
        if self._delta:
            yield from pack_patches(parts, self._group.device)
        else:
            yield pack_bucket(specs, parts, self._group.buffers)

    def close(self) -> None:
        if self._epoch is not None:
            self._store.set(_over(self._epoch), "1")
            self._epoch = None
        if self._group is not None:
            self._group.close()
            self._group = None


class CollectiveReceiver(Receiver):
    """An engine worker's end."""

    def __init__(self, info: InitInfo) -> None:
        self._info = info
        self._store = open_store(info.host, info.port, is_sender=False, timeout_s=info.timeout_s)
        self._group: WeightGroup | None = None
        self._copy: HostCopy | None = None  # the weights of this epoch, if tensors travel as patches

    def join(self, epoch: str, rank: int, world_size: int) -> None:
        """Join the group of an epoch.

        Raises:
            RuntimeError: the sender gives no sign of life, or has given the transfer up.
        """
        self.close()

        # Announce this rank, then wait: the sender forms the group once all ranks of the epoch are there.
        self._store.set(_here(epoch, rank), "1")
        self._await_sender(epoch)

        # NCCL hangs if ranks read different settings, so the sender's are taken.
        found = msgspec.json.decode(self._store.get(SETTINGS), type=dict[str, str | None])
        self._group = WeightGroup(
            self._info.kind,
            self._store,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            timeout_s=self._info.timeout_s,
            is_wanted=lambda: not self._store.check([_over(epoch)]),
            settings={name: found.get(name) for name in AGREED},
        )

        # A new epoch may begin with a new engine, which has no values to patch: the copy starts empty.
        self._epoch, self._rank, self._num_transfers = epoch, rank, 0
        self._copy = HostCopy() if self._store.get(_begun(epoch)) == AS_PATCHES else None

    def _await_sender(self, epoch: str) -> None:
        began = heard = time.monotonic()
        signs, patience_s = 0, min(SILENCE_S, self._info.timeout_s)
        while not self._store.check([_begun(epoch)]):
            # The sender counts up while it waits for others. A trainer that died leaves the count as it is.
            if (now_signs := self._store.add(_here(epoch, 0), 0)) != signs:
                signs, heard = now_signs, time.monotonic()
            if time.monotonic() - heard > patience_s:
                raise RuntimeError(f"the trainer gave no sign of life in transfer {epoch} for {patience_s:.0f} s")
            if self._store.check([_over(epoch)]):
                raise RuntimeError(f"the trainer gave transfer {epoch} up before all engines were there")
            time.sleep(_pause_s(began))

    def tensors(self, specs: list[TensorSpec], payload: dict) -> Iterator[tuple[str, torch.Tensor]]:
        """Announce that this rank listens; receive tensors as they are iterated over."""
        assert self._group is not None, "receive before join"
        self._store.set(_listens(self._epoch, self._num_transfers, self._rank), "1")
        self._num_transfers += 1
        return self._incoming(specs)

    def _incoming(self, specs: list[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            buckets = split_into_buckets(specs, self._info.bucket_bytes)
            yield from self._whole(buckets) if self._copy is None else self._patched(buckets, self._copy)
        except Exception:
            self.close()  # or the sender would wait for this rank until its timeout
            raise

    def _whole(self, buckets: list[list[TensorSpec]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive the next bucket while one is read."""
        assert self._group is not None
        before: Iterator[tuple[str, torch.Tensor]] = iter(())
        for specs in buckets:
            flat = self._group.buffers.take(bucket_size(specs))
            await_this = self._group.begin_broadcast(flat)

            # Read the bucket before while this one travels.
            yield from before
            await_this()
            before = unpack_bucket(specs, flat)
        yield from before

    def _patched(self, buckets: list[list[TensorSpec]], copy: HostCopy) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive one bucket after the other, as the size of a body is in its head."""
        assert self._group is not None
        for specs in buckets:
            head = torch.empty(len(specs), 2, dtype=torch.int64, device=self._group.device)
            self._group.broadcast(head)
            body = self._group.buffers.take(copy.body_size(specs, head))
            self._group.broadcast(body)
            for name, tensor in copy.take(specs, head, body):
                yield name, tensor.to(self._group.device)

    def close(self) -> None:
        self._copy = None
        if self._group is not None:
            self._group.close()
            self._group = None
