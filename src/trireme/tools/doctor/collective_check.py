"""Add and send tensors between two processes, as a run does: `python -m trireme.tools.doctor.collective_check gloo`.

The other kind is `nccl`. The doctor sets rank and addresses in the environment, as torchrun would. Ranks add through
the trainer's own world; weights go from rank 0 to rank 1 through the group in which an engine receives them. Rank 0
prints the figures as a line of JSON; a process that sees wrong numbers ends with an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from trireme.trainer.parallel.mesh import World, open_world
from trireme.transport.weights.collective import WeightGroup, open_store

MIB = 1 << 20
TIMES = 5
SENT_BYTES = 32 * MIB
TIMEOUT_S = 60.0


def measure(kind: str) -> dict[str, float]:
    with open_world("cuda" if kind == "nccl" else "cpu", threads=1, timeout_s=TIMEOUT_S) as world:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["TRIREME_DOCTOR_STORE"])
        store = open_store(host, port, is_sender=world.is_main, timeout_s=TIMEOUT_S)
        group = WeightGroup(kind, store, epoch="doctor", rank=world.rank, world_size=world.size, timeout_s=TIMEOUT_S)
        numbers = torch.arange(MIB, dtype=torch.float32, device=world.device) % 1024  # exact, however they are added
        expected = (torch.arange(SENT_BYTES, device=world.device) % 251).to(torch.uint8)
        added, sent = [], []
        for _ in range(TIMES):  # the first time, connections are made
            total = numbers * (world.rank + 1)
            added.append(_timed(world, dist.all_reduce, total))
            assert bool((total == numbers * 3).all()), "two processes added to something else than their sum"
            flat = expected.clone() if world.is_main else torch.zeros_like(expected)
            sent.append(_timed(world, group.broadcast, flat))
            assert torch.equal(flat, expected), "other bytes came than were sent"
        group.close()
        world.barrier()
    return {"all_reduce_s": min(added), "broadcast_bytes": SENT_BYTES, "broadcast_bytes_per_s": SENT_BYTES / min(sent)}


def _timed(world: World, send: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Return the seconds until both processes have finished it."""
    world.barrier()
    began = time.perf_counter()
    send(tensor)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    figures = measure(sys.argv[1])
    if os.environ["RANK"] == "0":
        print(json.dumps(figures))
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still be letting go of tensors: see `cli.command.run_command`
