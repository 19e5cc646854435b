"""Disks that are really full, and files that really cannot grow."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in memory, of `size` ("1m"). Skips the test where we may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a small disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Leaves no byte free. Returns the file to remove for there to be room."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


@contextmanager
def limited(which: int, soft: int) -> Iterator[None]:
    """A limit of this process; its hard limit stays, so that it can be lifted again."""
    before, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (before, hard))


def file_size_limit(num_bytes: int) -> AbstractContextManager[None]:
    """No file may grow beyond this; a write is cut there, as on a disk with so much room."""
    return limited(resource.RLIMIT_FSIZE, num_bytes)
