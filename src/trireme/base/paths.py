"""Where everything of a run lies on disk, and how a file gets there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO


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
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def broadcast(self) -> Path:
        """Weights in passing, for `weight_broadcast.type = "filesystem"`."""
        return self.root / "broadcast"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

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
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that appears under its name only when whole and on disk; after an error there is nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
