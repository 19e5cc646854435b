"""Runs on disk, as the dashboard sees them: found by the names of their files, read as they grow.

Nothing here is asked of a run but its `/status`, and nothing is written into its folder. `refresh` reads files and may
wait for an answer: it is called in a thread. Everything else answers from memory.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from trireme.base.paths import RunPaths
from trireme.monitor.metrics import Row, read_metrics
from trireme.monitor.progress import Status
from trireme.tools.dashboard.columns import Columns
from trireme.tools.dashboard.lane_view import SpanStore
from trireme.tools.dashboard.pulse import ask_status, launcher_of
from trireme.tools.dashboard.signs import Signs

AGAIN_S = 1.0  # between two looks at the files of a run
SEARCH_S = 5.0  # between two searches for runs
FRESH_S = 120.0  # a run of another machine that wrote so lately is taken for alive
DEPTH = 4  # of folders below the one that was asked for
CONFIGS = ("run.json", "orchestrator.json", "trainer.json", "inference.json", "sft.json")
PASSED_BY = {"checkpoints", "weights", "broadcast", "logs", "journal", "evals", "data", "wandb", "node_modules"}
"""Folders that hold no runs, and may hold very much else."""


class RunFolder:
    """One run. What cannot be read now is as if it were not there yet."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name  # below what was asked for; unique in the library
        self.paths = RunPaths(path)
        self.columns = Columns()
        self.generation = 0  # grows with every change of what is known
        self._offset = 0
        self._file: tuple[int, int] | None = None  # device and inode of the metrics
        self._config: dict[str, Any] = {}
        self._config_of: tuple[Path, int] | None = None
        self._status: Status | None = None
        self._launcher: int | None = None
        self._looked = -AGAIN_S
        self._lock = threading.Lock()

    def config(self) -> dict[str, Any]:
        """As it was resolved and written; empty where there is none."""
        return self._config

    def setting(self, key: str, default: Any = None) -> Any:
        """`orchestrator.batch_size` of the configuration."""
        value: Any = self._config
        for word in key.split("."):
            if not isinstance(value, dict) or word not in value:
                return default
            value = value[word]
        return value

    def rows(self) -> list[Row]:
        """One for each step, of all processes."""
        return [{"step": step} | self.columns.row(step) for step in self.columns.steps()]

    def status(self) -> Status | None:
        """What the orchestrator says; None where it does not answer."""
        return self._status

    def is_live(self) -> bool:
        return self._status is not None or self._launcher is not None

    @property
    def max_steps(self) -> int | None:
        steps = self.setting("max_steps")
        return steps if isinstance(steps, int) else None

    @property
    def num_done(self) -> int:
        """Steps that are trained."""
        newest = self.columns.newest_step()
        return 0 if newest is None else newest + 1

    def state(self) -> str:
        """ "running", "starting", "finished", "stopped", "not started", or what the orchestrator calls it."""
        if self._status is not None:
            return self._status.state
        if self._launcher is not None:
            return "starting" if not self.num_done else "running"
        if not self.path.is_dir():
            return "not there yet"
        if self.max_steps is not None and self.num_done >= self.max_steps:
            return "finished"
        return "stopped" if self.num_done else "not started"

    @cached_property
    def signs(self) -> Signs:
        """Warnings; read when a page asks for them, once for all who look."""
        return Signs(self.paths.metrics)

    @cached_property
    def spans(self) -> SpanStore:
        """Lanes; likewise."""
        return SpanStore(self.paths.spans)

    def refresh(self) -> bool:
        """Reads what is new, at most once in `AGAIN_S`; whether anything is."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < AGAIN_S:
                return False
            changed = self._read_config() | self._read_metrics() | self._feel_pulse()
            self._looked = time.monotonic()
            self.generation += changed
            return changed

    def _read_config(self) -> bool:
        file = _newest(self.paths.configs / name for name in CONFIGS)
        if file is None or file == self._config_of:
            return False
        try:
            read = json.loads(file[0].read_bytes())
        except (OSError, ValueError, RecursionError):
            return False
        self._config, self._config_of = read if isinstance(read, dict) else {}, file
        return True

    def _read_metrics(self) -> bool:
        if (file := _identity(self.paths.metrics)) != self._file:
            changed, self._file = self._file is not None, file  # an earlier run was moved aside, and another began
            self.columns, self._offset = Columns(), 0
            self.__dict__.pop("signs", None)
            self.__dict__.pop("spans", None)
        else:
            changed = False
        rows, offset = read_metrics(self.paths.metrics, self._offset)
        if offset < self._offset:
            self.columns = Columns()
        self._offset = offset
        self.columns.add(rows)
        return changed or bool(rows)

    def _feel_pulse(self) -> bool:
        before = self._status, self._launcher
        self._launcher = launcher_of(self.paths)
        may_answer = bool(self._config) and (self._launcher is not None or _age_s(self.paths.metrics) < FRESH_S)
        self._status = ask_status(self._config, self.path) if may_answer else None
        return (self._status, self._launcher) != before


def _newest(files: Iterator[Path]) -> tuple[Path, int] | None:
    found = []
    for file in files:
        try:
            found.append((file, file.stat().st_mtime_ns))
        except OSError:
            continue
    return max(found, key=lambda item: item[1], default=None)


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _age_s(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return float("inf")


class Library:
    """All runs in the folders that were asked for; those who look share it."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(os.path.abspath(root)) for root in roots]
        self._runs: dict[Path, RunFolder] = {}
        self._searched = -SEARCH_S
        self._lock = threading.Lock()

    def runs(self) -> list[RunFolder]:
        """Newest first."""
        return list(self._runs.values())

    def named(self, name: str) -> RunFolder | None:
        return next((run for run in self.runs() if run.name == name), None)

    def search(self) -> bool:
        """Looks for runs, at most once in `SEARCH_S`; whether there are others than before."""
        with self._lock:
            if time.monotonic() - self._searched < SEARCH_S:
                return False
            before = list(self._runs)
            found = sorted(set(self._find()), key=_changed_at, reverse=True)
            names = _names(found, self.roots)
            self._runs = {path: self._runs.get(path) or RunFolder(path, names[path]) for path in found}
            for path, run in self._runs.items():
                run.name = names[path]
            self._searched = time.monotonic()
            return list(self._runs) != before

    def _find(self) -> Iterator[Path]:
        """What was asked for by name is there from the beginning, even where its folder is yet to come."""
        for root in self.roots:
            found = list(find_runs(root))
            yield from found or ([] if root.is_dir() and any(root.iterdir()) else [root])


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Folders of runs, at and below one."""
    if is_run(folder):
        yield folder
    if depth:
        for below in _folders(folder):
            yield from find_runs(below, depth - 1)


def is_run(folder: Path) -> bool:
    """By what only a run that was started has: a plan alone (`--dry-run`) is none."""
    return any((folder / name).exists() for name in ("metrics.jsonl", "journal", ".launcher"))


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if entry.name not in PASSED_BY and not entry.name.startswith(".") and entry.is_dir()
            )
    except OSError:
        return []


def _changed_at(run: Path) -> float:
    return -min(_age_s(run / "metrics.jsonl"), _age_s(run / "configs"), _age_s(run))


def _names(runs: Sequence[Path], roots: Sequence[Path]) -> dict[Path, str]:
    """The shortest ends of the paths that tell them apart; of `outputs/a` and `outputs/b`, `a` and `b`."""
    names = {run: run.name for run in runs}
    for length in range(2, max((len(run.parts) for run in runs), default=0) + 1):
        taken = list(names.values())
        clashing = [run for run, name in names.items() if taken.count(name) > 1]
        if not clashing:
            break
        names |= {run: str(Path(*run.parts[-length:])) for run in clashing}
    return names


@dataclass
class RunSet:
    """What one who looks has chosen, and where they are."""

    library: Library
    chosen: list[RunFolder]  # the first is what pages about a single run show
    query: Mapping[str, str] = field(default_factory=dict)  # of the page's address, without its runs
    watchers: list[Callable[[], Any]] = field(default_factory=list)

    @property
    def main(self) -> RunFolder | None:
        return self.chosen[0] if self.chosen else None

    def link(self, page: str, **query: Any) -> str:
        """The address of a page about the same runs: `runs.link("/tokens", step=12, rollout=3)`."""
        chosen = [("run", run.name) for run in self.chosen]
        return f"{page}?{urlencode(chosen + [(key, value) for key, value in query.items() if value is not None])}"

    def watch(self, redraw: Callable[[], Any]) -> None:
        """Calls it (and awaits it) after anything new was read, for as long as the page is open."""
        self.watchers.append(redraw)

    def refresh(self) -> bool:
        """Blocks: call it in a thread. Whether anything is new."""
        fresh = [run.refresh() for run in self.chosen]
        return any(fresh)
