"""The journal: one file per batch, on disk before any trainer can see the batch.

A file holds a header line (format, step, length, SHA-256) and a msgpack `BatchRecord`. It is written beside its place,
synced and renamed, so an entry is either whole or not there. The journal is also the archive of all rollouts.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from trireme.base.errors import JournalCorrupt
from trireme.base.log import get_logger
from trireme.base.paths import atomic_write, sync_folder
from trireme.messages import WIRE_VERSION, decode_as, encode
from trireme.orchestrator.records import BatchRecord, State

log = get_logger("journal")


class _Header(msgspec.Struct):
    format: int
    step: int
    length: int
    sha256: str


class Journal:
    """The entries of a run, in order, without gaps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._last: BatchRecord | None = None

    def path(self, step: int) -> Path:
        return self._folder / f"batch_{step:06d}.msgpack"

    def append(self, record: BatchRecord) -> None:
        """Returns when the entry is on disk. Raises OSError where it cannot be (a full disk): nothing was written."""
        payload = encode(record)
        header = _Header(WIRE_VERSION, record.step, len(payload), hashlib.sha256(payload).hexdigest())
        with atomic_write(self.path(record.step)) as file:
            file.write(msgspec.json.encode(header) + b"\n" + payload)
        self._last = record

    def read(self, step: int) -> BatchRecord:
        """Raises JournalCorrupt where the entry is not what was written."""
        if self._last is not None and self._last.step == step:
            return self._last
        path = self.path(step)
        head, _, payload = path.read_bytes().partition(b"\n")
        try:
            header = msgspec.json.decode(head, type=_Header)
        except msgspec.DecodeError as error:
            raise JournalCorrupt(
                f"{path} does not begin with a journal entry's header: {error}. {_ways_out(step)}"
            ) from error
        if header.format != WIRE_VERSION:
            raise JournalCorrupt(
                f"{path} has format {header.format}, this version of Trireme reads {WIRE_VERSION}. "
                "Go on with the version that wrote it, or start a new run."
            )
        if len(payload) != header.length or hashlib.sha256(payload).hexdigest() != header.sha256:
            raise JournalCorrupt(
                f"{path} holds {len(payload)} bytes that do not match its checksum (of {header.length} bytes). "
                f"{_ways_out(step)}"
            )
        if header.step != step:
            raise JournalCorrupt(f"{path} holds batch {header.step}, by its name batch {step}. {_ways_out(step)}")
        return decode_as(BatchRecord, payload)

    def has(self, step: int) -> bool:
        return self.path(step).exists()

    def steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("batch_")) for path in self._folder.glob("batch_*.msgpack"))

    def head_state(self) -> State:
        """The state after the newest entry; a fresh one where there is none."""
        steps = self.steps()
        if steps != list(range(len(steps))):
            missing = next(n for n, step in enumerate(steps) if n != step)
            raise JournalCorrupt(f"{self._folder} misses batch {missing} of {steps[-1]}. Restore {self.path(missing)}.")
        return self.read(steps[-1]).state if steps else State()

    def rewind(self, step: int) -> None:
        """Sets aside the entries from `step` on, so that the run goes another way from there. Nothing is deleted."""
        later = [number for number in self.steps() if number >= step]
        if not later:
            return
        aside = _new_folder(self._folder, f"set_aside_{time.strftime('%Y%m%d_%H%M%S')}")
        for number in reversed(later):  # a crash on the way leaves no gap
            self.path(number).rename(aside / self.path(number).name)
        sync_folder(self._folder)
        self._last = None
        log.info("batches %d to %d set aside in %s", later[0], later[-1], aside)


def _ways_out(step: int) -> str:
    return f"Restore it, or go on from before it with --trainer.ckpt.resume-step {step} or less."


def _new_folder(parent: Path, name: str) -> Path:
    """One that is empty: several times may fall into one second."""
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}_{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("unreachable")
