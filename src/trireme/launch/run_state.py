"""The state of a run as seen from outside: the orchestrator's `/status`, and the files in the run folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trireme.base.paths import RunPaths
from trireme.base.token import read_key
from trireme.config.files import find_run_file, read_run
from trireme.config.run import RunConfig
from trireme.journal.manifest import complete_steps
from trireme.launch.folder import launcher_of
from trireme.monitor.liveness import ask_status, status_address
from trireme.monitor.metrics import read_metrics
from trireme.monitor.progress import Progress, Status
from trireme.monitor.run_text import evaluation_text, step_line, warning_text
from trireme.monitor.spans import read_spans
from trireme.monitor.timeline import time_lines

ANSWER_S = 5.0


@dataclass(frozen=True)
class RunState:
    """The state of a run at one moment."""

    config: RunConfig
    paths: RunPaths  # where the folder is now; it may have been moved
    progress: Progress
    status: Status | None  # None where the orchestrator does not answer
    checkpoints: list[int]
    launcher: int | None  # pid, where it runs on this machine

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


def look_at(run: Path, *, token: str | None = None, address: str | None = None) -> RunState:
    """Return the state of the run in a folder.

    Args:
        token: the token of a submission, where the run's folder has no key.
        address: the orchestrator's machine, where the run's configuration does not name it.

    Raises: ConfigError where the folder holds no run.
    """
    config = read_run(RunConfig, find_run_file(run, "orchestrator"))
    paths = RunPaths(run)
    progress = Progress(config.max_steps)
    progress.add(read_metrics(paths.metrics)[0])
    server = config.orchestrator.server
    where = status_address(address or server.host, server.port, config.hosts.orchestrator)
    return RunState(
        config=config,
        paths=paths,
        progress=progress,
        status=ask_status(where, run, token or read_key(run), timeout_s=ANSWER_S),
        checkpoints=complete_steps(paths.checkpoints),
        launcher=launcher_of(paths),
    )
