"""Whether all machines of the trainer see the same run folder: each writes its part of a checkpoint there."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

from trireme.base.errors import ConfigError
from trireme.trainer.parallel.mesh import World

APPEARS_WITHIN_S = 10.0  # on a slow network file system


def check_shared(folder: Path, world: World) -> None:
    """A collective.

    Raises: ConfigError on all ranks where one of them does not find what rank 0 writes.
    """
    mark = folder / f".seen-by-all-{world.agree(uuid.uuid4().int >> 66):016x}"
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world.barrier()
    blind = torch.tensor([int(not _appears(mark))], device=world.device)
    dist.all_reduce(blind)
    if world.is_main:
        mark.unlink()
    if int(blind):
        raise ConfigError(
            f"{int(blind)} of {world.size} ranks do not see what rank 0 writes to {folder} (looked at {mark} on this "
            "machine) - expected one folder that all machines of `hosts.trainer` share: each writes its part of a "
            "checkpoint. Set `output_dir` to a folder on a file system that is mounted on all of them."
        )


def _appears(mark: Path) -> bool:
    give_up = time.monotonic() + APPEARS_WITHIN_S
    while not mark.exists():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.1)
    return True
