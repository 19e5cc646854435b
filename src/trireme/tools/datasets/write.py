"""`trireme rollouts RUN --to trl`: write data sets of a run, each folder whole or not at all, one batch in memory."""

from __future__ import annotations

import json
import os
import shutil
from argparse import ArgumentParser, ArgumentTypeError
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, replace_folder, require_new_folder, sync_folder
from trireme.journal.pictures import PictureFiles, to_data_uri
from trireme.journal.records import Rollout
from trireme.tools.datasets.tables import TABLES, MessageKeys, Table
from trireme.tools.run_reader import RunReader


def command(argv: list[str]) -> int:
    """Return 0 when all files are complete and on disk.

    Raises: ConfigError if there is nothing to write; OSError without room; JournalCorrupt if a batch is damaged.
    """
    parser = ArgumentParser(
        prog="trireme rollouts",
        description="Writes the rollouts that a run was trained on, from its journal: `trl` and `verl` as the data "
        "sets that those trainers read, `parquet` and `jsonl` with everything. The run may still be training.",
        epilog="Exit codes: 0 all is on disk, 2 there is nothing to write or no room for it, 3 the journal is "
        "damaged. docs/leaving.md has the columns, and how to load them.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder")
    add("--to", choices=TABLES, required=True, help="the format")
    add("--output", "--out", metavar="FOLDER", type=Path, help="default: RUN/rollouts/trl and so on")
    add("--steps", metavar="A:B", type=_steps, help="steps A to B - 1; either may be left out")
    add("--no-tokens", action="store_true", help="jsonl, parquet: messages and rewards only")
    arguments = parser.parse_args(argv)
    folder = arguments.output or RunPaths(arguments.run).root / "rollouts" / arguments.to

    written = write_sets(arguments.run, arguments.to, folder, steps=arguments.steps, tokens=not arguments.no_tokens)
    for path, count in written.items():
        print(f"{count:8}  {path}")
    return 0


def _steps(text: str) -> range:
    first, colon, last = text.partition(":")
    if not all(part.isdigit() or part == "" for part in (first, last)) or not (first or last):
        raise ArgumentTypeError(f"{text!r} is no range of steps: expected A:B such as 0:20, or one step")
    if not colon:
        return range(int(first), int(first) + 1)
    return range(int(first or 0), int(last) if last else 10**12)


def write_sets(run: Path, kind: str, folder: Path, *, steps: range | None, tokens: bool = True) -> dict[Path, int]:
    """Write the files of a data set, and return them with the number of their rows.

    Args:
        kind: a key of `TABLES`.
        steps: None for all.
        tokens: whether `parquet` and `jsonl` have samples.

    Raises:
        ConfigError: There is nothing to write, or the folder is not empty.
        JournalCorrupt: A batch is damaged or missing.
    """
    require_new_folder(folder, "--output")

    reader = RunReader(run)
    journal, present = reader.journal, reader.journal.steps()
    if not present:
        raise ConfigError(
            f"{journal.path(0).parent} holds no batch. Expected the folder of an `rl` run that has trained. "
            "Check the path; evaluations have files of their own, which are JSON lines already."
        )
    # listed once: a run that is still running has more batches the second time
    wanted = journal.require_all(steps, ways_out="Or write what comes before and after it, with `--steps`.")
    if not wanted:
        raise ConfigError(
            f"The run has steps {present[0]} to {present[-1]}, and none of them was asked for. Change `--steps`."
        )
    # a first pass over all rollouts, as a file's columns must be known before its first row
    keys = MessageKeys(set(), set())
    for step in wanted:
        for rollout in journal.read(step).rollouts:
            keys.add(rollout)

    pictures = reader.pictures if keys.has_pictures else None
    # the data set appears under its own name only when it is whole
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        kind_of_file = JsonLines if kind == "jsonl" else Parquet
        tables = TABLES[kind] if tokens else tuple(table.without("samples") for table in TABLES[kind])
        with ExitStack() as stack:
            files = [stack.enter_context(kind_of_file(partial, table, keys)) for table in tables]
            for step in wanted:
                rollouts = journal.read(step).rollouts
                for file in files:
                    file.add(step, rollouts, pictures)

        sync_folder(partial)
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

    return {folder / file.path.name: file.num_rows for file in files}


class Parquet:
    """A file of columns. It leaves out rows that were written before, if its table has each thing once."""

    suffix = ".parquet"

    def __init__(self, folder: Path, table: Table, keys: MessageKeys) -> None:
        self.path = folder / f"{table.name}{self.suffix}"
        self.num_rows = 0
        self._table = table
        self._schema = table.schema(keys)
        self._seen: set[str] = set()

    def __enter__(self) -> Parquet:
        self._file: Any = parquet.ParquetWriter(self.path, self._schema, compression="zstd")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def add(self, step: int, rollouts: list[Rollout], pictures: PictureFiles | None) -> None:
        rows = []
        for row in self._table.rows(step, rollouts, pictures):
            # `once` keeps the first row of each key: an example has the same prompt in every epoch
            key = json.dumps([row[name] for name in self._table.once])
            if not self._table.once or key not in self._seen:
                self._seen.add(key)
                rows.append(row)
        self.num_rows += len(rows)
        self.write(rows)

    def write(self, rows: list[dict[str, Any]]) -> None:
        self._file.write_table(pa.Table.from_pylist(rows, schema=self._schema))


class JsonLines(Parquet):
    """A file of JSON objects. Metrics are an object here, which columns cannot have, and pictures are data URIs."""

    suffix = ".jsonl"

    def __enter__(self) -> Parquet:
        self._file = open(self.path, "w", encoding="utf-8")
        return self

    def write(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["metrics"] = {metric["name"]: metric["value"] for metric in row["metrics"]}
            if "images" in row:
                row["images"] = [to_data_uri(image["bytes"]) for image in row["images"]]
            self._file.write(json.dumps(row, default=np.ndarray.tolist) + "\n")
