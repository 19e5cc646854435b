"""The origin of a run that begins from another run's checkpoint: `origin/` in its folder, complete or not there at all.

`origin/step_N` is that checkpoint (hard links to its files, or copies). `origin/origin.msgpack` says what is taken of
it, and holds the state that the journal begins with. Resuming, replay and audit read these alone: the other run may go
on, or be deleted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import msgspec

from trireme.base.errors import JournalCorrupt
from trireme.base.paths import step_folder, sync_folder
from trireme.journal.entry import read_entry, write_entry
from trireme.journal.manifest import MANIFEST, find_damage, read_manifest
from trireme.journal.records import State

FOLDER, FILE = "origin", "origin.msgpack"


class Origin(msgspec.Struct, frozen=True):
    """The checkpoint that a run begins from, and what it takes of it.

    Example:
        Origin("/runs/first", version=50, begins_at=0, manifest="9f…", without=["progress"], schedule_shift=50)
    """

    folder: str  # the other run's, when this one began
    version: int  # the number of its checkpoint
    begins_at: int  # version of this run that has these weights: the same number, or 0 without the other's progress
    manifest: str  # SHA-256 of the checkpoint's manifest, and so of all of its files
    without: list[str] = []  # parts that are not taken: optimizer, scheduler, data, progress
    schedule_shift: int = 0  # added to a step, and to `max_steps`, for the learning rate
    samples: int = 0  # samples that the order of the data has passed (`sft`)
    state: State = msgspec.field(default_factory=State)  # the state from which the orchestrator continues (`rl`)

    def checkpoint(self, root: Path) -> Path:
        """Return the folder of the checkpoint in the run that begins from it."""
        return step_folder(root / FOLDER, self.version)

    def find_damage(self, root: Path, *, reads_all: bool = True) -> str | None:
        """Return what is wrong with the checkpoint in this run's folder; None if it is what it was."""
        folder = self.checkpoint(root)
        if (damage := find_damage(folder, reads_all=reads_all)) is not None:
            return damage
        if (found := digest_of_manifest(folder)) != self.manifest:
            return f"{folder / MANIFEST} has digest {found[:12]}, it was taken over with {self.manifest[:12]}"
        return None


def digest_of_manifest(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()


def read_origin(root: Path) -> Origin | None:
    """Return the origin of the run in a folder; None if it began from its base model.

    Raises: JournalCorrupt if the file is not what was written.
    """
    file = root / FOLDER / FILE
    if not file.exists():
        return None
    return read_entry(file, 0, Origin, ways_out="Restore it from a copy, or begin the run again from the other one.")


def first_version(root: Path) -> int:
    """Return the version that a run begins with, which no batch of its journal made."""
    origin = read_origin(root)
    return origin.begins_at if origin else 0


def write_origin(root: Path, origin: Origin, checkpoint: Path) -> None:
    """Take a checkpoint of another run into a run's folder. Nothing of the other one is changed.

    If another process of the run has done it meanwhile, what it took stays.

    Raises:
        OSError: it could not be written; nothing is there then.
        JournalCorrupt: the checkpoint was removed or replaced meanwhile.
    """
    partial = root / f".{FOLDER}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        folder = origin.checkpoint(root)
        target = partial / folder.name
        for name in (*read_manifest(checkpoint).files, MANIFEST):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            _link(checkpoint / name, target / name)
            sync_folder((target / name).parent)
        if digest_of_manifest(target) != origin.manifest:
            raise JournalCorrupt(f"{checkpoint} was replaced while it was read. Give the same command again.")

        # The entry comes last, and the rename makes both appear at once. A folder is never renamed onto one with files.
        write_entry(partial / FILE, 0, origin)
        try:
            partial.rename(root / FOLDER)
        except OSError:
            if not (root / FOLDER / FILE).exists():
                raise
        sync_folder(root)
    except FileNotFoundError as error:
        raise JournalCorrupt(
            f"{error.filename} is gone: the other run removed that checkpoint meanwhile. Give the same command again."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """Link a file, which takes no room, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())
