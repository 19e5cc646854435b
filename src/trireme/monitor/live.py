"""The terminal view of a run: a live picture in a terminal, plain lines anywhere else (CI, Slurm, `rl | tee`).

It reads what the run writes (`metrics.jsonl`, logs, `/status`) and is never needed by it: whatever goes wrong in here
is logged once, and the run goes on unseen.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import httpx
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trireme.base.log import get_logger
from trireme.base.token import bearer
from trireme.config.run import RunConfig
from trireme.monitor.collapse import Warned
from trireme.monitor.logs import startup_phase
from trireme.monitor.metrics import Row, read_metrics
from trireme.monitor.progress import Evaluation, ProcessState, Progress, Status
from trireme.monitor.samples import Samples

POLL_S = 1.0  # between two looks at files and `/status`
STATUS_TIMEOUT_S = 0.8
LONG_WAIT_S = 5.0  # shorter ones are part of every step
UPDATING = {"live", "quarantined"}  # what an engine's state goes back and forth between, at every new version
SILENCE_STARTING_S = 10.0  # after this long without a line, one says what is being waited for
SILENCE_RUNNING_S = 60.0
TABLE_STEPS = 8
SPARKLINE_WIDTH = 60
MOST_WARNINGS = 3  # in the live picture; the log has all of them

Clock = Callable[[], float]
logger = get_logger("view")


@contextmanager
def open_view(config: RunConfig, console: Console | None = None) -> Iterator[View]:
    """The view that fits where the output goes."""
    console = console or _Console()
    live = console.is_terminal and sys.stdout.isatty() and not console.is_dumb_terminal
    with StatusPoller(status_url(config)) as poller:
        view = _view_class(config, live=live)(config, poller, console)
        try:
            yield view
        finally:
            view.close()


def _view_class(config: RunConfig, *, live: bool) -> type[View]:
    if config.console.style == "vf-rl":
        from trireme.monitor.vf_rl_view import VfRlView  # it builds on the views below

        return VfRlView
    return TerminalView if live else PlainView


class _Console(Console):
    """rich ends the process when its reader goes away (`rl | head`). A run is worth more."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


# what is looked at


def status_url(config: RunConfig) -> str:
    server = config.orchestrator.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    return f"http://{host}:{server.port or 8001}/status"


class StatusPoller:
    """Asks the orchestrator once a second, in a thread: a slow answer must not delay the one who watches over it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.latest: Status | None = None  # None while it does not answer
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="status-poller", daemon=True)

    def __enter__(self) -> StatusPoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(2 * STATUS_TIMEOUT_S)

    def _poll(self) -> None:
        with httpx.Client(timeout=STATUS_TIMEOUT_S, trust_env=False, headers=bearer()) as client:
            while not self._closing.wait(POLL_S):
                self.latest = self._ask(client)

    def _ask(self, client: httpx.Client) -> Status | None:
        try:
            return msgspec.json.decode(client.get(self.url).raise_for_status().content, type=Status)
        except (httpx.HTTPError, msgspec.DecodeError):
            return None


# what is shown


class View(ABC):
    """Common to both views: takes in what is new, tells what changed, and never raises."""

    def __init__(
        self, config: RunConfig, poller: StatusPoller, console: Console, *, clock: Clock = time.monotonic
    ) -> None:
        self.config = config
        self.console = console
        self.progress = Progress(config.max_steps)
        self.processes: Sequence[ProcessState] = ()
        self._poller = poller
        self._clock = clock
        self._started = clock()
        self._looked: float | None = None
        self._broken = False
        self._samples = Samples(config.paths, config.console)
        rows, self._offset = read_metrics(config.paths.metrics)
        self.progress.add(rows)
        self.progress.begin_session()

    @property
    def status(self) -> Status | None:
        return self._poller.latest

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    def say(self, text: str) -> None:
        """A line for good, above whatever is live."""
        try:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            self._give_up()

    def tick(self, processes: Sequence[ProcessState], *, final: bool = False) -> None:
        """Looks and shows, at most once in `POLL_S`."""
        now = self._clock()
        if self._broken or (self._looked is not None and now - self._looked < POLL_S and not final):
            return
        self._looked, self.processes = now, processes
        try:
            self._take_in()
            self.show(final=final)
        except Exception:  # a picture is never worth a run
            self._give_up()

    def _take_in(self) -> None:
        rows, self._offset = read_metrics(self.config.paths.metrics, self._offset)
        self.progress.add(rows)

    def _give_up(self) -> None:
        if not self._broken:
            self._broken = True
            logger.warning("The terminal view failed and stays away; the run goes on, see its logs.", exc_info=True)

    def say_samples(self, step: int) -> None:
        for text in self._samples.of(step):
            self.say(text)

    @abstractmethod
    def show(self, *, final: bool) -> None:
        """Draws, or tells, what has been taken in."""

    def close(self) -> None:
        """Gives the terminal back, where something of it was taken."""
        return

    def waiting_for(self) -> str:
        """What holds things up now: "inference: loading the model, 14 s …"."""
        wait = self.status.root_wait() if self.status else None
        if wait is not None:
            return f"{wait.peer}: {wait.note or self._phase_of(wait.peer) or wait.what}, {wait.waited_s:.0f} s …"
        phases = ((process.name, startup_phase(process.log, process.log_start)) for process in self.processes)
        waiting = [f"{name}: {phase}" for name, phase in phases if phase != "ready"]
        return f"{'; '.join(waiting) or 'orchestrator: no status yet'}, {self.elapsed_s:.0f} s …"

    def _phase_of(self, peer: str) -> str | None:
        phases = [startup_phase(process.log, process.log_start) for process in self.processes if process.name == peer]
        return next((phase for phase in phases if phase not in ("ready", "starting")), None)


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


def step_line(progress: Progress, step: int, status: Status | None) -> str:
    """One completed step in one line; numbers that nobody reported are left out."""
    row = progress.merged(step)
    width = len(str(progress.max_steps))
    parts = [f"step {step + 1:>{width + 2}}/{progress.max_steps}"]
    for label, name, form in (
        ("reward", "reward/mean", ".3f"),
        ("loss", "loss", ".4f"),
        ("grad", "grad_norm", ".2f"),
        ("entropy", "policy/entropy", ".2f"),
        ("ratio", "importance_ratio", ".2f"),
        ("lag", "lag/mean", ".1f"),
    ):
        if row.get(name) is not None:
            parts.append(f"{label} {row[name]:{form}}")
    if row.get("perf/tokens_per_s") is not None:
        parts.append(f"{short_number(row['perf/tokens_per_s'])} tok/s")
    wait = status.root_wait() if status else None
    if wait is not None and wait.waited_s >= LONG_WAIT_S:
        parts.append(f"waits: {wait.text}")
    eta_s = progress.eta_s()
    return "  ".join(parts) + (f"  ETA {short_time(eta_s)}" if eta_s is not None else "")


class TerminalView(View):
    """The live picture: header, processes, engines, newest steps, rewards so far, evaluations."""

    def __init__(
        self, config: RunConfig, poller: StatusPoller, console: Console, *, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(config, poller, console, clock=clock)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, *, final: bool) -> None:
        for step in self.progress.take_completed(final=final):
            self.say_samples(step)
        self._live.update(self.render(), refresh=True)

    def close(self) -> None:
        try:
            self._live.stop()
        except OSError:
            self._give_up()

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._header(), self._processes()]
        if self.progress.num_done:
            parts += [self._steps(), self._rewards()]
        if self.progress.evaluations():
            parts.append(Text("  ".join(map(evaluation_text, self.progress.evaluations()[-6:]))))
        parts += [
            Text(warning_text(warned), style="yellow") for warned in self.progress.lasting_warnings[-MOST_WARNINGS:]
        ]
        return Group(*parts)

    def _header(self) -> Text:
        done, total = self.progress.num_done, self.config.max_steps
        eta_s = self.progress.eta_s()
        text = Text()
        text.append(self.config.name or self.config.paths.root.name, style="bold")
        text.append(f"  {self.config.paths.root}", style="dim")
        text.append(f"  step {done}/{total} {bar(done / total)}  {short_time(self.elapsed_s)}")
        text.append(f"  ETA {short_time(eta_s)}" if eta_s is not None else "")
        return text

    def _processes(self) -> Table:
        table = Table.grid(padding=(0, 2))
        starting = self.status is None or self.status.state == "starting"
        for process in self.processes:
            coming_up = starting and process.state == "running"
            state = startup_phase(process.log, process.log_start) if coming_up else process.story
            table.add_row(Text(process.name, style="cyan"), Text(state), Text(self._waits_text(process.name)))
        for engine in self.status.engines if self.status else ():
            version = "" if engine.version is None else f"version {engine.version}"
            table.add_row(Text("engine", style="cyan"), Text(engine.state), Text(f"{version}  {engine.url}".strip()))
        return table

    def _waits_text(self, process: str) -> str:
        if self.status is None:
            return ""
        waits = "; ".join(wait.text for wait in self.status.waits_of(process))
        in_flight = f"{self.status.in_flight} in flight" if process == "orchestrator" else ""
        return "  ".join(filter(None, (in_flight, waits)))

    def _steps(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for _, title, _ in STEP_COLUMNS:
            table.add_column(title, justify="right")
        for step in self.progress.recent(TABLE_STEPS):
            row = self.progress.merged(step) | {"done": step + 1, "seconds": self.progress.step_seconds(step)}
            table.add_row(*(_cell(row, name, form) for name, _, form in STEP_COLUMNS))
        return table

    def _rewards(self) -> Text:
        rewards = self.progress.series("reward/mean")
        if not rewards:
            return Text("")
        low, high = min(rewards), max(rewards)
        return Text(f"reward/mean {low:.3f} to {high:.3f}  {sparkline(rewards, SPARKLINE_WIDTH)}", style="green")


STEP_COLUMNS = (
    ("done", "step", "d"),
    ("reward/mean", "reward/mean", ".3f"),
    ("loss", "loss", ".4f"),
    ("grad_norm", "grad_norm", ".2f"),
    ("policy/entropy", "policy/entropy", ".3f"),
    ("importance_ratio", "ratio", ".2f"),
    ("mismatch_kl", "mismatch_kl", ".1e"),
    ("lag/mean", "lag/mean", ".1f"),
    ("perf/tokens_per_s", "tokens/s", "short"),
    ("seconds", "time", ".1f"),
)


def _cell(row: Row, name: str, form: str) -> Text:
    value = row.get(name)
    if value is None:
        return Text("-")
    return Text(short_number(value) if form == "short" else f"{value:{form}}")


def evaluation_text(evaluation: Evaluation) -> str:
    return f"eval {evaluation.env} {evaluation.reward:.3f} at version {evaluation.version}"


def warning_text(warned: Warned) -> str:
    return f"warning at step {warned.step + 1}, {warned.name}: {warned.text}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Means of equal shares of the values, from lowest to highest."""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (mean - low) / span))] for mean in means)


def bar(share: float, width: int = 20) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


def short_number(value: float) -> str:
    """12345 -> "12.3k"."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def short_time(seconds: float) -> str:
    """92 -> "1:32", 3723 -> "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
