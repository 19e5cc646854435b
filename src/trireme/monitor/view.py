"""Show a run in the terminal: as lines of text, in our words or in those of `vf-rl`, or above a live picture.

A view reads what the run writes: `metrics.jsonl`, logs, the orchestrator's `/status`. The run never depends on its
view: the first error in a view is logged and ends the view alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trireme.base.log import get_logger
from trireme.base.network import url_of
from trireme.base.safe_text import clean
from trireme.config.run import RunConfig
from trireme.monitor.checkpoint_folders import CheckpointFolders
from trireme.monitor.logs import startup_phase
from trireme.monitor.metrics import read_in_pieces
from trireme.monitor.progress import Evaluation, ProcessState, Progress
from trireme.monitor.run_text import (
    bar,
    evaluation_text,
    read_batch,
    samples_if_due,
    short_time,
    step_line,
    warning_text,
)
from trireme.monitor.status import Status, StatusPoller

POLL_S = 1.0  # between two looks at the files
UPDATING = {"live", "quarantined"}  # an engine changes between these states at every new version
SILENCE_STARTING_S = 10.0  # silence after which a line shows what the start waits for, if it is something new
SILENCE_RUNNING_S = 60.0

Clock = Callable[[], float]
logger = get_logger("view")


class View:
    """One line per step, evaluation, warning and change of state. After a silence, one on what the run waits for."""

    def __init__(
        self, config: RunConfig, poller: StatusPoller, console: Console, *, clock: Clock = time.monotonic
    ) -> None:
        self.config = config
        self.console = console
        self.progress = Progress(config.max_steps)
        self.processes: Sequence[ProcessState] = ()
        self._poller = poller
        self._clock = clock
        self._started = self._last_line = clock()
        self._looked: float | None = None
        self._is_broken = False
        self._offset = 0

        # Read the history of a resumed run first, so that its steps and evaluations are not printed again.
        self._read_metrics()
        self.progress.begin_session()

        self._states: dict[str, str] = {}
        self._shown_evaluations = set(self.progress.evaluations())
        self._num_warnings = 0
        self._start_part = 0  # number of the part of the start that was printed last
        self._start_task: str | None = None  # current part of the start, until the first step
        self._start_task_began = self._started
        self._told_wait = ""  # the wait in the last line that showed one, without its seconds

    @property
    def status(self) -> Status | None:
        return self._poller.latest

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    def say(self, text: str) -> None:
        """Print lines that stay, above anything that is redrawn."""
        self._last_line = self._clock()
        try:
            self.console.print(clean(text), markup=False, highlight=False, soft_wrap=True)
        except OSError:
            self._give_up()

    def tick(self, processes: Sequence[ProcessState], *, final: bool = False) -> None:
        """Read what is new and show it, at most once in `POLL_S`. Never raise: no picture is worth a run."""
        now = self._clock()
        if self._is_broken or (self._looked is not None and now - self._looked < POLL_S and not final):
            return

        self._looked, self.processes = now, processes
        try:
            self._read_metrics()
            self.show(final=final)
        except Exception:
            self._give_up()

    def _read_metrics(self) -> None:
        for rows, offset in read_in_pieces(self.config.paths.metrics, self._offset):
            self._offset = offset
            self.progress.add(rows)

    def _give_up(self) -> None:
        if not self._is_broken:
            self._is_broken = True
            logger.warning("The terminal view failed and stays off. The run continues; see its logs.", exc_info=True)

    def show(self, *, final: bool) -> None:
        self.say_changes()

        # Changes of state come first: they usually explain the steps after them.
        for step in self.progress.take_completed(final=final):
            if (step + 1) % self.config.console.every == 0 or step + 1 == self.config.max_steps:
                self.say(self.step_text(step))
            for sample in samples_if_due(self.config, step):
                self.say(sample)

        for evaluation in self.progress.evaluations():
            if evaluation not in self._shown_evaluations:
                self._shown_evaluations.add(evaluation)
                self.say(self.evaluation_text(evaluation))

        warnings = self.progress.warnings
        for warned in warnings[self._num_warnings :]:
            self.say(warning_text(warned))
        self._num_warnings = len(warnings)

        # After a silence, one line shows that the run is alive. During the start it comes sooner if the wait is new.
        waiting = self.waiting_for()
        wait = waiting.rpartition(",")[0] if self._is_starting or self._start_task else self._told_wait
        silence_s = SILENCE_RUNNING_S if wait == self._told_wait else SILENCE_STARTING_S
        if not final and self._clock() - self._last_line >= silence_s:
            self._told_wait = wait
            self.say(waiting)

    def close(self) -> None:
        """Give the terminal back."""

    def say_changes(self) -> None:
        """Print what changed state: the run, its processes, its engines, and the part of the start that it is in."""
        states = {"run": self._run_state} | {process.name: process.story for process in self.processes}
        # For a reader, an engine that only lacks our weights has started.
        engines = self.status.engines if self.status else ()
        states |= {f"engine {each.url}": "started" if each.state == "quarantined" else each.state for each in engines}
        for name, state in states.items():
            known = self._states.get(name)
            if known != state and {known, state} != {"live", "started"}:
                self.say(f"{name}: {known} -> {state}" if known else f"{name}: {state}")
        self._states |= states
        self._say_start()

    def _say_start(self) -> None:
        """Print how long each part of the start took, once it is over."""
        (part, task), now = self._find_start_task(), self._clock()
        if part <= self._start_part:  # an engine that is sent weights again starts nothing
            return
        if self._start_task is not None and self.status is not None:
            self.say(f"{self._start_task}: {now - self._start_task_began:.0f} s")
        self._start_task_began = now if self._start_part else self._started
        self._start_part, self._start_task = part, task

    def _find_start_task(self) -> tuple[int, str | None]:
        """Return the number of the part of the start that takes the time, and its name; None after the first step, or
        if nothing is known.
        """
        status = self.status
        engines_join = not self.config.hosts.inference
        if self.progress.num_session_steps:
            return 5, None
        if status and not status.engines and status.state != "starting" and not engines_join:
            return 5, None

        # An engine is quarantined until it has confirmed our weights, and live from then on.
        states = {engine.state for engine in status.engines} if status else set()
        if status is None or not states & UPDATING:
            return 1, "waiting for an engine to join" if engines_join else "loading the engine"
        if "live" not in states:
            return 2, "sending the weights to the engine"
        evaluation = self.config.orchestrator.eval
        if evaluation and evaluation.eval_base and not status.version and not self.progress.evaluations():
            return 3, "evaluating version 0"
        return 4, "the first step"

    @property
    def _run_state(self) -> str:
        return self.status.state if self.status else self._states.get("run", "starting")

    @property
    def _is_starting(self) -> bool:
        return self._run_state == "starting"

    def step_text(self, step: int) -> str:
        return step_line(self.progress, step, self.status)

    def evaluation_text(self, evaluation: Evaluation) -> str:
        return evaluation_text(evaluation)

    def waiting_for(self) -> str:
        """Return what the run waits for: "inference: loading the model, 14 s …"."""
        if not self._is_starting and not self._start_task:
            waits = [wait.text for wait in self.status.waits] if self.status else ["orchestrator does not answer"]
            done = f"step {self.progress.num_done}/{self.config.max_steps} done"
            return f"{done}, waits: {'; '.join(waits) or 'none'}"

        # While it starts, logs show more than the status: the orchestrator only waits for the engine.
        phases = {process.name: startup_phase(process.log, process.log_start) for process in self.processes}
        if self.status and (wait := self.status.root_wait()) is not None:
            phase = phases.get(wait.peer, "ready")
            what = wait.note or (phase if phase not in ("ready", "starting") else wait.what)
            return f"{wait.peer}: {what}, {wait.waited_s:.0f} s …"

        known = "; ".join(f"{name}: {phase}" for name, phase in phases.items() if phase not in ("ready", "starting"))
        task = self._start_task or "starting"
        return f"{task}{f' ({known})' if known else ''}, {self._clock() - self._start_task_began:.0f} s …"


class VfRlView(View):
    """The lines that users of `vf-rl` know. Also writes the checkpoint folders that they look for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._folders = CheckpointFolders(self.config)
        self._startup = self._startup_lines()
        self._num_examples: int | None = None

    def show(self, *, final: bool) -> None:
        if not final or self.progress.num_session_steps:
            for line in self._startup:
                if line is None:
                    break
                self.say(line)
        super().show(final=final)
        for step in self._folders.write_due():
            self.say(f"Saved {self._folders.folder(step)}")

    def _startup_lines(self) -> Iterator[str | None]:
        """Yield the lines of the start in order, and None while the next line is not true yet."""
        config = self.config
        yield f"Loading model {config.trainer.model.name}..."
        if config.device == "cpu":
            yield "No GPU is used: inference and training share the CPU."
        yield f"Starting vLLM server on port {config.inference.server.port}..."
        yield "Waiting for vLLM server to be ready..."
        while not self._has_ready_engine():
            yield None
        yield "vLLM server is ready"
        for environment in config.orchestrator.env:
            yield f"Loading environment {environment.id}..."

    def _has_ready_engine(self) -> bool:
        """A row of metrics may be here before the next answer: the step was sampled, so an engine is ready."""
        engines = self.status.engines if self.status else ()
        logs = [process for process in self.processes if process.name == "inference"]
        return (
            self.progress.num_session_steps > 0
            or any(engine.state == "live" for engine in engines)
            or any(startup_phase(process.log, process.log_start) == "ready" for process in logs)
        )

    def say_changes(self) -> None:
        """Print nothing: the startup lines and the launcher report the same."""
        self._states["run"] = self._run_state

    def step_text(self, step: int) -> str:
        """
        Example:
            {'loss': 0.234, 'learning_rate': 1e-05, 'epoch': 0.01}
            Step 1/100: reward=0.45, entropy=2.34, importance_ratio=1.02
        """
        row = self.progress.merged(step)
        names = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
        of_trainer = {name: _rounded(row[ours]) for name, ours in names.items() if row.get(ours) is not None}

        # Sizes of the data sets are in the journal only; an epoch is one pass through all of them.
        if self._num_examples is None and (record := read_batch(self.config.paths.journal, step)):
            self._num_examples = sum(record.state.sizes.values())
        if self._num_examples and self.config.orchestrator.batch_size:
            of_trainer["epoch"] = round((step + 1) * self.config.num_groups / self._num_examples, 2)

        names = {"reward": "reward/mean", "entropy": "policy/entropy", "importance_ratio": "importance_ratio"}
        numbers = ", ".join(f"{name}={row[ours]:.2f}" for name, ours in names.items() if row.get(ours) is not None)
        return f"{of_trainer}\nStep {step + 1}/{self.config.max_steps}: {numbers}"

    def evaluation_text(self, evaluation: Evaluation) -> str:
        return f"{{'eval_reward': {_rounded(evaluation.reward)}, 'step': {evaluation.version}}} ({evaluation.env})"


def _rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


@contextmanager
def open_view(config: RunConfig, run: Path) -> Iterator[View]:
    """Open the view of a run: that of `vf-rl` if configured, with a live picture in a terminal, else lines of text.

    Args:
        run: the folder in which the configuration lies.
    """
    console = _Console()
    is_live = console.is_terminal and sys.stdout.isatty() and not console.is_dumb_terminal
    kind = VfRlView if config.console.style == "vf-rl" else LiveView if is_live else View
    server = config.orchestrator.server
    where = url_of(server.host, server.port or 8001, known=config.hosts.orchestrator)
    with StatusPoller(where, run) as poller:
        view = kind(config, poller, console)
        try:
            yield view
        finally:
            view.close()


class _Console(Console):
    """A console that survives its reader (`rl | head`). rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class LiveView(View):
    """Lines of text, and below them a picture: how far the run is, its processes and its engines."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._live = Live(console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, *, final: bool) -> None:
        self._last_line = self._clock()  # the picture shows what the run waits for, so no line has to
        super().show(final=final)
        self._live.update(self._picture(), refresh=True)

    def close(self) -> None:
        try:
            self._live.stop()
        except OSError:
            self._give_up()

    def _picture(self) -> RenderableType:
        progress, total = self.progress, self.config.max_steps
        header = Text.assemble(
            (clean(self.config.name or self.config.paths.root.name), "bold"),
            (clean(f"  {self.config.paths.root}"), "dim"),
            f"  step {progress.num_done}/{total} {bar(progress.num_done / total)}  {short_time(self.elapsed_s)}",
        )
        eta_s = progress.eta_s()
        if eta_s is not None:
            header.append(f"  ETA {short_time(eta_s)}")
        start = [Text(clean(self.waiting_for()), style="yellow")] if self._start_task else []
        return Group(header, *start, self._processes())

    def _processes(self) -> Table:
        status = self.status
        rows = []
        for process in self.processes:
            # While it starts, the phase in its log is more precise than "running".
            is_coming_up = process.state == "running" and (status is None or status.state == "starting")
            waits = "; ".join(wait.text for wait in (status.waits if status else ()) if wait.who == process.name)
            if status and process.name == "orchestrator":
                waits = f"{status.in_flight} in flight  {waits}"
            state = startup_phase(process.log, process.log_start) if is_coming_up else process.story
            rows.append((process.name, state, waits))

        for engine in status.engines if status else ():
            version = "" if engine.version is None else f"version {engine.version}  "
            rows.append(("engine", engine.state, f"{version}{engine.url}"))

        table = Table.grid(padding=(0, 2))
        for name, state, what in rows:
            table.add_row(Text(clean(name), style="cyan"), Text(clean(state)), Text(clean(what)))
        return table
