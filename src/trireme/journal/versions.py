"""Confirmed policy versions: what every engine confirmed, on disk before a token of the version may be used.

One file per version next to the batches. A version may be confirmed several times (an engine restarted, a trainer
replayed to it); every confirmation is kept.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from trireme.base.paths import move_aside
from trireme.journal.entry import read_entry, write_entry


class Confirmation(msgspec.Struct, frozen=True):
    """One confirmation that engines serve what the trainer sent.

    Example:
        Confirmation(engines=["http://127.0.0.1:8000"], digests={"model.norm.weight": "9f…"}, difference=2.1e-7, time=…)
    """

    engines: list[str]
    digests: dict[str, str]  # digest of each tensor, in the precision in which it is served
    difference: float  # the largest between the trainer's and an engine's logprobs on the probe
    time: float  # unix


class Version(msgspec.Struct):
    """Everything known about one version."""

    version: int
    confirmations: list[Confirmation] = []

    @property
    def digests(self) -> dict[str, str]:
        """Return the digests of the newest confirmation, which engines serve if the version is live."""
        return self.confirmations[-1].digests


class Versions:
    """The confirmed versions of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._newest: int | None = None

    def path(self, version: int) -> Path:
        return self.folder / f"version_{version:06d}.msgpack"

    def record(self, version: int, engines: list[str], digests: dict[str, str], difference: float) -> None:
        """Write a confirmation and return when it is on disk."""
        # A version is confirmed again after a restart of an engine or a replay: keep the earlier confirmations.
        entry = self.read(version) if self.has(version) else Version(version)
        entry.confirmations.append(Confirmation(engines, digests, difference, round(time.time(), 3)))
        write_entry(self.path(version), version, entry)
        self._newest = max(self.newest, version)

    def has(self, version: int) -> bool:
        return self.path(version).exists()

    def read(self, version: int) -> Version:
        """Read a version. Raises JournalCorrupt if it is not what was written."""
        return read_entry(self.path(version), version, Version, ways_out="Restore it from a copy.")

    def known(self) -> list[int]:
        """Return all confirmed versions, in order."""
        names = [path.stem.removeprefix("version_") for path in self.folder.glob("version_*.msgpack")]
        return sorted(int(name) for name in names if name.isdecimal())  # a user may have put a copy there

    @property
    def newest(self) -> int:
        """Return the newest confirmed version, or -1. It is cached: one process writes."""
        if self._newest is None:
            self._newest = max(self.known(), default=-1)
        return self._newest

    def rewind(self, step: int) -> None:
        """Move aside the versions after `step`."""
        move_aside(self.folder, [self.path(version) for version in self.known() if version > step])
        self._newest = None
