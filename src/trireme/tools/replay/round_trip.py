"""One of two processes that add and send tensors, as a run does: `python -m trireme.tools.replay.round_trip gloo|nccl`.

For `trireme doctor`, which sets who is who in the environment, as torchrun would. Ranks add through the trainer's own
world; weights go from rank 0 to rank 1 through the group in which an engine receives them. Rank 0 prints the figures
as a line of JSON; whoever sees other numbers than must come out ends with a code.
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
SUMMED = MIB  # float32: 4 MiB
SENT = 32 * MIB
TIMEOUT_S = 60.0


def round_trip(kind: str) -> dict[str, float]:
    with open_world("cuda" if kind == "nccl" else "cpu", threads=1, timeout_s=TIMEOUT_S) as world:
        took_s = _all_reduce(world)
        sent_s = _broadcast(kind, world)
        world.barrier()
    return {"all_reduce_s": took_s, "broadcast_bytes": SENT, "broadcast_bytes_per_s": SENT / sent_s}


def _all_reduce(world: World) -> float:
    """Whole numbers: exact, in whatever order they are added."""
    numbers = torch.arange(SUMMED, dtype=torch.float32, device=world.device) % 1024

    def once() -> float:
        total = numbers * (world.rank + 1)
        seconds = _timed(world, lambda: dist.all_reduce(total))
        assert bool((total == numbers * 3).all()), "two processes added to something else than their sum"
        return seconds

    return min(once() for _ in range(TIMES))


def _broadcast(kind: str, world: World) -> float:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["TRIREME_DOCTOR_STORE"])
    store = open_store(host, port, is_sender=world.is_main, timeout_s=TIMEOUT_S)
    group = WeightGroup(kind, store, epoch="doctor", rank=world.rank, world_size=world.size, timeout_s=TIMEOUT_S)
    expected = (torch.arange(SENT, device=world.device) % 251).to(torch.uint8)

    def once() -> float:
        flat = expected.clone() if world.is_main else torch.zeros_like(expected)
        seconds = _timed(world, lambda: group.broadcast(flat))
        assert torch.equal(flat, expected), "other bytes came than were sent"
        return seconds

    try:
        return min(once() for _ in range(TIMES))
    finally:
        group.close()


def _timed(world: World, act: Callable[[], object]) -> float:
    """Seconds until both are through with it. The first times connections are made: take the least of several."""
    world.barrier()
    began = time.perf_counter()
    act()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    figures = round_trip(sys.argv[1])
    if os.environ["RANK"] == "0":
        print(json.dumps(figures), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still be letting go of tensors: see `cli.door.run_door`
