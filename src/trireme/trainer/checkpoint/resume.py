"""The checkpoint that a run resumes from, and the folder that all machines of the trainer must share."""

from __future__ import annotations

import shutil
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.base.paths import is_left_over, step_folder, steps_in
from trireme.config.trainer import Checkpoints
from trireme.journal.manifest import complete_steps, find_damage, is_complete
from trireme.trainer.parallel.mesh import World

log = get_logger("checkpoint")


def version_to_resume(folder: Path, config: Checkpoints, *, resume: bool, first: int = 0) -> int:
    """Return the version to start from. The chosen checkpoint is read and its digests are checked.

    Args:
        first: the version of a fresh run, 0 unless it began from another run.

    Raises:
        ConfigError: the checkpoint of `resume_step` is missing, incomplete or damaged.
    """
    step = config.resume_step
    if step in (0, first) or (step is None and not resume):
        return first

    # The newest checkpoint may be damaged: then the one before it is taken. One that the user names must be whole.
    if step in (None, -1):
        for newest in reversed(steps_in(folder)):
            if (damage := find_damage(step_folder(folder, newest))) is None:
                return newest
            log.error("The checkpoint of step %d cannot be used: %s. Trying the one before it.", newest, damage)
        return first

    if damage := find_damage(step_folder(folder, step)):
        raise ConfigError(
            f"The checkpoint of step {step} cannot be used: {damage} (complete: {complete_steps(folder) or 'none'}). "
            "Set `--trainer.ckpt.resume-step` to one of these, or -1 for the newest."
        )
    return step


def tidy(folder: Path) -> None:
    """Remove what a killed process left half written or half removed. Complete folders get their final name."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not is_left_over(path):
            continue
        final = path.with_name(path.stem.removeprefix("."))
        if path.suffix == ".partial" and is_complete(path) and not final.exists():
            path.rename(final)
            log.info("checkpoint %s: complete; the process that wrote it died before it renamed it", final)
        else:
            shutil.rmtree(path)


APPEARS_WITHIN_S = 10.0  # on a slow network file system


def check_shared(folder: Path, world: World) -> None:
    """Check that all machines of the trainer see the same run folder. A collective.

    Raises:
        ConfigError: some rank does not see what rank 0 writes. All ranks raise it.
    """
    # The number is agreed on, so that a mark that an earlier start left behind deceives no rank.
    mark = folder / f".seen-by-all-{world.agree(uuid.uuid4().int >> 66):016x}"
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world.barrier()

    # A network file system may show a new file late.
    give_up = time.monotonic() + APPEARS_WITHIN_S
    while not mark.exists() and time.monotonic() < give_up:
        time.sleep(0.1)

    # All ranks learn of it, so that none of them waits in the next collective.
    blind = torch.tensor([int(not mark.exists())], device=world.device)
    dist.all_reduce(blind)
    if world.is_main:
        mark.unlink()
    if int(blind):
        raise ConfigError(
            f"{int(blind)} of {world.size} ranks do not see what rank 0 writes to {folder} (looked at {mark} on this "
            "machine) - expected one folder that all machines of `hosts.trainer` share: each writes its part of a "
            "checkpoint. Set `output_dir` to a folder on a file system that is mounted on all of them."
        )
