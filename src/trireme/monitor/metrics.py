"""`metrics.jsonl`: one line per process and step. Who writes it and who reads it, side by side.

    {"step": 12, "process": "trainer", "time_s": 1700000000.5, "loss": 0.0123, "grad_norm": 0.81}

Nothing here ends a run: a line that cannot be written is counted, one that cannot be read is skipped.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trireme.base.log import get_logger

Row = dict[str, Any]
"""One line: `step`, `process` and `time_s` (unix), then metrics; None where the number was not finite."""

WARN_EVERY_S = 60.0

logger = get_logger("metrics")


class MetricsFile:
    """Appends lines. Several processes may append to one file: each line is a single O_APPEND write."""

    def __init__(self, path: Path, process: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.process = process
        self.lost = 0  # lines that could not be written
        self._clock = clock
        self._warned_at: float | None = None

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        head: Row = {"step": step, "process": self.process, "time_s": round(time.time(), 3)}
        numbers = {name: _number(value) for name, value in metrics.items()}
        line = json.dumps(head | numbers | head, allow_nan=False)
        try:
            _append_line(self.path, line)
        except OSError as error:
            self._count_loss(error)

    def _count_loss(self, error: OSError) -> None:
        self.lost += 1
        now = self._clock()
        if self._warned_at is None or now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            logger.warning(
                f"Could not append to {self.path}: {error.strerror or error} ({self.lost} lines lost so far). Training "
                "goes on without them. Free space on that disk or make the file writable."
            )


def _number(value: float) -> float | int | None:
    """What JSON can hold: numpy and torch scalars become Python's, NaN and infinities None."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _append_line(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        data = _repair(descriptor) + line.encode() + b"\n"
        written = os.write(descriptor, data)
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")
    finally:
        os.close(descriptor)


def _repair(descriptor: int) -> bytes:
    """A newline where the file ends in a line that a crash or a full disk cut short; it must not swallow ours."""
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
