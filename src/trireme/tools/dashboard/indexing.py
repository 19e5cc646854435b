"""Keeps the tables of rollouts current, in a process of its own: reading a journal of gigabytes is not for the one that
answers browsers. It works with what the machine has to spare, and ends with its parent.

The tables lie in the user's cache, one for each run folder; in a run folder nothing is ever written.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sqlite3
import tempfile
import time
from contextlib import suppress
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

from trireme.base.processes import die_with_parent
from trireme.tools.dashboard.rollout_table import RolloutTable, find_batches

LOOK_EVERY_S = 2.0
END_S = 5.0
KEPT_DAYS = 30
"""A table that nobody has looked at for so long is removed."""
NICENESS = 15


def cache_folder() -> Path:
    """Of the user; of this process alone where that cannot be written to."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trireme" / "dashboard"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="trireme-dashboard-"))


def file_of(run: Path, cache: Path) -> Path:
    name = hashlib.blake2b(os.fsencode(os.path.realpath(run)), digest_size=8).hexdigest()
    return cache / f"rollouts-{name}.sqlite"


class Index:
    """The table of one run, and how far it has come."""

    def __init__(self, run: Path, cache: Path) -> None:
        self.run = run
        self.journal = run / "journal"
        self.table = RolloutTable(file_of(run, cache))
        self._process: BaseProcess | None = None

    def keep_current(self) -> None:
        """Call it in the main thread: its end ends what was started in it."""
        if self._process is None or not self._process.is_alive():
            context = multiprocessing.get_context("spawn")
            arguments = (self.journal, self.table.file, os.getpid())
            self._process = context.Process(target=keep_current, args=arguments, daemon=True)
            self._process.start()

    def progress(self) -> tuple[int, int]:
        """Batches that are in the table, and those that there are."""
        done = 0
        with suppress(sqlite3.DatabaseError):  # it is made anew
            ((done,),) = self.table.ask("SELECT count(*) FROM batches")
        return done, len(find_batches(self.journal))

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.join(END_S)
            self._process.kill()  # nothing where it has ended
            self._process = None


class Indexes:
    """Of all runs that somebody has looked into."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        self._indexes: dict[Path, Index] = {}

    def of(self, run: Path) -> Index:
        """Kept current from now on. Call it in the main thread."""
        if self._cache is None:
            self._cache = cache_folder()
            remove_old(self._cache)
        index = self._indexes.setdefault(run, Index(run, self._cache))
        index.table.make()
        index.keep_current()
        return index

    def close(self) -> None:
        for index in self._indexes.values():
            index.close()


@cache
def shared_indexes() -> Indexes:
    """Of this process: all who look at a run share its table."""
    return Indexes()


def keep_current(journal: Path, file: Path, parent: int) -> None:
    die_with_parent(parent)
    os.nice(NICENESS)
    table = RolloutTable(file)
    while True:
        bring_up_to_date(table, journal)
        time.sleep(LOOK_EVERY_S)


def bring_up_to_date(table: RolloutTable, journal: Path) -> None:
    try:
        for _ in table.update(journal):
            pass
    except (OSError, sqlite3.OperationalError):
        pass  # a full disk, another dashboard at work: it is tried again
    except sqlite3.DatabaseError:  # damaged
        table.remove()
        table.make()


def remove_old(cache: Path) -> None:
    for file in cache.glob("rollouts-*.sqlite*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > KEPT_DAYS * 86_400:
                file.unlink()
