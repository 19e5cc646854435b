"""Supervise the processes of a run: start all at once, restart alone what dies, end all together.

Nothing that a process started outlives the run: not after an error, not after Ctrl-C, not after `kill -9` of this
launcher (see `process_tree`).
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
from trireme.launch.children import Children, open_children
from trireme.launch.health import FrozenWatch, HealthWatch
from trireme.launch.process_tree import GRACE_S, Process
from trireme.launch.restarts import Done, Ending, Interrupted, Restarts
from trireme.monitor.live_view import open_view
from trireme.monitor.run_text import restarts_lines, summary, warning_lines
from trireme.monitor.view import View
from trireme.monitor.wandb_mirror import open_wandb_mirror

if TYPE_CHECKING:
    from trireme.launch.plan import Plan

POLL_S = 0.1


def supervise(plan: Plan, config: RunConfig, *, grace_s: float = GRACE_S, keep_open: Sequence[int] = ()) -> int:
    """Run a plan to its end and print how it went.

    Args:
        grace_s: between SIGTERM and SIGKILL at the end.
        keep_open: file descriptors that stay open until no process is left, even where this one is killed.

    Returns: the exit code: 0 done, 1 a process died for good, 2 it refused the configuration, 3 weights were wrong or
        the journal damaged, 128 + N after signal N.

    Raises: ConfigError where W&B cannot start; no process is started then.
    """
    started = time.monotonic()
    with open_wandb_mirror(config):
        with catch_signals() as interrupts, open_view(config) as view:
            with open_children(plan.processes, lambda: interrupts.again, grace_s, keep_open) as children:
                reach("launcher.started")
                ending = _watch(children, config, view, interrupts)
                if isinstance(ending, Interrupted):
                    view.say("stopping (again to kill)")
            view.tick(children.states(), final=True)
        restarts = {child.name: child.num_restarts for child in children.children}
        if isinstance(ending, Done):
            view.say(summary(view.progress, config, time.monotonic() - started, restarts))
        else:
            words = [*ending.lines(), *warning_lines(view.progress.warnings), *restarts_lines(restarts)]
            view.say("\n".join([*words, *_how_to_resume(config)]))
    return ending.exit_code


def _watch(children: Children, config: RunConfig, view: View, interrupts: Interrupts) -> Ending:
    """Wait for an exit that ends the run, or for a signal."""
    policy = Restarts(config.supervisor, config.paths.metrics, view.say)
    with HealthChecks(children, config) as checks:
        while True:
            table = children.look()
            if interrupts.first is not None:
                return Interrupted(interrupts.first)
            if (ending := policy.judge(children.children)) is not None:
                return ending
            for line in checks.kill_unhealthy(table):
                view.say(line)
            view.tick(children.states())
            time.sleep(POLL_S)


class HealthChecks:
    """Kill processes that are stopped or fail health checks, so that the restart policy relaunches them.

    Disabled when `supervisor.restart` is false.
    """

    def __init__(self, children: Children, config: RunConfig) -> None:
        self._children = children
        self._active = config.supervisor.restart
        self._frozen = FrozenWatch(config.supervisor.frozen_after_s)
        self._health = HealthWatch(children.children if self._active else (), config.supervisor.unhealthy_after_s)

    def __enter__(self) -> HealthChecks:
        return self

    def __exit__(self, *_: object) -> None:
        self._health.close()

    def kill_unhealthy(self, table: dict[int, Process] | None) -> list[str]:
        frozen = self._frozen.kill_frozen(self._children.children, table) if self._active and table is not None else []
        return frozen + self._health.kill_silent()


def _how_to_resume(config: RunConfig) -> list[str]:
    """Return how to resume, where there is a run on disk: from the newest checkpoint and every batch since."""
    if not config.paths.holds_run:
        return []
    steps = complete_steps(config.paths.checkpoints)
    where = f" from step {steps[-1]}" if steps else ""
    instead = " instead of --trainer.ckpt.resume-step" if (config.trainer.ckpt.resume_step or -1) >= 0 else ""
    return [f"To resume{where}: the same command with --resume{instead}"]


# signals


class Interrupts:
    """The signals that asked the launcher to stop. They are recorded, and obeyed by the loop."""

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
    """Record SIGINT, SIGTERM and SIGHUP, unless they are ignored already (`nohup`)."""
    interrupts = Interrupts()
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: interrupts.received.append(n)) for number in caught}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
