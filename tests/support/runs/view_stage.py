"""A run whose rows of metrics are written by hand, and what its view then shows."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from trireme.config.run import RunConfig
from trireme.monitor.progress import ProcessState
from trireme.monitor.status import StatusPoller
from trireme.monitor.view import LiveView, View

NUMBERS = {"loss": 0.0123, "grad_norm": 0.812, "mismatch_kl": 3e-7, "policy/entropy": 1.25, "importance_ratio": 1.02}


class Stage:
    def __init__(self, folder: Path, **values: Any) -> None:
        self.config = RunConfig.model_validate({"output_dir": str(folder), "name": "demo", "max_steps": 200} | values)
        self.config.paths.logs.mkdir(parents=True)
        self.poller = StatusPoller("http://nobody.invalid", folder)  # never started: `latest` is set by hand
        self.now = 0.0
        self.out = io.StringIO()
        names = ("inference", "orchestrator", "trainer")
        self.processes = [ProcessState(name, "running", self.config.paths.log(name)) for name in names]

    def open(self, kind: type[View] = View) -> View:
        console = Console(file=self.out, force_terminal=kind is LiveView, width=140, height=60)
        self.view = kind(self.config, self.poller, console, clock=lambda: self.now)
        return self.view

    def look(self, *, after_s: float = 1.0) -> str:
        """Return what the view shows after so long."""
        self.now += after_s
        self.out.seek(0)
        self.out.truncate()
        self.view.tick(self.processes)
        return self.out.getvalue()

    def report(self, step: int, process: str, time_s: float = 0.0, **metrics: float) -> None:
        with open(self.config.paths.metrics, "a") as file:
            file.write(json.dumps({"step": step, "process": process, "time_s": time_s} | metrics) + "\n")

    def train(self, step: int, *, reward: float = 0.5, pace_s: float = 1.0) -> None:
        self.report(step, "orchestrator", **{"reward/mean": reward, "lag/mean": 0.9})
        self.report(step, "trainer", step * pace_s, **NUMBERS, **{"perf/tokens_per_s": 12345.0})
