"""`metrics.jsonl`: one line per process and step. Writer and reader.

    {"step": 12, "process": "trainer", "time_s": 1700000000.5, "loss": 0.0123, "grad_norm": 0.81}

Errors never end a run: a line that cannot be written (a full disk) is retried, a line that cannot be read is skipped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trireme.base.disk import POLL_S
from trireme.base.waiting import DISK, Waits
from trireme.monitor.lines import LinesFile, read_lines

PIECE_BYTES = 1 << 22
"""Bytes of a file that are read at once."""

Row = dict[str, Any]
"""One line: `step`, `process` and `time_s` (unix), then metrics; None where the number was not finite."""

MARKS = {"trainer": "loss", "orchestrator": "reward/mean", "sft": "loss"}
"""A metric of each process that only rows of steps have."""


class MetricsFile(LinesFile):
    """The lines of one process. A step's line is on disk before its checkpoint: `trireme audit` relies on that."""

    def __init__(self, path: Path, process: str) -> None:
        super().__init__(path, sync=True)
        self.process = process

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        head: Row = {"step": step, "process": self.process, "time_s": round(time.time(), 3)}
        # Scalars of numpy and torch become Python's; JSON has neither NaN nor infinity.
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}

        # `head` is given twice: to come first, and to win over metrics of the same names.
        self.put(json.dumps(head | finite | head, allow_nan=False).encode())
        self.flush()

    def flush_all(self, waits: Waits, deadline_s: float) -> None:
        """Write lines that wait for room on a full disk, before a checkpoint records that their steps are done.

        Raises:
            DeadlineExceeded: the disk was full for `deadline_s` seconds.
        """
        with waits.waiting("room for metrics", peer=DISK, deadline_s=deadline_s) as wait:
            while self.waiting:
                self.flush()
                wait.check()
                time.sleep(POLL_S if self.waiting else 0)


def read_metrics(path: Path, offset: int = 0, most_bytes: int = -1) -> tuple[list[Row], int]:
    """Read complete rows from byte `offset` on. Return them and the offset to continue from."""
    lines, offset = read_lines(path, offset, most_bytes)
    return [row for line in lines if (row := parse_row(line)) is not None], offset


def read_in_pieces(path: Path, offset: int = 0) -> Iterator[tuple[list[Row], int]]:
    """Yield what `read_metrics` returns, a few megabytes at a time: the file of a long run does not fit in memory."""
    while True:
        rows, after = read_metrics(path, offset, PIECE_BYTES)
        if after == offset:
            return
        offset = after
        yield rows, offset


def parse_row(line: bytes) -> Row | None:
    """Return the row of a line; None if the line is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None

    # The file may hold lines of other versions, or a JSON value that is no row.
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("process"), str)
    return row if is_row else None


def is_of_step(row: Row) -> bool:
    """Return whether a row is of a step that its process has done. Rows of evaluations come late."""
    return MARKS.get(row["process"]) in row


def latest_by_step(rows: Iterable[Row]) -> dict[tuple[str, int], Row]:
    """Return rows by (process, step). If a resumed run trained a step again, its later values win.

    Values are merged by name, because a batch and an evaluation may report under one step.
    """
    latest: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = (row["process"], row["step"])
        latest[key] = latest.get(key, {}) | row
    return latest


def merge_processes(rows: Iterable[Row]) -> Row:
    """Merge the rows of one step, one of each process. A name that two processes use is the trainer's."""
    merged: Row = {}
    for row in sorted(rows, key=lambda row: row["process"] == "trainer"):
        merged |= row
    return merged


def means(measured: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over those mappings that have it."""
    values: dict[str, list[float]] = {}
    for numbers in measured:
        for name, value in numbers.items():
            values.setdefault(name, []).append(value)
    import numpy as np  # adds pairwise, as the audit does; commands that only read metrics start without it

    return {name: float(np.mean(numbers)) for name, numbers in values.items()}
