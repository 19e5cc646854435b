"""A file of results, one rollout per line: read as far as it goes, looked into where asked, however large it is.

Its list is kept in memory, its conversations are not: each is read again when it is looked at. A line that is no
rollout is passed by and counted, a last line that is not yet whole waits.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import IO, Any

from trireme.tools.conversation import searchable
from trireme.tools.rollouts import Record, Row, record_of

CHUNK = 8 << 20  # bytes read at once
MOST_DAMAGED = 100  # line numbers kept


class ResultsFile:
    """Reads on where it stopped. A file that was written anew is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.rows: list[Row] = []
        self.damaged: list[int] = []  # numbers of lines, from 1
        self.trouble = ""  # why the file cannot be read
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0
        self._lines = 0
        self._seen: Counter[str] = Counter()

    def read_on(self) -> bool:
        """Takes in the next part. Returns whether there is more."""
        try:
            with open(self.path, "rb") as file:
                return self._read_on(file)
        except OSError as error:
            self.trouble = f"{self.path} cannot be read: {error.strerror or error}"
            return False

    def _read_on(self, file: IO[bytes]) -> bool:
        found = os.fstat(file.fileno())
        if self._file not in (None, (found.st_dev, found.st_ino)) or found.st_size < self._offset:
            self._begin()
        self._file, self.trouble = (found.st_dev, found.st_ino), ""
        file.seek(self._offset)
        whole = _whole_lines(file, found.st_size)
        for line in whole.splitlines(keepends=True):
            self._take(line)
        return bool(whole) and self._offset < found.st_size

    def _take(self, line: bytes) -> None:
        self._lines += 1
        value = _parse(line)
        if value is not None:
            row = record_of(value, number=len(self.rows), seen=self._seen).row
            row.offset, row.length = self._offset, len(line)
            self._seen[row.example] += 1
            self.rows.append(row)
        elif line.strip() and len(self.damaged) < MOST_DAMAGED:
            self.damaged.append(self._lines)
        self._offset += len(line)

    def record(self, row: Row) -> Record:
        """All of it, from disk. Where it is not there any more: the row alone."""
        try:
            with open(self.path, "rb") as file:
                file.seek(row.offset)
                value = _parse(file.read(row.length))
        except OSError:
            value = None
        if value is None:
            return Record(row=row, more={"gone": f"line at byte {row.offset} of {self.path} is not there any more"})
        record = record_of(value, number=row.number)
        record.row = row
        return record

    def text(self, row: Row) -> str:
        record = self.record(row)
        return searchable(record.prompt + record.completion) + f"\n{record.answer}\n{row.error}"


def _whole_lines(file: IO[bytes], size: int) -> bytes:
    """At least one where there is one, however long. The beginning of a JSON object is none, so a last line without an
    end is whole where it is one."""
    data = file.read(CHUNK)
    while data and b"\n" not in data and file.tell() < size:
        data += file.read(CHUNK)
    end = data.rfind(b"\n") + 1
    return data if file.tell() >= size and _parse(data[end:]) is not None else data[:end]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
