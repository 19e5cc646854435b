"""The lines of `vf-rl`: how a run is told to those who know that command. Also keeps its folders beside ours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from trireme.config.run import RunConfig
from trireme.monitor.checkpoint_folders import CheckpointFolders
from trireme.monitor.logs import startup_phase
from trireme.monitor.metrics import Row
from trireme.monitor.plain_view import PlainView
from trireme.monitor.progress import Evaluation
from trireme.monitor.samples import read_batch
from trireme.monitor.view import Clock, StatusPoller

STEP_NAMES = {"reward": "reward/mean", "entropy": "policy/entropy", "importance_ratio": "importance_ratio"}
TRAINER_NAMES = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}


class VfRlView(PlainView):
    """Plain lines, in a terminal too."""

    def __init__(
        self, config: RunConfig, poller: StatusPoller, console: Console, *, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(config, poller, console, clock=clock)
        self._folders = CheckpointFolders(config)
        self._coming_up = self._startup_lines()
        self._num_examples: int | None = None

    def show(self, *, final: bool) -> None:
        if not final or self.progress.num_session_steps:
            self._say_startup()
        super().show(final=final)
        for step in self._folders.write_due():
            self.say(f"Saved {self._folders.folder(step)}")

    def _say_startup(self) -> None:
        """Goes on until the next line would not be true yet."""
        for line in self._coming_up:
            if line is None:
                return
            self.say(line)

    def _startup_lines(self) -> Iterator[str | None]:
        """None as long as the next line is not true."""
        config = self.config
        yield f"Loading model {config.trainer.model.name}..."
        if config.device == "cpu":
            yield "No GPU is used: inference and training share the CPU."
        yield f"Starting vLLM server on port {config.inference.server.port}..."
        yield "Waiting for vLLM server to be ready..."
        while not self._is_ready():
            yield None
        yield "vLLM server is ready"
        for environment in config.orchestrator.env:
            yield f"Loading environment {environment.id}..."

    def _is_ready(self) -> bool:
        """What answers is ready, and so is what a step was sampled with: rows may be here before the next answer is."""
        engines = self.status.engines if self.status else ()
        logs = [process for process in self.processes if process.name == "inference"]
        return (
            self.progress.num_session_steps > 0
            or any(engine.state == "live" for engine in engines)
            or any(startup_phase(process.log, process.log_start) == "ready" for process in logs)
        )

    def step_text(self, step: int) -> str:
        row = self.progress.merged(step)
        numbers = {name: row.get(ours) for name, ours in STEP_NAMES.items()}
        shown = ", ".join(f"{name}={value:.2f}" for name, value in numbers.items() if value is not None)
        return f"{self._trainer_numbers(step, row)}\nStep {step + 1}/{self.config.max_steps}: {shown}"

    def _trainer_numbers(self, step: int, row: Row) -> dict[str, Any]:
        """A row of the trainer, as it is printed: `{'loss': 0.234, 'learning_rate': 1e-05, 'epoch': 0.01}`."""
        numbers = {name: _rounded(row[ours]) for name, ours in TRAINER_NAMES.items() if row.get(ours) is not None}
        epoch = self._epoch(step)
        return numbers | ({} if epoch is None else {"epoch": round(epoch, 2)})

    def _epoch(self, step: int) -> float | None:
        """Passes over the examples after this step, as batches are filled; what is in the journal knows how many."""
        if self._num_examples is None:
            record = read_batch(self.config.paths.journal, step)
            self._num_examples = sum(record.state.sizes.values()) if record else None
        return (step + 1) * self.config.num_groups / self._num_examples if self._num_examples else None

    def evaluation_line(self, evaluation: Evaluation) -> str:
        return f"{{'eval_reward': {_rounded(evaluation.reward)}, 'step': {evaluation.version}}} ({evaluation.env})"

    def _say_states(self) -> None:
        """The lines of the start tell of them, and who dies and is started again is told of by the launcher."""
        self._known_states["run"] = self.status.state if self.status else self._known_states.get("run", "starting")


def _rounded(value: float) -> float:
    """Four digits that count."""
    return float(f"{value:.4g}")
