"""An index of a run's rollouts in SQLite: it is searched, sorted and counted without reading the journal again.

It lies in the user's cache and can be deleted at any time. A process of its own, with low priority, reads the journal
into it batch by batch, the newest first. Pages read what is there by now.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from trireme.base.processes import die_with_parent
from trireme.journal.records import BatchRecord, Dropped, Rollout
from trireme.tools.audit.fates import kind_of
from trireme.tools.rollout_filters import CLOSE, NUMBERS, Term, parse_filter
from trireme.tools.rollouts import Row, dropped_row_of, read_batch, record_of_rollout, row_of

FORMAT = 3  # of the tables; an index of another format is built again
MOST_TEXT = 4000  # characters of a rollout that are searched: half of them from its beginning, half from its end
BUSY_S = 10.0
LOOK_EVERY_S = 2.0
KEPT_DAYS = 30  # of an index that was not opened
NICENESS = 15
MOST_BARS = 400  # of the fates by step
MOST_KINDS = 8  # of reasons for dropping, shown one by one

TRAINED, MASKED, DROPPED, OPEN = "trained", "masked", "dropped", "open"
"""Fates of a rollout; a group is open that was begun and is in no batch yet."""

TABLES = """
CREATE TABLE batches (
    step INTEGER PRIMARY KEY, file TEXT NOT NULL, trouble TEXT NOT NULL, open_groups TEXT NOT NULL, sizes TEXT NOT NULL
);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY, step INTEGER, number INTEGER, grp INTEGER, place INTEGER, attempt INTEGER, env TEXT,
    example INTEGER, fate TEXT, kind TEXT, reward REAL, advantage REAL, tokens INTEGER, turns INTEGER,
    truncated INTEGER, stop TEXT, error TEXT, flaws TEXT
);
CREATE INDEX of_step ON rollouts (step, fate, kind);
CREATE INDEX of_example ON rollouts (env, example);
CREATE TABLE texts (id INTEGER PRIMARY KEY, said TEXT, text TEXT);
"""
ROLLOUT_SORTS = ("step", "env", "example", "place", "reward", "advantage", "tokens", "turns", "fate")

FATES = """
sum(fate = 'trained') AS trained, sum(fate = 'masked') AS masked, sum(fate = 'dropped') AS dropped,
avg(reward) AS mean, group_concat(DISTINCT CASE WHEN fate = 'dropped' THEN kind END) AS why
"""
REWARD_OF_A_STEP = """
SELECT avg(reward) FROM rollouts AS one WHERE one.env = rollouts.env AND one.example = rollouts.example
AND reward IS NOT NULL GROUP BY step ORDER BY step
"""
EXAMPLES = f"""
SELECT env, example, count(DISTINCT grp) AS groups, {FATES}, max(step) AS last_step,
({REWARD_OF_A_STEP} LIMIT 1) AS first_reward, ({REWARD_OF_A_STEP} DESC LIMIT 1) AS last_reward
FROM rollouts GROUP BY env, example
"""
GROUPS = f"""
SELECT step, grp, {FATES}, min(reward) AS low, max(reward) AS high,
CASE WHEN sum(fate != 'dropped') THEN 'trained' ELSE 'dropped' END AS fate
FROM rollouts WHERE env = ? AND example = ? GROUP BY step, grp ORDER BY step, grp
"""
EXAMPLE_SORTS = (
    *("env", "example", "groups", "trained", "masked", "dropped"),
    *("first_reward", "last_reward", "mean", "last_step"),
)


class Found(NamedTuple):
    """One page of a list."""

    rows: list[dict[str, Any]]
    total: int


class Totals(NamedTuple):
    """Numbers of rollouts by fate, of groups, and of examples.

    Example:
        Totals(trained=1200, masked=4, dropped={"no signal": 80}, open_groups=16, examples=310, of=1000)
    """

    trained: int
    masked: int
    dropped: dict[str, int]  # by kind of reason, most frequent first
    open_groups: int
    examples: int  # that have a fate
    of: int  # training examples of all environments


class RolloutIndex:
    """The index of one run. Reading raises sqlite3.DatabaseError while it is built again."""

    def __init__(self, run: Path, cache: Path) -> None:
        digest = hashlib.blake2b(os.fsencode(os.path.realpath(run)), digest_size=8).hexdigest()
        self.run, self.journal = run, run / "journal"
        self.file = cache / f"rollouts-{digest}.sqlite"
        self._process: BaseProcess | None = None

    def keep_current(self) -> None:
        """Create the index, and start the process that fills it, where either is missing. For the main thread."""
        self.create()
        if self._process is None or not self._process.is_alive():
            arguments = (self.run, self.file.parent, os.getpid())
            self._process = multiprocessing.get_context("spawn").Process(target=_run, args=arguments, daemon=True)
            self._process.start()

    def create(self) -> None:
        """Create empty tables, unless there are tables of this format."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
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

    def ask(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with closing(self._open()) as db:
            return db.execute(sql, values).fetchall()

    def _dicts(self, sql: str, values: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        with closing(self._open()) as db:
            db.row_factory = sqlite3.Row
            return [dict(row) for row in db.execute(sql, values)]

    # writing

    def update(self) -> Iterator[int]:
        """Read batches that are new or changed, and forget those that are gone. Yield the step of each one read."""
        there = {step: file for step in find_batches(self.journal) if (file := batch_identity(self.journal, step))}
        known = dict(self.ask("SELECT step, file FROM batches"))
        for step, file in sorted(there.items(), reverse=True):
            if known.get(step) != file:
                self._write(step, file, *read_batch(batch_path(self.journal, step)))
                yield step
        with closing(self._open()) as db, db:
            for step in known.keys() - there.keys():
                _forget(db, step)

    def _write(self, step: int, file: str, record: BatchRecord | None, trouble: str) -> None:
        open_groups = [(group.id, group.env, group.example) for group in record.state.open_groups] if record else []
        sizes = record.state.sizes if record else {}
        with closing(self._open()) as db, db:
            _forget(db, step)
            batch = (step, file, trouble, json.dumps(open_groups), json.dumps(sizes))
            db.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", batch)
            if record:
                ((first,),) = db.execute("SELECT COALESCE(max(id), 0) + 1 FROM rollouts")
                for id, (row, text) in enumerate(_rows_of(record), first):
                    db.execute(f"INSERT INTO rollouts VALUES (?{', ?' * len(row)})", (id, *row))
                    db.execute("INSERT INTO texts VALUES (?, ?, ?)", (id, *text))

    # reading

    def progress(self) -> tuple[int, int]:
        """Return how many batches are in the index, and how many there are."""
        done = 0
        with suppress(sqlite3.DatabaseError):
            ((done,),) = self.ask("SELECT count(*) FROM batches")
        return done, len(find_batches(self.journal))

    def search(
        self, query: Query, *, sort: str = "step", backwards: bool = False, limit: int = 50, offset: int = 0
    ) -> Found:
        """Return the rollouts that a query selects. Those without a value to sort by come last."""
        assert sort in ROLLOUT_SORTS, sort
        found = f"FROM {'rollouts JOIN texts USING (id)' if query.needs_text else 'rollouts'} WHERE {query.condition}"
        ((total,),) = self.ask(f"SELECT count(*) {found}", query.values)
        direction = "DESC" if backwards else "ASC"
        order = f"ORDER BY {sort} IS NULL, {sort} {direction}, step {direction}, number"
        rows = self._dicts(
            f"WITH page AS (SELECT id {found} {order} LIMIT {int(limit)} OFFSET {int(offset)}) "
            f"SELECT rollouts.*, said FROM page JOIN rollouts USING (id) JOIN texts USING (id) {order}",
            query.values,
        )
        return Found(rows, total)

    def examples(self, *, sort: str = "example", backwards: bool = False, limit: int = 50, offset: int = 0) -> Found:
        """Return what became of each example. Those without a value to sort by come last."""
        assert sort in EXAMPLE_SORTS, sort
        direction = "DESC" if backwards else "ASC"
        order = f"ORDER BY {sort} IS NULL, {sort} {direction}, env, example LIMIT {int(limit)} OFFSET {int(offset)}"
        waiting = {(env, example) for _, env, example in self.open_groups()}
        rows = [row | {OPEN: (row["env"], row["example"]) in waiting} for row in self._dicts(f"{EXAMPLES} {order}")]
        return Found(rows, self._num_examples())

    def groups_of(self, env: str, example: int) -> list[dict[str, Any]]:
        """Return the fates of an example's groups in the order in which they were decided; open ones last."""
        decided = self._dicts(GROUPS, (env, example))
        waiting = [id for id, *which in self.open_groups() if which == [env, example]]
        return decided + [{"step": None, "grp": id, "fate": OPEN} for id in waiting]

    def open_groups(self) -> list[list[Any]]:
        """Return number, environment and example of the groups that the newest batch leaves open."""
        newest = self.ask("SELECT open_groups FROM batches ORDER BY step DESC LIMIT 1")
        return json.loads(newest[0][0]) if newest else []

    def _num_examples(self) -> int:
        ((count,),) = self.ask("SELECT count(*) FROM (SELECT DISTINCT env, example FROM rollouts)")
        return count

    def totals(self) -> Totals:
        counts = self.ask("SELECT fate, kind, count(*) FROM rollouts GROUP BY fate, kind ORDER BY count(*) DESC, kind")
        sizes = self.ask("SELECT sizes FROM batches WHERE sizes != '{}' ORDER BY step DESC LIMIT 1")
        return Totals(
            trained=sum(count for fate, _, count in counts if fate == TRAINED),
            masked=sum(count for fate, _, count in counts if fate == MASKED),
            dropped={kind: count for fate, kind, count in counts if fate == DROPPED},
            open_groups=len(self.open_groups()),
            examples=self._num_examples(),
            of=sum(json.loads(sizes[0][0]).values()) if sizes else 0,
        )

    def by_step(self) -> tuple[list[int], dict[str, list[int]]]:
        """Return the first steps of up to `MOST_BARS` equal stretches, and how many rollouts of each came to each fate.

        Dropped rollouts are counted by kind of reason, the rare ones together.
        """
        ((first, last),) = self.ask("SELECT min(step), max(step) FROM batches")
        if first is None:
            return [], {}
        width = math.ceil((last - first + 1) / MOST_BARS)
        often = list(self.totals().dropped)[:MOST_KINDS]
        begins = list(range(first, last + 1, width))
        found = {name: [0] * len(begins) for name in (TRAINED, MASKED, *often, "other reasons")}
        counts = "SELECT (step - ?) / ? AS bar, fate, kind, count(*) FROM rollouts GROUP BY bar, fate, kind"
        for bar, fate, kind, count in self.ask(counts, (first, width)):
            name = fate if fate != DROPPED else kind if kind in often else "other reasons"
            found[name][bar] += count
        return begins, {name: values for name, values in found.items() if name == TRAINED or any(values)}


def _forget(db: sqlite3.Connection, step: int) -> None:
    db.execute("DELETE FROM texts WHERE id IN (SELECT id FROM rollouts WHERE step = ?)", (step,))
    for table in ("rollouts", "batches"):
        db.execute(f"DELETE FROM {table} WHERE step = ?", (step,))


def _rows_of(record: BatchRecord) -> Iterator[tuple[tuple[Any, ...], tuple[str, str]]]:
    """Yield a batch's rollouts as rows of `rollouts` and `texts`, without their ids."""

    def row_and_text(row: Row, of: Rollout | Dropped, fate: str, kind: str, text: str) -> Any:
        lower, half = text.lower(), MOST_TEXT // 2
        head = (record.step, row.number, of.group, of.place, of.attempt, row.env, of.example, fate, kind)
        numbers = (row.reward, row.advantage, row.tokens, row.turns, row.truncated)
        searched = lower if len(lower) <= MOST_TEXT else f"{lower[:half]}\n{lower[-half:]}"
        return (*head, *numbers, row.stop, row.error, row.flaws), (row.said, searched)

    for number, rollout in enumerate(record.rollouts):
        row = row_of(number, rollout)
        fate = MASKED if rollout.masked else TRAINED
        yield row_and_text(row, rollout, fate, rollout.masked or "", record_of_rollout(row, rollout).text)
    for number, dropped in enumerate(record.dropped, len(record.rollouts)):
        row = dropped_row_of(number, dropped)
        yield row_and_text(row, dropped, DROPPED, kind_of(dropped.reason), dropped.reason)


# the process that fills it


@cache
def index_of(run: Path) -> RolloutIndex:
    """Return the index of a run, one for all browsers."""
    return RolloutIndex(run, _cache_folder())


@cache
def _cache_folder() -> Path:
    """Return a folder of the user, or one of this process where that cannot be written. Remove old indexes from it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trireme" / "dashboard"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return Path(tempfile.mkdtemp(prefix="trireme-dashboard-"))
    for file in folder.glob("rollouts-*.sqlite*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > KEPT_DAYS * 86_400:
                file.unlink()
    return folder


def _run(run: Path, cache: Path, parent: int) -> None:
    die_with_parent(parent)
    os.nice(NICENESS)
    index = RolloutIndex(run, cache)
    while True:
        bring_up_to_date(index)
        time.sleep(LOOK_EVERY_S)


def bring_up_to_date(index: RolloutIndex) -> None:
    """Read what is new. A damaged index is emptied, and filled by the next call."""
    try:
        for _ in index.update():
            pass
    except (OSError, sqlite3.OperationalError):
        pass  # the disk is full, or another dashboard writes: retried by the next call
    except sqlite3.DatabaseError:
        index.remove()
        index.create()


# files of batches


def batch_path(journal: Path, step: int) -> Path:
    return journal / f"batch_{step:06d}.msgpack"


def find_batches(journal: Path) -> list[int]:
    """Return the steps of the batches that are there, in order, by the names of files alone."""
    try:
        names = os.listdir(journal)
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"batch_(\d+)\.msgpack", name)))


def batch_identity(journal: Path, step: int) -> str:
    """Return what changes when a run writes a batch again; empty where there is no such file."""
    try:
        stat = batch_path(journal, step).stat()
    except OSError:
        return ""
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


# queries

ALL_NUMBERS = (*NUMBERS, "step", "group", "attempt")
COLUMNS = {"rollout": "place", "group": "grp"}  # where the table has another name than the filter
FLAGS = {"truncated": "truncated", "failed": "error != ''", "flawed": "flaws != ''"}


@dataclass(frozen=True)
class Query:
    """A condition for `WHERE`. With `needs_text`, the table of texts has to be joined."""

    condition: str = "1"
    values: tuple[str | float, ...] = ()
    needs_text: bool = False

    def __and__(self, other: Query) -> Query:
        needs_text = self.needs_text or other.needs_text
        return Query(f"{self.condition} AND {other.condition}", self.values + other.values, needs_text)


def query_of(line: str) -> Query:
    """Translate a line of `tools/rollout_filters.py`, which may also name `step`, `group` and `attempt`.

    A value that a rollout does not have (a dropped one has no reward) fails every test, and passes the negated test.

    Raises: ConfigError where a term has no meaning.
    """
    query = Query()
    for term in parse_filter(line, ALL_NUMBERS).terms:
        condition, values = _condition(term)
        known = f"COALESCE({condition}, 0)"
        query &= Query(f"NOT {known}" if term.is_negated else known, values, needs_text=term.field == "text")
    return query


def _condition(term: Term) -> tuple[str, tuple[str | float, ...]]:
    column = COLUMNS.get(term.field, term.field)
    if term.field == "is":
        return FLAGS[str(term.value)], ()
    if term.field == "text":
        return "instr(text, ?) > 0", (term.value,)
    if term.field == "example":  # a number in the journal, and a name in a filter
        column = "CAST(example AS TEXT)" if isinstance(term.value, str) else "example"
    elif isinstance(term.value, str):
        column = f"lowered({column})"
    else:
        difference = f"(CASE WHEN abs({column} - ?) < {CLOSE} THEN 0 ELSE {column} - ? END)"
        return f"{difference} {term.op} 0", (term.value, term.value)
    return (f"instr({column}, ?) > 0" if term.op == "~" else f"{column} {term.op} ?"), (term.value,)
