"""Who this trainer process is among the others, and the device mesh that they form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class World:
    """One rank's view."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Element-wise over all ranks, in float64."""
        names = sorted(values)
        tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return dict(zip(names, tensor.tolist(), strict=True))

    def agree(self, number: int) -> int:
        """What rank 0 says, on all ranks."""
        tensor = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.broadcast(tensor, src=0)
        return int(tensor)

    def barrier(self) -> None:
        dist.barrier()


@contextmanager
def open_world(device: str, *, threads: int | None, timeout_s: float) -> Iterator[World]:
    """Joins the process group that torchrun (or a single process's environment) describes."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if threads:
        torch.set_num_threads(threads)
    if device == "cuda":
        local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(local)
    else:
        local = torch.device("cpu")
    _join(device, rank, size, timeout_s)
    try:
        yield World(rank=rank, size=size, device=local, mesh=init_device_mesh(device, (size,), mesh_dim_names=("dp",)))
    finally:
        dist.destroy_process_group()


def _join(device: str, rank: int, size: int, timeout_s: float) -> None:
    # On GPUs gloo stands beside NCCL: checkpoints and barriers of CPU tensors go through it.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
