"""Writing to a disk that may be full: a full disk pauses a run instead of ending it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from trireme.base.faults import fault
from trireme.base.log import get_logger
from trireme.base.waiting import DISK, Wait, Waits

log = get_logger("disk")

T = TypeVar("T")

POLL_S = 2.0
SAY_AGAIN_S = 60.0  # seconds between two warnings about the same wait
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_MESSAGES = tuple(os.strerror(code) for code in FULL)  # libraries in Rust have no errno (safetensors, tokenizers)


def is_full(error: BaseException | None) -> bool:
    """Return whether an error was caused by a full disk or an exceeded quota."""
    # Causes and contexts can form a cycle.
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "errno", None) in FULL or any(words in str(error) for words in FULL_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def when_there_is_room(
    write: Callable[[], T], *, what: str, folder: Path, waits: Waits, deadline_s: float, poll_s: float = POLL_S
) -> T:
    """Call `write` and return its result; while the disk is full, log it and retry until there is room.

    Args:
        write: must leave nothing behind when it fails, and may be called many times.
        what: what is written ("batch 41"), for messages.

    Raises: DeadlineExceeded if the disk was full for `deadline_s` seconds.
    """
    wait: Wait | None = None
    said_at = -SAY_AGAIN_S

    with ExitStack() as waiting:
        while True:
            try:
                pretend_full()
                result = write()
            except Exception as error:
                if not is_full(error):
                    raise
                reason = getattr(error, "strerror", None) or str(error)
            else:
                if wait is not None:
                    log.warning("there is room again: wrote %s after %.0f s", what, wait.waited_s)
                return result

            # The wait begins with the first failure: a write that succeeds at once is no wait, and `/status` shows
            # none.
            if wait is None:
                wait = waiting.enter_context(waits.waiting(f"room for {what}", peer=DISK, deadline_s=deadline_s))
            wait.note = f"{reason}, {_free(folder) >> 20} MiB free in {folder}"

            # Retries come every 2 s, and a disk may stay full for hours: one line a minute is enough.
            if wait.waited_s - said_at >= SAY_AGAIN_S:
                said_at = wait.waited_s
                log.warning(
                    "The disk is full: %s cannot be written (%s). Nothing is lost: the run continues when there is "
                    "room. Free some space there.",
                    what,
                    wait.note,
                )

            wait.check()
            time.sleep(poll_s)


def pretend_full() -> None:
    """Raise ENOSPC while the fault `disk_full=FILE` is set and FILE exists. For tests."""
    full = fault("disk_full")
    if full is not None and Path(full).exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def require_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError if so many bytes do not fit, before a large write leaves no room for anything else."""
    if _free(folder) < num_bytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {num_bytes >> 20} MiB", str(folder))


def _free(folder: Path) -> int:
    # The folder may still have to be made: its nearest parent that exists is on the same disk.
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize
