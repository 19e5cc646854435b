"""An index of a run's rollouts in SQLite: it is searched and sorted without reading the journal again.

It lies in the user's cache and can be deleted at any time. A process of its own, with low priority, reads the journal
into it batch by batch, the newest first. Pages read what is there by now.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from trireme.base.processes import die_with_parent
from trireme.tools.rollout_filters import parse_filter
from trireme.tools.rollouts import BatchFile, Row, identity_of
from trireme.tools.run_reader import RunReader

FORMAT = 6  # version of the tables; an index of another version is built again
MOST_TEXT = 4000  # characters of a rollout that are searched: half of them from its beginning, half from its end
BUSY_S = 10.0
LOOK_EVERY_S = 2.0
QUIET_S = 600.0  # without a new batch, after which the process that fills an index ends until a page misses a batch
KEPT_DAYS = 30  # days after which an index that was not opened is removed
NICENESS = 15
FIELDS = tuple(
    name for name in Row.__struct_fields__ if name not in ("example", "question", "last_message", "offset", "length")
)
TABLES = f"""
CREATE TABLE batches (step INTEGER PRIMARY KEY, file TEXT NOT NULL, trouble TEXT NOT NULL);
CREATE TABLE rollouts (id INTEGER PRIMARY KEY, example INTEGER, {", ".join(f'"{name}"' for name in FIELDS)});
CREATE INDEX of_step ON rollouts (step);
CREATE TABLE texts (id INTEGER PRIMARY KEY, last_message TEXT, text TEXT);
"""
ROLLOUT_SORTS = ("step", "env", "example", "rollout", "reward", "advantage", "tokens", "turns", "fate")


class Found(NamedTuple):
    """One page of the rollouts that a search found."""

    rows: list[dict[str, Any]]
    total: int  # on all pages


class RolloutIndex:
    """The index of one run. Reading raises sqlite3.DatabaseError while it is built again."""

    def __init__(self, run: Path, cache: Path) -> None:
        digest = hashlib.blake2b(os.fsencode(os.path.realpath(run)), digest_size=8).hexdigest()
        self.run = RunReader(run)
        self.file = cache / f"rollouts-{digest}.sqlite"
        self._process: BaseProcess | None = None

    def keep_current(self) -> None:
        """Create the index, and start the process that fills it, if either is missing. For the main thread."""
        self.create()
        if self._process is None or not self._process.is_alive():
            arguments = (self.run.path, self.file.parent, os.getpid())
            # a spawned process, as a fork would copy the server's threads and locks
            self._process = multiprocessing.get_context("spawn").Process(target=_run, args=arguments, daemon=True)
            self._process.start()

    def create(self) -> None:
        """Create empty tables, unless there are tables of this format."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # a damaged file, or tables of another format, are replaced
        with suppress(sqlite3.DatabaseError):
            if self.ask("PRAGMA user_version") == [(FORMAT,)]:
                return
        self.remove()
        with closing(self._open()) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"{TABLES} PRAGMA user_version = {FORMAT};")

    def remove(self) -> None:
        for file in self.file.parent.glob(f"{self.file.name}*"):
            file.unlink(missing_ok=True)

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.file, timeout=BUSY_S)
        db.execute("PRAGMA synchronous = OFF")  # an index that a crash damages is built again
        db.create_function("lowered", 1, lambda text: text.lower() if text else text, deterministic=True)
        return db

    def ask(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with closing(self._open()) as db:
            return db.execute(sql, values).fetchall()

    # writing

    def update(self) -> Iterator[int]:
        """Read batches that are new or changed, and forget those that are gone. Yield the step of each one read."""
        # the identity of a batch's file tells whether it was written again
        journal = self.run.journal
        paths = {step: journal.path(step) for step in journal.steps()}
        there = {step: str(identity) for step, path in paths.items() if (identity := identity_of(path))}
        known = dict(self.ask("SELECT step, file FROM batches"))
        # newest first: these are what a page shows first
        for step, file in sorted(there.items(), reverse=True):
            if known.get(step) != file:
                self._write(step, file, self.run.batch(step))
                yield step
        with closing(self._open()) as db, db:
            for step in known.keys() - there.keys():
                _forget(db, step)

    def _write(self, step: int, identity: str, file: BatchFile) -> None:
        file.read_more()
        # one transaction for each batch, so that a reader never sees half of it
        with closing(self._open()) as db, db:
            _forget(db, step)
            db.execute("INSERT INTO batches VALUES (?, ?, ?)", (step, identity, file.trouble))
            ((first,),) = db.execute("SELECT COALESCE(max(id), 0) + 1 FROM rollouts")
            for id, row in enumerate(file.rows, first):
                columns = (id, row.example, *(getattr(row, name) for name in FIELDS))
                db.execute(f"INSERT INTO rollouts VALUES (?{', ?' * (len(columns) - 1)})", columns)
                text, half = file.record(row).text.lower(), MOST_TEXT // 2
                searched = text if len(text) <= MOST_TEXT else f"{text[:half]}\n{text[-half:]}"
                db.execute("INSERT INTO texts VALUES (?, ?, ?)", (id, row.last_message, searched))

    # reading

    def look(self) -> tuple[int, int]:
        """Return `progress`. If batches are missing, start the process that fills the index. For the main thread."""
        done, total = self.progress()
        if 0 < total != done:
            self.keep_current()
        return done, total

    def progress(self) -> tuple[int, int]:
        """Return how many batches are in the index, and how many there are."""
        done = 0
        with suppress(sqlite3.DatabaseError):
            ((done,),) = self.ask("SELECT count(*) FROM batches")
        return done, len(self.run.journal.steps())

    def search(
        self, line: str, *, sort: str = "step", backwards: bool = False, limit: int = 50, offset: int = 0
    ) -> Found:
        """Return the rollouts that pass a filter line. Those without a value to sort by come last.

        A value that a rollout does not have (a dropped one has no reward) fails every test, and passes its negation.

        Raises: ConfigError if a term has no meaning.
        """
        assert sort in ROLLOUT_SORTS, sort
        terms = parse_filter(line).terms
        conditions, values = ["1"], list[str | float]()
        for term in terms:
            condition, of_term = term.sql()
            conditions.append(condition)
            values += of_term

        tables = "rollouts JOIN texts USING (id)" if any(term.field == "text" for term in terms) else "rollouts"
        found = f"FROM {tables} WHERE {' AND '.join(conditions)}"
        ((total,),) = self.ask(f"SELECT count(*) {found}", values)
        direction = "DESC" if backwards else "ASC"
        # each rollout has a step, by which the table's own index has them in order: no other one is read
        first = "" if sort == "step" else f"{sort} IS NULL, {sort} {direction}, "
        order = f"ORDER BY {first}step {direction}, number"
        # rows are chosen by id first, as texts are long and only one page of them is needed
        page = (
            f"WITH page AS (SELECT id {found} {order} LIMIT {int(limit)} OFFSET {int(offset)}) "
            f"SELECT rollouts.*, last_message FROM page JOIN rollouts USING (id) JOIN texts USING (id) {order}"
        )
        with closing(self._open()) as db:
            db.row_factory = sqlite3.Row
            return Found([dict(row) for row in db.execute(page, values)], total)


def _forget(db: sqlite3.Connection, step: int) -> None:
    db.execute("DELETE FROM texts WHERE id IN (SELECT id FROM rollouts WHERE step = ?)", (step,))
    for table in ("rollouts", "batches"):
        db.execute(f"DELETE FROM {table} WHERE step = ?", (step,))


# the process that fills it


@cache
def index_of(run: Path) -> RolloutIndex:
    """Return the index of a run, one for all browsers."""
    return RolloutIndex(run, _cache_folder())


@cache
def _cache_folder() -> Path:
    """Return a folder of the user, or one of this process if that cannot be written. Remove old indexes from it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trireme" / "dashboard"

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return Path(tempfile.mkdtemp(prefix="trireme-dashboard-"))
    # Indexes of runs that no dashboard has opened for long would fill the cache.
    for file in folder.glob("rollouts-*.sqlite*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > KEPT_DAYS * 86_400:
                file.unlink()
    return folder


def _run(run: Path, cache: Path, parent: int) -> None:
    die_with_parent(parent)
    os.nice(NICENESS)
    fill(RolloutIndex(run, cache))


def fill(index: RolloutIndex) -> None:
    """Keep an index up to date until its run is quiet for `QUIET_S`, or its folder is gone."""
    # the process ends by itself, and `look` starts it again when a batch is missing
    changed_s = time.monotonic()
    while os.path.isdir(index.run.path):
        if bring_up_to_date(index):
            changed_s = time.monotonic()
        elif time.monotonic() - changed_s >= QUIET_S:
            return
        time.sleep(LOOK_EVERY_S)


def bring_up_to_date(index: RolloutIndex) -> bool:
    """Read what is new. A damaged index is emptied, and filled by the next call. Return whether anything was read."""
    steps: list[int] = []
    try:
        steps.extend(index.update())
    except (OSError, sqlite3.OperationalError):
        pass  # the disk is full, or another dashboard writes: retried by the next call
    except sqlite3.DatabaseError:
        index.remove()
        index.create()
    return bool(steps)
