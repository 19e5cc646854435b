"""The ranks of the trainer and their device meshes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trireme.base.errors import PeerDied
from trireme.base.log import get_logger
from trireme.base.network import Connection, watch_connections
from trireme.base.processes import RANK_STORE
from trireme.config.trainer import TrainerModel

log = get_logger("trainer")

REPLICATE, SHARD = "dp_replicate", "dp_shard"
DATA, CONTEXT = "dp", "cp"
ONE_COPY = TrainerModel()  # one copy of the model, and one rank to a row
BROKEN_S = 30.0  # far longer than a rank takes to leave after its last collective
KEEP_ALIVE = -(2**62)  # a number that ranks never agree on


@dataclass(frozen=True)
class World:
    """One rank's view of all ranks.

    Ranks form two meshes. The model mesh holds copies of the model, each sharded over neighbouring ranks. The data mesh
    holds `dp_size` teams of `cp_size` neighbouring ranks. A team shares its rows, and its ranks hold different shards
    of the model.
    """

    rank: int
    size: int
    device: torch.device
    model_mesh: DeviceMesh  # REPLICATE x SHARD
    data_mesh: DeviceMesh  # DATA x CONTEXT

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`: one dimension, or two if the model is also replicated (HSDP)."""
        return self.model_mesh if self.model_mesh[REPLICATE].size() > 1 else self.model_mesh[SHARD]

    @property
    def cp_size(self) -> int:
        """Ranks that share a row."""
        return self.data_mesh[CONTEXT].size()

    @property
    def cp_rank(self) -> int:
        return self.data_mesh[CONTEXT].get_local_rank()

    @property
    def dp_size(self) -> int:
        """Ranks that are given different rows."""
        return self.size // self.cp_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.cp_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Sum values over all ranks with different rows, in float64. Of a team, the first rank counts."""
        # Names are sorted, as ranks may have collected them in different orders.
        names = sorted(values)
        tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor if self.cp_rank == 0 else tensor.zero_())
        return dict(zip(names, tensor.tolist(), strict=True))

    def first(self, work: Callable[[], int | None], what: str) -> int:
        """Do work on rank 0 alone and return its result, 0 or more, on all ranks. A collective.

        Args:
            what: what rank 0 rejects by raising an error.

        Raises:
            PeerDied: it did, on the other ranks.
        """
        # Raised on rank 0, this must still reach the collective, or the other ranks would wait for it.
        number = -1
        try:
            if self.is_main:
                number = work() or 0
        finally:
            agreed = self.agree(number)
        if agreed < 0:
            raise PeerDied(f"Rank 0 rejected {what}. See its error message.")
        return agreed

    def agree(self, number: int) -> int:
        """Return rank 0's number on all ranks, however long `keep_alive` lets them wait for it. A collective."""
        while (found := self.broadcast(number)) == KEEP_ALIVE:
            pass
        return found

    def broadcast(self, number: int) -> int:
        """Return rank 0's number on all ranks. A collective."""
        # On the CPU, as ranks wait here for a batch: NCCL would keep a core and a part of the GPU busy meanwhile.
        tensor = torch.tensor([number], dtype=torch.int64)
        dist.broadcast(tensor, src=0)
        return int(tensor)

    def barrier(self) -> None:
        dist.barrier()


def keep_alive(world: World, *, timeout_s: float) -> Callable[[], None]:
    """Return a function that restarts the timeout of the other ranks, whose next collective is `agree`.

    Rank 0 calls it again and again while it waits. The timeout is that which `open_world` was given.
    """
    sent_at = time.monotonic()

    def restart_timeout() -> None:
        nonlocal sent_at
        if world.is_main and world.size > 1 and time.monotonic() - sent_at > timeout_s / 4:
            sent_at = time.monotonic()
            world.broadcast(KEEP_ALIVE)

    return restart_timeout


@contextmanager
def open_world(
    device: str, model: TrainerModel = ONE_COPY, *, threads: int | None, timeout_s: float
) -> Iterator[World]:
    """Join the process group that `launch.ranks`, torchrun or a single process's environment describes."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if threads:
        torch.set_num_threads(threads)
    if device == "cuda":
        local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(local)
    else:
        local = torch.device("cpu")
        # Several threads add up the gradients of tokens that share an expert in any order, unless this is set. It
        # made no step slower. Operations without such a form only warn.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False

    others = set(watch_connections())  # such as those to a model hub, which may be closed at any time
    _join(device, rank, size, timeout_s)
    try:
        world = build_world(rank, size, local, replicas=model.dp_replicate, cp=model.cp)
        with _end_when_cut(set(watch_connections()) - others):
            yield world
    finally:
        dist.destroy_process_group()


@contextmanager
def _end_when_cut(connections: Collection[Connection]) -> Iterator[None]:
    """End this process `BROKEN_S` after a connection to another rank broke, unless it has left by then.

    Most collectives raise an error at once. But gloo wakes neither a thread that waits for the rest of a message nor
    one that still sends it (`Pair::signalException` in torch 2.13): it would wait until the timeout of the group.
    """
    has_left = threading.Event()

    def watch() -> None:
        while not has_left.wait(1.0):
            broken = ", ".join(connection.peer for connection in connections if not connection.is_open())

            # Ranks that are done close their connections too, and this rank may be about to leave as well.
            if broken and not has_left.wait(BROKEN_S):
                log.error(
                    "the connection to %s broke %.0f s ago: the rank there ended, or its machine is cut off. This rank "
                    "ends too, as it may be waiting for the rest of a message.",
                    broken,
                    BROKEN_S,
                )
                os._exit(1)

    if connections:
        threading.Thread(target=watch, name="connections", daemon=True).start()
    try:
        yield
    finally:
        has_left.set()


def build_world(rank: int, size: int, device: torch.device, *, replicas: int, cp: int) -> World:
    """Build the meshes of the ranks of a process group. A collective.

    Args:
        replicas: copies of the model, a divisor of the number of ranks.
        cp: ranks that share a row, also a divisor.
    """
    assert size % replicas == 0, f"{size} ranks in {replicas} copies of a model"
    assert size % cp == 0, f"{size} ranks in teams of {cp}"

    # Neighbouring ranks, which mostly share a machine, hold one copy of the model, and form one team.
    model_mesh = init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=(REPLICATE, SHARD))
    data_mesh = init_device_mesh(device.type, (size // cp, cp), mesh_dim_names=(DATA, CONTEXT))
    return World(rank, size, device, model_mesh, data_mesh)


def _join(device: str, rank: int, size: int, timeout_s: float) -> None:
    # On GPUs, gloo serves CPU tensors: those of checkpoints and barriers.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)

    # A single rank needs no address, and leaves no port open.
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store = None  # torchrun's, which the environment names
    if (file := os.environ.get(RANK_STORE)) is not None:
        store = dist.FileStore(file, size)
        store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
