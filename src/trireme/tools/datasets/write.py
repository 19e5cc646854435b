"""Writes the data sets: whole or not at all, with one batch in memory."""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from trireme.base.errors import ConfigError
from trireme.base.paths import replace_folder, sync_folder
from trireme.journal.records import Rollout
from trireme.tools.datasets.chosen import Chosen, batches, steps_of
from trireme.tools.datasets.messages import MessageTypes, message_types, optional_keys
from trireme.tools.datasets.tables import TABLES, Options, Rows, Table

Batches = Iterable[tuple[int, list[Rollout]]]


def write_sets(run: Path, kind: str, folder: Path, *, chosen: Chosen, options: Options) -> dict[Path, int]:
    """Returns the files with how many rows each has.

    Raises:
        ConfigError: there is nothing to write, or something lies where it is to be.
        JournalCorrupt: a batch is not what was written.
    """
    _require_nothing_at(folder)
    steps = steps_of(run, chosen)  # once: a run that goes on has more the second time
    types, found = _look_through(batches(run, steps, chosen))
    if not found:
        raise ConfigError(
            f"No rollout of {run} is as asked for: {chosen} - expected one at least. Ask for others, or for all."
        )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        files = [FILES[kind](partial, table, types) for table in TABLES[kind]]
        _write_all(files, batches(run, steps, chosen), options)
        sync_folder(partial)
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {folder / file.path.name: file.count for file in files}


def _require_nothing_at(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is not empty - expected a folder that is, or is not there. Set `--output` to another."
        )


def _look_through(found: Batches) -> tuple[MessageTypes, int]:
    """What messages are, and how many rollouts there are: columns must be known before the first row."""
    prompt: set[str] = set()
    completion: set[str] = set()
    count = 0
    for _, rollouts in found:
        prompt |= optional_keys(message for rollout in rollouts for message in rollout.prompt)
        completion |= optional_keys(message for rollout in rollouts for message in rollout.completion)
        count += len(rollouts)
    return message_types(prompt, completion), count


def _write_all(files: Sequence[RowFile], found: Batches, options: Options) -> None:
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(file)
        for step, rollouts in found:
            for file in files:
                file.write(file.new(file.table.rows(step, rollouts, options)))


class RowFile(ABC):
    """Leaves out what was written before, where the table has each thing once. Closed, it is on disk."""

    suffix: ClassVar[str]

    def __init__(self, folder: Path, table: Table, types: MessageTypes) -> None:
        self.table = table
        self.path = folder / f"{table.name}{self.suffix}"
        self.count = 0
        self.schema = table.schema(types)
        self._seen: set[str] = set()

    def __enter__(self) -> RowFile:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def new(self, rows: Rows) -> Rows:
        for row in rows:
            key = json.dumps([row[name] for name in self.table.once])
            if not self.table.once or key not in self._seen:
                self._seen.add(key)
                self.count += 1
                yield row

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def write(self, rows: Rows) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Parquet(RowFile):
    suffix = ".parquet"

    def open(self) -> None:
        self._writer = parquet.ParquetWriter(self.path, self.schema, compression="zstd")

    def write(self, rows: Rows) -> None:
        self._writer.write_table(pa.Table.from_pylist(list(rows), schema=self.schema))

    def close(self) -> None:
        self._writer.close()


class JsonLines(RowFile):
    """Metrics are an object here, which columns cannot have."""

    suffix = ".jsonl"

    def open(self) -> None:
        self.path.touch()

    def write(self, rows: Rows) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            for row in rows:
                metrics = {metric["name"]: metric["value"] for metric in row["metrics"]}
                file.write(json.dumps(row | {"metrics": metrics}, default=_plain) + "\n")

    def close(self) -> None:
        """Every batch was written whole."""


FILES: dict[str, type[RowFile]] = {"trl": Parquet, "verl": Parquet, "parquet": Parquet, "jsonl": JsonLines}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"cannot write a {type(value)}")
