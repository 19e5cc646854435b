"""What all views of a run have in common: they take in what is new, and never raise.

They read what the run writes (`metrics.jsonl`, logs, `/status`) and are never needed by it: whatever goes wrong in here
is logged once, and the run goes on unseen.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import httpx
import msgspec
from rich.console import Console

from trireme.base.log import get_logger
from trireme.base.token import bearer, token
from trireme.config.run import RunConfig
from trireme.monitor.logs import startup_phase
from trireme.monitor.metrics import read_metrics
from trireme.monitor.progress import ProcessState, Progress, Status
from trireme.monitor.samples import Samples

POLL_S = 1.0  # between two looks at files and `/status`
STATUS_TIMEOUT_S = 0.8

Clock = Callable[[], float]
logger = get_logger("view")


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
        with httpx.Client(timeout=STATUS_TIMEOUT_S, trust_env=False, headers=bearer(token())) as client:
            while not self._closing.wait(POLL_S):
                self.latest = self._ask(client)

    def _ask(self, client: httpx.Client) -> Status | None:
        try:
            return msgspec.json.decode(client.get(self.url).raise_for_status().content, type=Status)
        except (httpx.HTTPError, msgspec.DecodeError, RecursionError):
            return None


class View(ABC):
    """Takes in what is new, tells what changed, and never raises."""

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
