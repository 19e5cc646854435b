"""A file of lines that several processes append to, and that never ends a run.

A line that cannot be written (a full disk) is kept in memory and retried; a line that cannot be read is skipped.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from pathlib import Path

from trireme.base.disk import pretend_full
from trireme.base.log import get_logger

WARN_EVERY_S = 60.0
MOST_WAITING = 100_000  # unwritten lines, some 100 MB, beyond which the oldest are lost
CLOSE_S = 5.0
RETRY_S = 0.2

logger = get_logger("lines")


class LinesFile:
    """Append lines. Several processes may append to one file: each flush is a single O_APPEND write."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        """Open the file for appending.

        Args:
            sync: make each flush survive a power failure (fsync).
        """
        self.path = path
        self.lost = 0  # lines that will never be written
        self._waiting: deque[bytes] = deque()
        self._sync = sync
        self._warned_at: float | None = None

    @property
    def waiting(self) -> int:
        """Return the lines that are not written yet."""
        return len(self._waiting)

    def put(self, line: bytes) -> None:
        """Add a line for the next `flush`."""
        self._waiting.append(line)

    def flush(self) -> None:
        """Write waiting lines in order, as far as possible now."""
        try:
            append_lines(self.path, self._waiting, sync=self._sync)
        except OSError as error:
            # Bound the memory of a long outage: the newest lines matter most.
            while len(self._waiting) > MOST_WAITING:
                self._waiting.popleft()
                self.lost += 1

            now = time.monotonic()
            if self._warned_at is None or now - self._warned_at >= WARN_EVERY_S:
                self._warned_at = now
                logger.warning(
                    f"Could not append to {self.path}: {error.strerror or error} ({len(self._waiting)} lines wait, "
                    f"{self.lost} lost so far). Training continues; they are written as soon as possible. Free "
                    "space on that disk or make the file writable."
                )
        else:
            if self._warned_at is not None:
                self._warned_at = None
                logger.warning(f"{self.path} can be written again: no line waits any more ({self.lost} lost).")

    def close(self) -> None:
        """Write waiting lines within `CLOSE_S`; what cannot be written is lost."""
        give_up = time.monotonic() + CLOSE_S
        self.flush()
        while self._waiting and time.monotonic() < give_up:
            time.sleep(RETRY_S)
            self.flush()
        if self._waiting:
            self.lost += len(self._waiting)
            self._waiting.clear()
            logger.error(f"{self.path} could not be written to the end: {self.lost} lines are lost.")


def append_lines(path: Path, lines: deque[bytes], *, sync: bool) -> None:
    """Write lines and remove them from `lines`. A line that was cut short stays, to be written again.

    Raises: OSError if not all could be written.
    """
    pretend_full()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if lines:
            # A crash or a full disk may have cut the last line short. A truncated JSON object is no JSON, so that
            # readers skip it once a newline ends it.
            size = os.fstat(descriptor).st_size
            repair = b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""
            data = repair + b"".join(line + b"\n" for line in lines)
            written = os.write(descriptor, data)

            # Count off the lines that were written whole. One that was cut is written again, after a newline.
            left = written - len(repair)
            while lines and left > len(lines[0]):
                left -= len(lines.popleft()) + 1
            if written < len(data):
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written")
            if sync:
                os.fsync(descriptor)
    finally:
        os.close(descriptor)


def last_bytes(path: Path, count: int) -> int:
    """Return the offset of the last `count` bytes of a file. Readers skip the line that it cuts."""
    try:
        return max(0, os.stat(path).st_size - count)
    except OSError:  # not there yet
        return 0


def read_lines(path: Path, offset: int = 0, most_bytes: int = -1) -> tuple[list[bytes], int]:
    """Read complete lines from byte `offset` on. Return them and the offset to continue from.

    A file that is shorter than `offset` is another one, and is read from its start.

    Args:
        most_bytes: bytes to read at once, or one line if that is longer; -1 reads to the end of the file.
    """
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < offset:
                offset = 0  # another file has taken its place
            file.seek(offset)
            data = file.read(most_bytes)

            # A line longer than `most_bytes` would otherwise never be read, and the reader never get past it.
            if b"\n" not in data:
                data += file.readline()

            # The last line may still be in the middle of being written: leave it for the next call.
            whole, newline, _ = data.rpartition(b"\n")
    except OSError:  # not there yet, or not readable now
        return [], offset
    return whole.splitlines(), offset + len(whole) + len(newline)
