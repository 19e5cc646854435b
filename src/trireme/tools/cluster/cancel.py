"""`trireme cancel RUN`: end a run in good order, on this machine or on the cluster that it was submitted to."""

from __future__ import annotations

import os
import signal
import time
from argparse import ArgumentParser
from pathlib import Path

from trireme.base.errors import ConfigError, DeadlineExceeded
from trireme.base.paths import RunPaths
from trireme.launch.folder import holds_launcher_lock, launcher_of
from trireme.tools.cluster import kubernetes, slurm
from trireme.tools.cluster.job import find_submission

END_S = 120.0
POLL_S = 0.1


def command(argv: list[str]) -> int:
    """End a run, and return the exit code.

    Raises: ConfigError if no process of the run is alive.
    """
    parser = ArgumentParser(
        prog="trireme cancel",
        description="Ends a run. What it has trained stays, and the same command with --resume continues it.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    run: Path = parser.parse_args(argv).run

    submission, paths = find_submission(run), RunPaths(run)
    job = f"{submission.scheduler} job {submission.job}" if submission else ""
    launcher = launcher_of(paths)
    # the submission may be an old one, of a run that was resumed on this machine
    is_here = launcher is not None and holds_launcher_lock(paths, launcher)
    if submission is None or is_here:
        end_launcher(paths)
    elif submission.scheduler == "slurm":
        slurm.cancel(submission)
    else:
        kubernetes.cancel(submission)

    more = f" {job} was not cancelled: if it is not over, type the same command again." if job and is_here else ""
    print(f"cancelled {run if is_here else job}. To resume later: the same command with --resume.{more}")
    return 0


def end_launcher(paths: RunPaths, *, wait_s: float = END_S) -> None:
    """Ask the launcher to end, and wait until it is gone. It ends its processes first.

    Raises:
        ConfigError: there is no launcher, or not on this machine.
        DeadlineExceeded: it did not end in time.
    """
    launcher = launcher_of(paths)
    if launcher is None:
        raise ConfigError(
            f"No launcher is running in {paths.root}. Expected a run that `rl` started on this machine, or that was "
            f"submitted from here. `trireme status {paths.root}` shows its state."
        )

    # A pid in the lock file may belong to another machine or container: never signal a foreign process.
    if not holds_launcher_lock(paths, launcher):
        raise ConfigError(
            f"{paths.root} is locked by a launcher with the process number {launcher}, but process {launcher} of this "
            "machine does not hold that lock - expected a launcher outside of containers, on this machine. Cancel the "
            "run in its container or on its machine; if its launcher was killed, its processes are about to end."
        )

    # The launcher ends its processes and then itself; the lock is free only when all are gone.
    os.kill(launcher, signal.SIGTERM)
    give_up = time.monotonic() + wait_s
    while launcher_of(paths) == launcher:
        if time.monotonic() > give_up:
            raise DeadlineExceeded(
                f"Process {launcher}, the launcher of {paths.root}, did not end within {wait_s:.0f} s of SIGTERM. "
                f"`kill -9 {launcher}` ends it; nothing that was trained is lost."
            )
        time.sleep(POLL_S)
