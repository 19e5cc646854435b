"""All rollouts of a run as a table in a file of SQLite: what is searched, sorted and counted, without reading the
journal again. It can be thrown away at any time; the journal has it all.

One process writes it (`indexing.py`), batch by batch; whoever looks reads what is there by now.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trireme.journal.records import BatchRecord, Dropped, Rollout
from trireme.tools.audit.fates import kind_of
from trireme.tools.dashboard.rollout_query import Query
from trireme.tools.rollouts import Row, dropped_row_of, read_batch, record_of_rollout, row_of

FORMAT = 1
"""Of the tables below; a file of another one is made anew."""
MOST_TEXT = 4000
"""Characters of a rollout that are searched; of a longer one the first half of so many, and the last."""
BUSY_S = 10.0

TRAINED, MASKED, DROPPED = "trained", "masked", "dropped"

TABLES = """
CREATE TABLE batches (
    step INTEGER PRIMARY KEY, file TEXT NOT NULL, trouble TEXT NOT NULL, open_groups TEXT NOT NULL, sizes TEXT NOT NULL
);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY, step INTEGER, number INTEGER, grp INTEGER, place INTEGER, attempt INTEGER, env TEXT,
    example INTEGER, fate TEXT, kind TEXT, reward REAL, advantage REAL, tokens INTEGER, turns INTEGER,
    truncated INTEGER, stop TEXT, error TEXT, flaws TEXT, cut INTEGER
);
CREATE INDEX of_step ON rollouts (step, fate, kind);
CREATE TABLE texts (id INTEGER PRIMARY KEY, question TEXT, said TEXT, text TEXT);
CREATE TABLE groups (
    step INTEGER, grp INTEGER, env TEXT, example INTEGER, fate TEXT, trained INTEGER, masked INTEGER, dropped INTEGER,
    mean REAL, low REAL, high REAL, why TEXT, PRIMARY KEY (step, grp)
);
CREATE INDEX of_example ON groups (env, example);
"""

SORTS = ("step", "env", "example", "place", "reward", "advantage", "tokens", "turns", "fate", "grp")


class Found(NamedTuple):
    """One page of what a search finds."""

    rows: list[dict[str, Any]]
    total: int
    cut: int  # rollouts whose middle was not searched


class RolloutTable:
    """Of one run, in one file; `:memory:` for what is not worth one."""

    def __init__(self, file: Path | str) -> None:
        self.file = file
        self._kept = _open(":memory:") if file == ":memory:" else None
        if self._kept:
            self._kept.executescript(TABLES)

    def make(self) -> None:
        """Begins anew where there is none, or what cannot be used. For the one who writes."""
        assert isinstance(self.file, Path)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if not _is_usable(self.file):
            self.remove()
            with closing(_open(self.file)) as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.executescript(TABLES)
                db.execute(f"PRAGMA user_version = {FORMAT}")
                db.commit()

    def remove(self) -> None:
        assert isinstance(self.file, Path)
        for name in (self.file.name, f"{self.file.name}-wal", f"{self.file.name}-shm"):
            with suppress(FileNotFoundError):
                self.file.with_name(name).unlink()

    # writing

    def update(self, journal: Path) -> Iterator[int]:
        """Takes in what is new or changed, forgets what is gone; says after each batch which it was."""
        there = list_batches(journal)
        with self._connected() as db:
            known = dict(db.execute("SELECT step, file FROM batches"))
            for step in known.keys() - there.keys():
                _forget(db, step)
            db.commit()
        for step, file in sorted(there.items(), reverse=True):  # the newest is what one wants to see first
            if known.get(step) != file:
                self.take(step, journal / name_of(step), file)
                yield step

    def take(self, step: int, path: Path, file: str = "") -> None:
        """One batch; one that cannot be read is noted as trouble."""
        record, trouble = read_batch(path)
        with self._connected() as db:
            _forget(db, step)
            open_groups = [[group.id, group.env, group.example] for group in record.state.open_groups] if record else []
            sizes = record.state.sizes if record else {}
            db.execute(
                "INSERT INTO batches VALUES (?, ?, ?, ?, ?)",
                (step, file, trouble, json.dumps(open_groups), json.dumps(sizes)),
            )
            if record:
                _insert(db, record)
            db.commit()

    # reading

    def steps(self) -> list[int]:
        return [step for (step,) in self.ask("SELECT step FROM batches ORDER BY step")]

    def troubles(self) -> dict[int, str]:
        return dict(self.ask("SELECT step, trouble FROM batches WHERE trouble != '' ORDER BY step"))

    def search(
        self, query: Query, *, sort: str = "step", backwards: bool = False, limit: int = 50, offset: int = 0
    ) -> Found:
        """What has no value comes last, either way round."""
        assert sort in SORTS, sort
        tables = "rollouts JOIN texts USING (id)" if query.needs_text else "rollouts"
        where = f"FROM {tables} WHERE {query.condition}"
        total = self.ask(f"SELECT count(*) {where}", query.values)[0][0]
        direction = "DESC" if backwards else "ASC"
        chosen = (
            f"SELECT id {where} ORDER BY {sort} IS NULL, {sort} {direction}, step {direction}, number "
            f"LIMIT {int(limit)} OFFSET {int(offset)}"
        )
        ids = [id for (id,) in self.ask(chosen, query.values)]
        cut = self.ask("SELECT count(*) FROM rollouts WHERE cut")[0][0] if query.needs_text else 0
        return Found(self._rows(ids), total, cut)

    def _rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """In the order of `ids`."""
        marks = ",".join("?" * len(ids))
        columns = "rollouts.*, question, said"
        with self._connected() as db:
            cursor = db.execute(f"SELECT {columns} FROM rollouts JOIN texts USING (id) WHERE id IN ({marks})", ids)
            names = [column[0] for column in cursor.description]
            found = {row[0]: dict(zip(names, row, strict=True)) for row in cursor}
        return [found[id] for id in ids if id in found]

    def names(self, column: str) -> list[str]:
        """What there is of `env`, `stop` or `fate`."""
        assert column in ("env", "stop", "fate"), column
        return [name for (name,) in self.ask(f"SELECT DISTINCT {column} FROM rollouts WHERE {column} != '' ORDER BY 1")]

    def ask(self, sql: str, values: Iterable[Any] = ()) -> list[Any]:
        """Raises: sqlite3.DatabaseError where the table is just made anew."""
        with self._connected() as db:
            return db.execute(sql, tuple(values)).fetchall()

    def _connected(self) -> Any:
        return _Lent(self._kept) if self._kept else closing(_open(self.file))


class _Lent:
    """A connection that stays open."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> sqlite3.Connection:
        return self._db

    def __exit__(self, *_: object) -> None:
        pass


def _open(file: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(file, timeout=BUSY_S, check_same_thread=False)
    db.execute("PRAGMA synchronous = OFF")  # what a crash tears is made anew
    db.create_function("lowered", 1, lambda text: text.lower() if isinstance(text, str) else text, deterministic=True)
    return db


def _is_usable(file: Path) -> bool:
    if not file.exists():
        return False
    try:
        with closing(_open(file)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            return version == FORMAT and db.execute("SELECT count(*) FROM batches").fetchone() is not None
    except sqlite3.DatabaseError:
        return False


# batches


def name_of(step: int) -> str:
    return f"batch_{step:06d}.msgpack"


def list_batches(journal: Path, only: int | None = None) -> dict[int, str]:
    """What identifies the file of each batch: one that a run has written anew is another."""
    if only is not None:
        with suppress(OSError):
            return {only: _identity((journal / name_of(only)).stat())}
        return {}
    found = {}
    for step in find_batches(journal):
        with suppress(OSError):
            found[step] = _identity((journal / name_of(step)).stat())
    return found


def find_batches(journal: Path) -> list[int]:
    """Their steps, in order; by the names of files alone."""
    try:
        names = [name for name in os.listdir(journal) if name.startswith("batch_") and name.endswith(".msgpack")]
    except OSError:
        return []
    numbers = (name.removeprefix("batch_").removesuffix(".msgpack") for name in names)
    return sorted(int(number) for number in numbers if number.isdigit())


def _identity(stat: os.stat_result) -> str:
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


def _forget(db: sqlite3.Connection, step: int) -> None:
    db.execute("DELETE FROM texts WHERE id IN (SELECT id FROM rollouts WHERE step = ?)", (step,))
    for table in ("rollouts", "groups", "batches"):
        db.execute(f"DELETE FROM {table} WHERE step = ?", (step,))


def _insert(db: sqlite3.Connection, record: BatchRecord) -> None:
    lines = [*_trained_lines(record), *_dropped_lines(record)]
    first = db.execute("SELECT COALESCE(max(id), 0) + 1 FROM rollouts").fetchone()[0]
    rollouts = [(first + number, *line[0]) for number, line in enumerate(lines)]
    texts = [(first + number, *line[1]) for number, line in enumerate(lines)]
    db.executemany(f"INSERT INTO rollouts VALUES ({_marks(19)})", rollouts)
    db.executemany("INSERT INTO texts VALUES (?, ?, ?, ?)", texts)
    db.executemany(f"INSERT INTO groups VALUES ({_marks(12)})", _group_lines(record))


def _marks(count: int) -> str:
    return ", ".join("?" * count)


Line = tuple[tuple[Any, ...], tuple[str, str, str]]


def _trained_lines(record: BatchRecord) -> Iterator[Line]:
    for number, rollout in enumerate(record.rollouts):
        row = row_of(number, rollout)
        fate = MASKED if rollout.masked else TRAINED
        yield _line(record.step, row, rollout, fate, rollout.masked or "", record_of_rollout(row, rollout).text)


def _dropped_lines(record: BatchRecord) -> Iterator[Line]:
    for number, dropped in enumerate(record.dropped, len(record.rollouts)):
        row = dropped_row_of(number, dropped)
        yield _line(record.step, row, dropped, DROPPED, kind_of(dropped.reason), dropped.reason)


def _line(step: int, row: Row, said: Rollout | Dropped, fate: str, kind: str, text: str) -> Line:
    lower, is_cut = _shortened(text.lower())
    head = (step, row.number, said.group, said.place, said.attempt, row.env, said.example, fate, kind)
    numbers = (row.reward, row.advantage, row.tokens, row.turns, row.truncated)
    return (
        (*head, *numbers, row.stop, row.error, row.flaws, is_cut),
        (row.question, row.said, lower),
    )


def _shortened(text: str) -> tuple[str, bool]:
    half = MOST_TEXT // 2
    return (text, False) if len(text) <= MOST_TEXT else (f"{text[:half]}\n{text[-half:]}", True)


def _group_lines(record: BatchRecord) -> Iterator[tuple[Any, ...]]:
    trained: dict[int, list[Rollout]] = {}
    dropped: dict[int, list[Dropped]] = {}
    for rollout in record.rollouts:
        trained.setdefault(rollout.group, []).append(rollout)
    for fate in record.dropped:
        dropped.setdefault(fate.group, []).append(fate)
    for group in trained.keys() | dropped.keys():
        yield (record.step, group, *_group_line(trained.get(group, []), dropped.get(group, [])))


def _group_line(trained: list[Rollout], dropped: list[Dropped]) -> tuple[Any, ...]:
    one = (trained or dropped)[0]
    rewards = [rollout.reward for rollout in trained]
    ends = (fmean(rewards), min(rewards), max(rewards)) if rewards else (None, None, None)
    masked = sum(rollout.masked is not None for rollout in trained)
    kinds = Counter(kind_of(fate.reason) for fate in dropped).most_common(3)
    counts = (len(trained) - masked, masked, len(dropped))
    return one.env, one.example, TRAINED if trained else DROPPED, *counts, *ends, ", ".join(kind for kind, _ in kinds)
