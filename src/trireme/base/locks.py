"""File locks between processes. The kernel releases a lock when its holder ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

from trireme.base.errors import ConfigError

NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of `flock` on a file system that cannot lock files, such as Lustre without `-o flock`."""


def try_lock(descriptor: int, folder: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Return whether the lock could be taken at once.

    Raises: ConfigError where the file system of `folder` cannot lock files.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise ConfigError(
            f"{folder} lies on a file system that cannot lock files ({error.strerror}) - expected one on which `flock` "
            "works, so that two processes never write to the same files. Choose another folder, or mount it with locks "
            "(Lustre: `-o flock`)."
        ) from error
