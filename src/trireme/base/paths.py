"""Paths of a run folder, moving its files aside, and atomic writes: a file or folder appears whole or not at all."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trireme.base.errors import ConfigError
from trireme.base.log import get_logger

log = get_logger("journal")

PARTIAL = ".partial"


class RunPaths:
    """The run folder. Users know these names, so they stay."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.configs = root / "configs"
        self.run_config = self.configs / "run.json"  # the resolved configuration that every process of the run loads
        self.origin = root / "origin"  # the checkpoint of another run that this one began from
        self.logs = root / "logs"
        self.journal = root / "journal"
        self.logprobs = root / "logprobs"  # the trainer's logprobs of each batch's tokens
        self.checkpoints = root / "checkpoints"
        self.weights = root / "weights"
        self.data = root / "data"  # tokenized samples of supervised training
        self.broadcast = root / "broadcast"  # weights on their way, with `weight_broadcast.type = "filesystem"`
        self.metrics = root / "metrics.jsonl"
        self.spans = root / "spans.jsonl"  # the timeline: what each process did, from when to when
        self.evals = root / "evals"

    @property
    def holds_run(self) -> bool:
        """Return whether a run has written anything that a new one must not overwrite."""
        return self.metrics.exists() or self.journal.exists() or self.origin.exists()

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.stdout"


def step_folder(parent: Path, step: int) -> Path:
    return parent / f"step_{step}"


def step_of(folder: Path) -> int | None:
    """Return N of a name `step_N`, or None for other names."""
    name, _, number = folder.name.partition("_")
    return int(number) if name == "step" and number.isdigit() else None


def require_new_folder(folder: Path, option: str) -> None:
    """Raises: ConfigError if a folder that is written whole and then renamed cannot take this one's place."""
    if folder.resolve() == Path.cwd():
        raise ConfigError(
            f"{folder} is the folder that this command runs in - expected another: one that is complete takes its "
            f"place, and your shell would be left in one that is gone. Set `{option}` to a new one."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty - expected an empty or a new folder. Set `{option}` to another.")


def steps_in(folder: Path) -> list[int]:
    """Return the N of all `step_N` in a folder, complete or not, in order; none if there is no folder."""
    steps = [step_of(path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(step for step in steps if step is not None)


def move_aside(folder: Path, entries: Sequence[Path]) -> None:
    """Move entries of `folder`, given from the oldest on, to a new folder inside it.

    The newest is moved first, so that a crash in between leaves no gap.
    """
    if not entries:
        return
    name = f"set_aside_{time.strftime('%Y%m%d_%H%M%S')}"
    names = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    aside = next(folder / each for each in names if not (folder / each).exists())  # one second may see several calls
    aside.mkdir()
    for entry in reversed(entries):
        entry.rename(aside / entry.name)
    sync_folder(folder)
    log.info("%s to %s set aside in %s", entries[0].name, entries[-1].name, aside)


def set_aside_after(folder: Path, version: int) -> None:
    """Move aside all `step_N` after `version`: they are damaged, or the run takes another course from here."""
    move_aside(folder, [step_folder(folder, step) for step in steps_in(folder) if step > version])


@contextmanager
def atomic_write(path: Path, *, replace: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only when whole and on disk; after an error there is nothing.

    Raises: FileExistsError if `replace` is false and another process has written a file of that name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(partial, path)
        else:
            _rename_if_new(partial, path)
        # The file's content is on disk already; syncing the folder makes its name durable too.
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _rename_if_new(partial: Path, path: Path) -> None:
    """Rename without replacing. Raises FileExistsError. Without hard links, two simultaneous writers go unnoticed."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # No hard links here: another writer may still come between this check and the rename.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(partial, path)


def remove_partial_files(folder: Path) -> None:
    """Remove the partial files of `atomic_write` that killed processes left. The caller must be the only writer."""
    for partial in folder.glob(f".*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def replace_folder(partial: Path, folder: Path) -> None:
    """Rename `partial`, which is complete and synced, to `folder`, and remove what had that name."""
    # Two renames, as a folder cannot be renamed onto one that holds files. The old one is removed last.
    hidden = _hide(folder) if folder.exists() else None
    partial.rename(folder)
    sync_folder(folder.parent)
    if hidden:
        shutil.rmtree(hidden, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that a crash in between leaves no partial folder under its name."""
    shutil.rmtree(_hide(folder), ignore_errors=True)


def is_left_over(folder: Path) -> bool:
    """Return whether an entry is the leftover of a dead process that was writing or removing it."""
    return folder.name.startswith(".step_") and folder.suffix in (".partial", ".removed")


def _hide(folder: Path) -> Path:
    hidden = folder.with_name(f".{folder.name}.removed")
    # A process that died while it removed a folder has left one of this name.
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    return hidden


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename inside it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
