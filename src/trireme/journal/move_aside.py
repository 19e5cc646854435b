"""Moving aside the files of steps that a run has gone back before. Nothing is deleted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from trireme.base.log import get_logger
from trireme.base.paths import step_folder, steps_in, sync_folder

log = get_logger("journal")


def move_aside(folder: Path, entries: Sequence[Path]) -> None:
    """Move entries of `folder`, given from the oldest on, to a new folder inside it.

    The newest is moved first, so that a crash in between leaves no gap.
    """
    if not entries:
        return
    name = f"set_aside_{time.strftime('%Y%m%d_%H%M%S')}"
    names = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    aside = next(folder / each for each in names if not (folder / each).exists())  # one second may see several calls
    aside.mkdir()
    for entry in reversed(entries):
        entry.rename(aside / entry.name)
    sync_folder(folder)
    log.info("%s to %s set aside in %s", entries[0].name, entries[-1].name, aside)


def set_aside_after(folder: Path, version: int) -> None:
    """Move aside all steps after `version`: they are damaged, or the run takes another course from here.

    Args:
        folder: the folder that holds `step_N`.
    """
    move_aside(folder, [step_folder(folder, step) for step in steps_in(folder) if step > version])
