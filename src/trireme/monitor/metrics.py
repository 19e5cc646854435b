"""`metrics.jsonl`: one line per process and step. Who writes it and who reads it, side by side.

    {"step": 12, "process": "trainer", "time_s": 1700000000.5, "loss": 0.0123, "grad_norm": 0.81}

Nothing here ends a run: a line that cannot be written (a full disk) waits in memory until it can be, one that cannot be
read is skipped.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trireme.base.disk import pretend_full
from trireme.base.log import get_logger

Row = dict[str, Any]
"""One line: `step`, `process` and `time_s` (unix), then metrics; None where the number was not finite."""

WARN_EVERY_S = 60.0
MOST_WAITING = 100_000  # lines, some 100 MB
CLOSE_S = 5.0
RETRY_S = 0.2

logger = get_logger("metrics")


class MetricsFile:
    """Appends lines. Several processes may append to one file: each line is a single O_APPEND write."""

    def __init__(
        self,
        path: Path,
        process: str,
        *,
        most_waiting: int = MOST_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            most_waiting: lines that could not be written and are kept; of more, the oldest are lost.
        """
        self.path = path
        self.process = process
        self.lost = 0  # lines that will never be written
        self._most_waiting = most_waiting
        self._waiting: deque[bytes] = deque()
        self._clock = clock
        self._warned_at: float | None = None

    @property
    def waiting(self) -> int:
        """Lines that could not be written yet."""
        return len(self._waiting)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        head: Row = {"step": step, "process": self.process, "time_s": round(time.time(), 3)}
        numbers = {name: _number(value) for name, value in metrics.items()}
        self._waiting.append(json.dumps(head | numbers | head, allow_nan=False).encode())
        self.flush()

    def flush(self) -> None:
        """Writes what waits, in order, as far as that can be done now."""
        try:
            _append_lines(self.path, self._waiting)
        except OSError as error:
            self._drop_oldest()
            self._warn(error)
        else:
            if self._warned_at is not None:
                self._warned_at = None
                logger.warning(f"{self.path} can be written again: no line waits any more ({self.lost} lost).")

    def close(self, patience_s: float = CLOSE_S) -> None:
        """Writes what waits, if that can be done in so many seconds; what cannot is lost with the process."""
        give_up = time.monotonic() + patience_s
        self.flush()
        while self._waiting and time.monotonic() < give_up:
            time.sleep(RETRY_S)
            self.flush()
        if self._waiting:
            self.lost += len(self._waiting)
            self._waiting.clear()
            logger.error(f"{self.path} could not be written to the end: {self.lost} lines are lost.")

    def _drop_oldest(self) -> None:
        while len(self._waiting) > self._most_waiting:
            self._waiting.popleft()
            self.lost += 1

    def _warn(self, error: OSError) -> None:
        now = self._clock()
        if self._warned_at is None or now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            logger.warning(
                f"Could not append to {self.path}: {error.strerror or error} ({len(self._waiting)} lines wait, "
                f"{self.lost} lost so far). Training goes on; they are written as soon as it can be done. Free space "
                "on that disk or make the file writable."
            )


def _number(value: float) -> float | int | None:
    """What JSON can hold: numpy and torch scalars become Python's, NaN and infinities None."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _append_lines(path: Path, lines: deque[bytes]) -> None:
    """Takes from `lines` what is written. A line that is cut short stays there, to be written whole once more."""
    pretend_full()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while lines:
            data = _repair(descriptor) + lines[0] + b"\n"
            written = os.write(descriptor, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
            lines.popleft()
    finally:
        os.close(descriptor)


def _repair(descriptor: int) -> bytes:
    """A newline where the file ends in a line that a crash or a full disk cut short; it must not swallow ours.

    What is cut off a JSON object is no JSON, so the half is skipped by whoever reads.
    """
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def read_metrics(path: Path, offset: int = 0) -> tuple[list[Row], int]:
    """Complete lines from byte `offset` on, and where to read on later. A half-written last line waits for its rest."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < offset:
                offset = 0  # another file has taken its place
            file.seek(offset)
            whole, newline, _ = file.read().rpartition(b"\n")
    except OSError:  # not there yet, or not readable now
        return [], offset
    rows = [row for line in whole.splitlines() if (row := _parse(line)) is not None]
    return rows, offset + len(whole) + len(newline)


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) and "process" in row else None


def latest_by_step(rows: Iterable[Row]) -> dict[tuple[str, int], Row]:
    """Rows by (process, step). Where a resumed run trained a step again, its later values win.

    Name by name, because a batch and an evaluation may both report under one step.
    """
    latest: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = (row["process"], row["step"])
        latest[key] = latest.get(key, {}) | row
    return latest


def merge_processes(rows: Iterable[Row]) -> Row:
    """One row from the rows of one step. A name that both processes use is the trainer's, the other's gets a prefix.

    Example:
        [{"process": "trainer", "time/step": 2.0}, {"process": "orchestrator", "time/step": 1.0, "reward/mean": 0.5}]
        -> {"time/step": 2.0, "orchestrator/time/step": 1.0, "reward/mean": 0.5}
    """
    by_process = {row["process"]: row for row in rows}
    merged: Row = dict(by_process.get("trainer", {}))
    for process, row in by_process.items():
        if process != "trainer":
            merged |= {_distinct(name, process, merged): value for name, value in row.items()}
    return merged | {"process": "+".join(sorted(by_process))}


def _distinct(name: str, process: str, taken: Row) -> str:
    return f"{process}/{name}" if name in taken and name not in ("step", "process", "time_s") else name
