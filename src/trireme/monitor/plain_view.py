"""A run in plain lines: for CI, Slurm, and `rl | tee`."""

from __future__ import annotations

import time

from rich.console import Console

from trireme.config.run import RunConfig
from trireme.monitor.in_words import evaluation_text, step_line, warning_text
from trireme.monitor.progress import Evaluation
from trireme.monitor.view import Clock, StatusPoller, View

UPDATING = {"live", "quarantined"}  # what an engine's state goes back and forth between, at every new version
SILENCE_STARTING_S = 10.0  # after this long without a line, one says what is being waited for
SILENCE_RUNNING_S = 60.0


class PlainView(View):
    """One line per step, evaluation and change of state; when nothing happens, one on what is being waited for."""

    def __init__(
        self, config: RunConfig, poller: StatusPoller, console: Console, *, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(config, poller, console, clock=clock)
        self._spoke = clock()
        self._known_states: dict[str, str] = {}
        self._known_evaluations = set(self.progress.evaluations())
        self._num_warnings_said = 0

    def say(self, text: str) -> None:
        self._spoke = self._clock()
        super().say(text)

    def show(self, *, final: bool) -> None:
        self._say_states()
        for step in self.progress.take_completed(final=final):
            if (step + 1) % self.config.console.every == 0 or step + 1 == self.config.max_steps:
                self.say(self.step_text(step))
            self.say_samples(step)
        self._say_evaluations()
        self._say_warnings()
        if not final and self._clock() - self._spoke >= self._patience_s():
            self.say(self._still())

    def step_text(self, step: int) -> str:
        return step_line(self.progress, step, self.status)

    def evaluation_line(self, evaluation: Evaluation) -> str:
        return evaluation_text(evaluation)

    def _say_states(self) -> None:
        states = {"run": self.status.state if self.status else self._known_states.get("run", "starting")}
        states |= {process.name: process.story for process in self.processes}
        states |= {f"engine {engine.url}": engine.state for engine in (self.status.engines if self.status else ())}
        for name, state in states.items():
            known = self._known_states.get(name)
            if known != state and {known, state} != UPDATING:
                self.say(f"{name}: {known} -> {state}" if known else f"{name}: {state}")
        self._known_states |= states

    def _say_evaluations(self) -> None:
        for evaluation in self.progress.evaluations():
            if evaluation not in self._known_evaluations:
                self._known_evaluations.add(evaluation)
                self.say(self.evaluation_line(evaluation))

    def _say_warnings(self) -> None:
        fresh = self.progress.warnings[self._num_warnings_said :]
        self._num_warnings_said += len(fresh)
        for warned in fresh:
            self.say(warning_text(warned))

    def _patience_s(self) -> float:
        return SILENCE_STARTING_S if self._known_states.get("run") == "starting" else SILENCE_RUNNING_S

    def _still(self) -> str:
        if self._known_states.get("run") == "starting":
            return self.waiting_for()
        waits = "; ".join(wait.text for wait in self.status.waits) if self.status else "orchestrator does not answer"
        return f"step {self.progress.num_done}/{self.config.max_steps} done, waits: {waits or 'none'}"
