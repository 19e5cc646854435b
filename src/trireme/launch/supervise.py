"""Runs the processes of a plan: all start at once, who dies is started again alone, and all end together.

Nothing that a process started outlives the run: not after an error, not after Ctrl-C, not after `kill -9` of this
launcher (see `descendants`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trireme.base.faults import reach
from trireme.config.run import RunConfig
from trireme.journal.manifest import complete_steps
from trireme.launch.children import Crew, open_crew
from trireme.launch.descendants import GRACE_S, Process
from trireme.launch.endings import Done, Ending, Interrupted
from trireme.launch.folder import holds_run
from trireme.launch.frozen import FrozenWatch
from trireme.launch.health import HealthWatch
from trireme.launch.restarts import Restarts
from trireme.monitor.live import open_view
from trireme.monitor.summary import restarts_lines, summary, warning_lines
from trireme.monitor.view import View
from trireme.monitor.wandb_mirror import open_wandb_mirror

if TYPE_CHECKING:
    from trireme.launch.plan import Plan

POLL_S = 0.1


def supervise(plan: Plan, config: RunConfig, *, grace_s: float = GRACE_S, keep_open: Sequence[int] = ()) -> int:
    """Runs a plan to its end and says how it went.

    Args:
        grace_s: between SIGTERM and SIGKILL at the end.
        keep_open: file descriptors that stay open until nothing of the run is left, even where this process is killed.

    Returns: the exit code: 0 done, 1 a process died for good, 2 it refused the configuration, 3 weights
    were wrong or the journal damaged, 128 + N after signal N.
    Raises: ConfigError where wandb cannot start; nothing runs then.
    """
    started = time.monotonic()
    with open_wandb_mirror(config):
        with catch_signals() as interrupts, open_view(config) as view:
            with open_crew(plan.processes, lambda: interrupts.again, grace_s, keep_open) as crew:
                reach("launcher.started")
                ending = _watch(crew, config, view, interrupts)
                if isinstance(ending, Interrupted):
                    view.say("stopping (again to kill)")
            view.tick(crew.states(), final=True)
        restarts = {child.name: child.num_restarts for child in crew.children}
        if isinstance(ending, Done):
            view.say(summary(view.progress, config, time.monotonic() - started, restarts))
        else:
            words = [*ending.lines(), *warning_lines(view.progress.warnings), *restarts_lines(restarts)]
            view.say("\n".join([*words, *_how_to_resume(config)]))
    return ending.exit_code


def _watch(crew: Crew, config: RunConfig, view: View, interrupts: Interrupts) -> Ending:
    """Waits for: an exit that ends the run, or a signal."""
    policy = Restarts(config.supervisor, config.paths.metrics, view.say)
    with Watches(crew, config) as watches:
        while True:
            table = crew.look()
            if interrupts.first is not None:
                return Interrupted(interrupts.first)
            if (ending := policy.judge(crew.children)) is not None:
                return ending
            for line in watches.look(table):
                view.say(line)
            view.tick(crew.states())
            time.sleep(POLL_S)


class Watches:
    """Who is frozen or has fallen silent is killed, and thereby started again. Nobody is where nothing is restarted."""

    def __init__(self, crew: Crew, config: RunConfig) -> None:
        self._crew = crew
        self._active = config.supervisor.restart
        self._frozen = FrozenWatch(config.supervisor.frozen_after_s)
        self._health = HealthWatch(crew.children if self._active else (), config.supervisor.unhealthy_after_s)

    def __enter__(self) -> Watches:
        return self

    def __exit__(self, *_: object) -> None:
        self._health.close()

    def look(self, table: dict[int, Process] | None) -> list[str]:
        frozen = self._frozen.kill_frozen(self._crew.children, table) if self._active and table is not None else []
        return frozen + self._health.kill_silent()


def _how_to_resume(config: RunConfig) -> list[str]:
    """What is on disk is enough to go on: the newest checkpoint, and every batch since."""
    if not holds_run(config.paths):
        return []
    steps = complete_steps(config.paths.checkpoints)
    where = f" from step {steps[-1]}" if steps else ""
    instead = " instead of --trainer.ckpt.resume-step" if (config.trainer.ckpt.resume_step or -1) >= 0 else ""
    return [f"To go on{where}: the same command with --resume{instead}"]


# signals


class Interrupts:
    """Signals that ask us to stop, counted instead of obeyed."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def first(self) -> int | None:
        return self.received[0] if self.received else None

    @property
    def again(self) -> bool:
        return len(self.received) > 1


@contextmanager
def catch_signals() -> Iterator[Interrupts]:
    """Ctrl-C, SIGTERM, and the loss of the terminal, unless it is ignored already (`nohup`)."""
    interrupts = Interrupts()
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: interrupts.received.append(n)) for number in caught}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
