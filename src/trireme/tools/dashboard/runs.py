"""Runs on disk: found by the names of their files, read as they grow.

A run is asked for nothing but its `/status`, none of its code is run, and nothing is written into its folder. `refresh`
and `search` read files and may wait for an answer, so they are called in a thread. Everything else answers from memory.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from trireme.base.network import url_of
from trireme.launch.folder import launcher_of
from trireme.monitor.collapse import Warned, Watch
from trireme.monitor.status import Status, ask_status
from trireme.tools.dashboard.history import READ_S, Metrics, Spans
from trireme.tools.rollouts import identity_of
from trireme.tools.run_reader import RunReader

REFRESH_S = 1.0  # at least, between two reads of the files of a run
SEARCH_S = 5.0  # at least, between two searches for runs
FRESH_S = 120.0  # a run of another machine that wrote so lately is asked for its status
ANSWER_S = 0.8
DEPTH = 4  # levels of folders below the one that was asked for
MOST_WARNINGS = 1000  # kept of a run
CONFIGS = ("run.json", "orchestrator.json", "trainer.json", "inference.json", "sft.json")
SKIPPED = {"checkpoints", "weights", "broadcast", "logs", "journal", "evals", "data", "wandb", "node_modules"}
"""Folders that hold no runs, and may hold very much else."""


class RunFolder(RunReader):
    """One run as it grows, with whether it is alive. Files that cannot be read now are treated as missing."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self.name = name  # unique in the library
        self.config: dict[str, Any] = {}  # resolved; empty if there is none
        self.status: Status | None = None  # None if the orchestrator does not answer
        self._config_file: tuple[int, Path] | None = None
        self._launcher: int | None = None
        self._refreshed_s = -REFRESH_S
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.metrics = Metrics()
        self.spans = Spans(self.paths.spans)  # read when a page shows them
        self._watch = Watch()

    @property
    def is_live(self) -> bool:
        return self.status is not None or self._launcher is not None

    @property
    def max_steps(self) -> int | None:
        steps = self.config.get("max_steps")
        return steps if isinstance(steps, int) else None

    @property
    def state(self) -> str:
        """ "running", "starting", "finished", "stopped", "not started", "not there yet", or the orchestrator's word."""
        if self.status is not None:
            return self.status.state
        if self._launcher is not None:
            return "running" if self.metrics.num_done else "starting"
        if not os.path.isdir(self.path):
            return "not there yet"
        if self.max_steps is not None and self.metrics.num_done >= self.max_steps:
            return "finished"
        return "stopped" if self.metrics.num_done else "not started"

    def warnings(self) -> list[tuple[Warned, bool]]:
        """Return the signs of a collapse in the metrics, each with whether it was seen lately: those first, then the
        newest.
        """
        lasting = set(self._watch.lasting.values())
        found = [(warned, warned in lasting) for warned in list(self._watch.warnings)]
        return sorted(found, key=lambda each: (not each[1], -each[0].step))

    def refresh(self) -> bool:
        """Read what is new, at most once in `REFRESH_S`. Return whether there was anything new."""
        # several browsers share a run, and each of them asks
        with self._lock:
            if time.monotonic() - self._refreshed_s < REFRESH_S:
                return False
            changed = self._read_config() | self._read_metrics() | self._check_liveness()
            self._refreshed_s = time.monotonic()
            return changed

    def _read_config(self) -> bool:
        # a launcher may have written several of them; the newest is of the newest start
        newest = max((_mtime_ns(path), path) for path in (self.paths.configs / name for name in CONFIGS))
        if newest[0] == 0 or newest == self._config_file:
            return False
        try:
            read = json.loads(newest[1].read_bytes())
        except (OSError, ValueError, RecursionError):
            return False
        self.config, self._config_file = read if isinstance(read, dict) else {}, newest
        return True

    def _read_metrics(self) -> bool:
        # a page is shown with what was read so far, and the next call reads on
        stop_s, changed = time.monotonic() + READ_S, False
        for rows, is_another_file in self.new_rows():
            if is_another_file:
                self._forget()
            changed = True
            self.metrics.add(rows)
            for row in rows:
                self._watch.take(row)
            # warnings of a very long run are bounded, too
            if len(self._watch.warnings) > 2 * MOST_WARNINGS:
                del self._watch.warnings[:-MOST_WARNINGS]
            if time.monotonic() > stop_s:
                break
        return changed

    def _check_liveness(self) -> bool:
        before = self.status, self._launcher
        try:
            self._launcher = launcher_of(self.paths)
        except OSError:
            self._launcher = None
        # the orchestrator of a run on another machine is asked only if the run wrote lately
        age_s = time.time() - _mtime_ns(self.paths.metrics) / 1e9
        may_answer = self.config and (self._launcher is not None or age_s < FRESH_S)
        self.status = status_of(self.config, self.path) if may_answer else None
        return (self.status, self._launcher) != before


def status_of(config: Mapping[str, Any], folder: Path) -> Status | None:
    """Ask the orchestrator of a run by its resolved configuration, with the key in the run's folder and no other."""

    def table(of: Any, key: str) -> dict[str, Any]:
        value = of.get(key)
        return value if isinstance(value, dict) else {}

    # the server is in `orchestrator`, or at the top of a configuration without that table
    server = table(table(config, "orchestrator"), "server") or table(config, "server")
    known = str(table(config, "hosts").get("orchestrator") or "")
    url = url_of(str(server.get("host") or "127.0.0.1"), server.get("port") or 8001, known=known)
    return ask_status(url, folder, timeout_s=ANSWER_S)


def _mtime_ns(path: Path) -> int:
    """Return when a file was written last; 0 if there is none."""
    identity = identity_of(path)
    return identity[2] if identity else 0


def changed_s(run: Path) -> float:
    """Return when a run wrote last, in unix seconds; 0 if it never did."""
    return (_mtime_ns(run / "metrics.jsonl") or _mtime_ns(run / "configs") or _mtime_ns(run)) / 1e9


class Library:
    """All runs in the folders that were asked for, shared by all browsers."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(os.path.abspath(root)) for root in roots]
        self._runs: dict[Path, RunFolder] = {}
        self._searched_s = -SEARCH_S
        self._lock = threading.Lock()

    def runs(self) -> list[RunFolder]:
        """Return them, the one that wrote last first."""
        return list(self._runs.values())

    def named(self, name: str) -> RunFolder | None:
        return next((run for run in self.runs() if run.name == name), None)

    def search(self) -> bool:
        """Look for runs, at most once in `SEARCH_S`. Return whether there are others than before."""
        with self._lock:
            if time.monotonic() - self._searched_s < SEARCH_S:
                return False
            before = list(self._runs)
            found = set()
            for root in self.roots:
                below, has_files = list(find_runs(root)), False
                with suppress(OSError):
                    has_files = any(root.iterdir())
                # A run that was asked for by name is listed before its folder exists.
                found |= set(below or ([] if has_files else [root]))

            names = _names(sorted(found, key=changed_s, reverse=True))
            self._runs = {path: self._runs.get(path) or RunFolder(path, name) for path, name in names.items()}
            for path, run in self._runs.items():
                run.name = names[path]
            self._searched_s = time.monotonic()
            return list(self._runs) != before


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the folders of runs at and below a folder. A plan alone (`--dry-run`) is no run.

    Folders that this user may not enter are skipped: `Path.exists` raises there, `os.path.exists` does not.
    """
    if any(os.path.exists(folder / name) for name in ("metrics.jsonl", "journal", ".launcher")):
        yield folder
    if depth:
        below: list[Path] = []
        with suppress(OSError), os.scandir(folder) as entries:
            names = (entry.name for entry in entries if entry.is_dir())
            below = [folder / name for name in names if name not in SKIPPED and not name.startswith(".")]
        for each in sorted(below):
            yield from find_runs(each, depth - 1)


def _names(runs: Sequence[Path]) -> dict[Path, str]:
    """Return the shortest unique ends of the paths: `a` and `b` for `outputs/a` and `outputs/b`."""
    names = {run: run.name for run in runs}
    for length in range(2, max((len(run.parts) for run in runs), default=0) + 1):
        taken = list(names.values())
        names |= {run: str(Path(*run.parts[-length:])) for run, name in names.items() if taken.count(name) > 1}
    return names


@dataclass
class RunSet:
    """The runs that one browser has chosen, and the page that it shows."""

    library: Library
    chosen: list[RunFolder]  # the first is the one that pages about a single run show
    query: Mapping[str, str] = field(default_factory=dict)  # query of the page's address, without its runs
    watchers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)  # called after anything new was read

    @property
    def main(self) -> RunFolder:
        """The first of them. There is one wherever a page is built."""
        assert self.chosen, "a page is built for at least one run"
        return self.chosen[0]

    def link(self, page: str, **query: Any) -> str:
        """Return the address of a page about the same runs: `runs.link("/tokens", step=12, rollout=3)`."""
        chosen = [("run", run.name) for run in self.chosen]
        return f"{page}?{urlencode(chosen + [(key, value) for key, value in query.items() if value is not None])}"

    def refresh(self) -> bool:
        """Read what is new of all of them. Return whether there was anything new. Blocks."""
        return max((run.refresh() for run in self.chosen), default=False)
