"""Supervise the processes of a run: start all at once, restart alone what dies, end all together.

Nothing that a process started outlives the run: not after an error, not after Ctrl-C, not after `kill -9` of this
launcher (see `process_tree`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from trireme.base.faults import reach
from trireme.base.processes import catch_signals
from trireme.config.run import RunConfig
from trireme.journal.manifest import complete_steps
from trireme.launch.children import Children, open_children
from trireme.launch.health import FrozenWatch, HealthWatch
from trireme.launch.process_tree import GRACE_S
from trireme.launch.restarts import Ending, Restarts
from trireme.monitor.run_text import restarts_lines, summary, warning_lines
from trireme.monitor.view import View, open_view
from trireme.monitor.wandb_mirror import open_wandb_mirror

if TYPE_CHECKING:
    from trireme.launch.plan import Plan

POLL_S = 0.1


def supervise(plan: Plan, config: RunConfig, *, grace_s: float = GRACE_S, keep_open: Sequence[int] = ()) -> int:
    """Run a plan to its end and print how it went.

    Args:
        grace_s: between SIGTERM and SIGKILL at the end.
        keep_open: file descriptors that stay open until no process is left, even if this one is killed.

    Returns: the exit code: 0 done, 1 a process died for good, 2 it refused the configuration, 3 weights were wrong or
        the journal damaged, 128 + N after signal N.

    Raises: ConfigError if W&B cannot start; no process is started then.
    """
    started = time.monotonic()
    with open_wandb_mirror(config):
        # The view outlives the processes, so that their last rows of metrics are shown.
        with catch_signals() as signals, open_view(config, config.paths.root) as view:
            with open_children(plan.values(), lambda: len(signals) > 1, grace_s, keep_open) as children:
                reach("launcher.started")
                ending = _watch(children, config, view, signals)
                if ending.signal_number:
                    view.say("stopping (again to kill)")
            view.tick(children.states(), final=True)

        restarts = {child.name: child.num_restarts for child in children.children}
        if ending == Ending():
            view.say(summary(view.progress, config, time.monotonic() - started, restarts))
        else:
            words = [*ending.lines(), *warning_lines(view.progress.warnings), *restarts_lines(restarts)]

            if config.paths.holds_run:  # it resumes from the newest checkpoint and every batch since
                steps = complete_steps(config.paths.checkpoints)
                where = f" from step {steps[-1]}" if steps else ""
                goes_back = config.trainer.ckpt.resume_step not in (None, -1)
                instead = " instead of --trainer.ckpt.resume-step" if goes_back else ""
                words.append(f"To resume{where}: the same command with --resume{instead}")
            view.say("\n".join(words))
    return ending.exit_code


def _watch(children: Children, config: RunConfig, view: View, signals: Sequence[int]) -> Ending:
    """Wait for an exit that ends the run, or for a signal. Kill stopped and unhealthy processes, to be restarted."""
    policy = Restarts(config.supervisor, config.paths.metrics, view.say)
    watched = children.children if config.supervisor.restart else ()
    frozen = FrozenWatch(config.supervisor.frozen_after_s)
    with closing(HealthWatch(watched, config.supervisor.unhealthy_after_s)) as health:
        while True:
            table = children.look()
            if signals:
                return Ending(signal_number=signals[0])
            if (ending := policy.judge(children.children)) is not None:
                return ending

            # Killed processes are seen as dead in the next turn, and then restarted by the policy.
            for line in [*frozen.kill_frozen(watched, table), *health.kill_silent()]:
                view.say(line)

            view.tick(children.states())
            time.sleep(POLL_S)
