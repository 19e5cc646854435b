"""The state of a run as seen from outside: the orchestrator's `/status`, and the files in the run folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trireme.base.network import url_of
from trireme.base.paths import RunPaths
from trireme.config.files import find_run_file, read_run
from trireme.config.run import RunConfig
from trireme.journal.manifest import complete_steps
from trireme.launch.folder import launcher_of
from trireme.monitor.metrics import read_in_pieces
from trireme.monitor.progress import Progress, Status
from trireme.monitor.run_text import evaluation_text, step_line, warning_text
from trireme.monitor.spans import read_spans
from trireme.monitor.timeline import time_lines
from trireme.monitor.view import fetch_status

ANSWER_S = 5.0


@dataclass(frozen=True)
class RunState:
    """The state of a run at one moment."""

    config: RunConfig
    paths: RunPaths  # the folder's present place; it may have been moved
    progress: Progress
    status: Status | None  # None if the orchestrator does not answer
    checkpoints: list[int]
    launcher: int | None  # pid, if it runs on this machine

    def lines(self) -> Iterator[str]:
        yield f"run          {self.paths.root}"
        yield f"state        {self._state()}"
        if step := self.progress.recent(1):
            yield f"newest       {' '.join(step_line(self.progress, step[0], self.status).split())}"
        if ends := self.progress.reward_ends():
            yield f"reward       {ends.first:.3f} -> {ends.last:.3f} (mean of {ends})"
        yield from (f"held out     {evaluation_text(found)}" for found in self.progress.evaluations()[-3:])
        if self.checkpoints:
            yield f"checkpoints  {', '.join(f'step_{step}' for step in self.checkpoints[-5:])}"
        if self.status:
            yield from (f"engine       {engine.url} {engine.state}" for engine in self.status.engines)
            yield from (f"waits        {wait.text}" for wait in self.status.waits)
        yield from (f"time         {line}" for line in time_lines(read_spans(self.paths.spans)[0]))
        yield from (warning_text(warned) for warned in self.progress.lasting_warnings)

    def _state(self) -> str:
        done = f"{self.progress.num_done} of {self.config.max_steps} steps are trained"
        if self.status:
            return f"{self.status.state}, version {self.status.version}; {done}"
        if self.launcher:
            return f"starting or stopping (process {self.launcher}); {done}"
        if self.progress.num_done >= self.config.max_steps:
            return f"finished; {done}"
        return f"not running here (its orchestrator does not answer); {done}"


def look_at(run: Path) -> RunState:
    """Return the state of the run in a folder.

    Raises: ConfigError if the folder holds no run.
    """
    config = read_run(RunConfig, find_run_file(run, "orchestrator"))
    paths = RunPaths(run)
    progress = Progress(config.max_steps)
    for rows, _ in read_in_pieces(paths.metrics):
        progress.add(rows)

    server = config.orchestrator.server
    where = url_of(server.host, server.port or 8001, known=config.hosts.orchestrator)
    return RunState(
        config=config,
        paths=paths,
        progress=progress,
        status=ask_status(where, run, timeout_s=ANSWER_S),
        checkpoints=complete_steps(paths.checkpoints),
        launcher=launcher_of(paths),
    )


def ask_status(url: str, folder: Path, *, timeout_s: float) -> Status | None:
    """Return the answer, or None if there is none, or if it is about another run than the one in `folder`.

    The port may be another run's by now. A run that was started with a relative path is compared by its name alone.
    """
    status = fetch_status(url, folder, timeout_s=timeout_s)
    if status is None:
        return None

    # The answer names its run, because another run may have taken the port since.
    run = Path(status.run)
    if run.is_absolute():
        return status if os.path.realpath(run) == os.path.realpath(folder) else None
    return status if run.name == folder.resolve().name else None
