"""How a run stands, as far as it can be told from outside: its orchestrator's answer, and what lies on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from trireme.base.paths import RunPaths
from trireme.base.token import bearer, read_key
from trireme.config.files import find_run_file, read_run
from trireme.config.run import RunConfig
from trireme.journal.manifest import complete_steps
from trireme.launch.folder import launcher_of
from trireme.monitor.in_words import evaluation_text, step_line, warning_text
from trireme.monitor.lanes import time_lines
from trireme.monitor.metrics import read_metrics
from trireme.monitor.progress import Progress, Status
from trireme.monitor.spans import read_spans

ANSWER_S = 5.0
ANYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class Standing:
    """One look at a run."""

    config: RunConfig
    paths: RunPaths  # the folder may have been moved since
    progress: Progress
    status: Status | None  # None where the orchestrator does not answer
    checkpoints: list[int]
    launcher: int | None  # pid, where it is of this machine

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
            return f"coming up, or going down (process {self.launcher}); {done}"
        if self.progress.num_done >= self.config.max_steps:
            return f"finished; {done}"
        return f"its orchestrator does not answer here; {done}"


def look_at(run: Path, *, token: str | None = None, address: str | None = None) -> Standing:
    """
    Args:
        token: of a submission, where the run's folder has no key.
        address: of the orchestrator's machine, where the run's own configuration does not know it.

    Raises: ConfigError where the folder is not a run's.
    """
    config = read_run(RunConfig, find_run_file(run, "orchestrator"))
    paths = RunPaths(run)
    progress = Progress(config.max_steps)
    progress.add(read_metrics(paths.metrics)[0])
    return Standing(
        config=config,
        paths=paths,
        progress=progress,
        status=_ask(config, paths, token, address),
        checkpoints=complete_steps(paths.checkpoints),
        launcher=launcher_of(paths),
    )


def _ask(config: RunConfig, paths: RunPaths, token: str | None, address: str | None) -> Status | None:
    """The port may be another run's by now: an answer counts where it is about this folder."""
    bound = config.orchestrator.server
    host = address or (config.hosts.orchestrator if bound.host in ANYWHERE else bound.host)
    url = f"http://{host}:{bound.port or 8001}/status"
    try:
        answer = httpx.get(
            url, headers=bearer(token or read_key(paths.root)), timeout=ANSWER_S, trust_env=False
        ).raise_for_status()
        status = msgspec.json.decode(answer.content, type=Status)
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, RecursionError):
        return None
    return status if _is_about(status, paths) else None


def _is_about(status: Status, paths: RunPaths) -> bool:
    """By its name alone where the run was started from another folder."""
    answered = Path(status.run)
    if answered.is_absolute():
        return os.path.realpath(answered) == os.path.realpath(paths.root)
    return answered.name == paths.root.resolve().name
