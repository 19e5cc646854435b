"""Where everything of a run lies on disk, and how a file or folder gets there whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PARTIAL = ".partial"


@dataclass(frozen=True)
class RunPaths:
    """The run folder. Users know these names: keep them."""

    root: Path

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    @property
    def run_config(self) -> Path:
        """The resolved configuration that every process of the run loads."""
        return self.configs / "run.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.stdout"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def logprobs(self) -> Path:
        """What the trainer's weights said of the tokens of each batch."""
        return self.root / "logprobs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def data(self) -> Path:
        """Samples of supervised training, as they are trained on."""
        return self.root / "data"

    @property
    def broadcast(self) -> Path:
        """Weights in passing, for `weight_broadcast.type = "filesystem"`."""
        return self.root / "broadcast"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def spans(self) -> Path:
        """What each process did, from when to when."""
        return self.root / "spans.jsonl"

    @property
    def evals(self) -> Path:
        return self.root / "evals"


def step_folder(parent: Path, step: int) -> Path:
    return parent / f"step_{step}"


def step_of(folder: Path) -> int | None:
    """The N of `step_N`, or None where the name is another."""
    name, _, number = folder.name.partition("_")
    return int(number) if name == "step" and number.isdigit() else None


@contextmanager
def atomic_write(path: Path, *, replace: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only when whole and on disk; after an error there is nothing.

    Raises: FileExistsError where `replace` is false and another process has written a file of that name.
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
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _rename_if_new(partial: Path, path: Path) -> None:
    """Raises: FileExistsError. Where the file system has no hard links, two writers at one instant go unnoticed."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(partial, path)


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes were writing with `atomic_write`. The caller must be the only writer left."""
    for partial in folder.glob(f".*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def replace_folder(partial: Path, folder: Path) -> None:
    """Gives `partial`, which is whole and on disk, the name `folder`; what had that name is removed."""
    hidden = _hide(folder) if folder.exists() else None
    partial.rename(folder)
    sync_folder(folder.parent)
    if hidden:
        shutil.rmtree(hidden, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """A crash on the way leaves no half of it under its name."""
    shutil.rmtree(_hide(folder), ignore_errors=True)


def is_left_over(folder: Path) -> bool:
    """Whether it is what a dead process was writing, or removing."""
    return folder.name.startswith(".step_") and folder.suffix in (".partial", ".removed")


def _hide(folder: Path) -> Path:
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    return hidden


def sync_folder(folder: Path) -> None:
    """Makes a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
