"""The manifest of a checkpoint: the last file to be written, with size and digest of every other. It makes it complete.

Needs no torch, so that the launcher, the audit and the trainer share it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from trireme.base.errors import JournalCorrupt
from trireme.base.paths import step_folder, step_of, steps_in

MANIFEST = "manifest.json"


class FileEntry(msgspec.Struct, frozen=True):
    size: int  # bytes
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """Every file in a checkpoint's folder other than the manifest itself."""

    version: int
    world_size: int  # ranks that wrote it; any number may read it
    time: float  # unix
    files: dict[str, FileEntry]


def describe_file(path: Path) -> FileEntry:
    with open(path, "rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest. Raises JournalCorrupt if it is missing or malformed."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise JournalCorrupt(f"{folder} has no {MANIFEST}: it is half a checkpoint.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalCorrupt(f"{folder / MANIFEST} is no manifest: {error}.") from error


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of `folder` (a run's `checkpoints/`) whose checkpoint is complete, by names and sizes of
    files."""
    return [step for step in steps_in(folder) if is_complete(step_folder(folder, step))]


def is_complete(folder: Path) -> bool:
    return find_damage(folder, reads_all=False) is None


def find_damage(folder: Path, *, reads_all: bool = True) -> str | None:
    """Return what is wrong with a checkpoint; None if it is intact.

    Args:
        reads_all: compare digests as well as sizes, which reads every file.
    """
    try:
        manifest = read_manifest(folder)
    except JournalCorrupt as error:
        return str(error)

    # A checkpoint that was copied under the name of another step would resume as that step.
    if step_of(folder) not in (None, manifest.version):
        return f"{folder / MANIFEST} is of version {manifest.version}"

    # Without `reads_all` the digest is taken as given, so that a listing of checkpoints reads no weights.
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        found = describe_file(path) if reads_all else FileEntry(path.stat().st_size, entry.sha256)
        if found != entry:
            return (
                f"{path} has {found.size} bytes with digest {found.sha256[:12]}, its manifest says "
                f"{entry.size} with {entry.sha256[:12]}"
            )
    return None
