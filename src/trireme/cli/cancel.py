"""`trireme cancel RUN`: ends a run in good order, on this machine or on the cluster that it was submitted to."""

from __future__ import annotations

import os
import signal
import time
from argparse import ArgumentParser
from pathlib import Path

from trireme.base.errors import ConfigError, DeadlineExceeded
from trireme.base.paths import RunPaths
from trireme.launch.folder import launcher_of
from trireme.tools.cluster import kubernetes, slurm
from trireme.tools.cluster.job import find_submission

END_S = 120.0
POLL_S = 0.1


def cancel(argv: list[str]) -> int:
    """Raises: ConfigError where nothing of the run is at work."""
    run = _parse(argv)
    submission = find_submission(run)
    if submission and submission.scheduler == "slurm":
        slurm.cancel(submission)
    elif submission:
        kubernetes.cancel(submission)
    else:
        end_launcher(RunPaths(run))
    what = f"{submission.scheduler} job {submission.job}" if submission else str(run)
    print(f"cancelled {what}. To resume later: the same command with --resume")
    return 0


def end_launcher(paths: RunPaths, *, wait_s: float = END_S) -> None:
    """Asks it to, and waits until it is gone. It ends its processes first.

    Raises:
        ConfigError: there is none.
        DeadlineExceeded: it did not end.
    """
    launcher = launcher_of(paths)
    if launcher is None:
        raise ConfigError(
            f"no launcher is running in {paths.root} - expected a run that `rl` started on this machine, or that was "
            f"submitted from here. `trireme status {paths.root}` says how it stands."
        )
    os.kill(launcher, signal.SIGTERM)
    give_up = time.monotonic() + wait_s
    while launcher_of(paths) == launcher:
        if time.monotonic() > give_up:
            raise DeadlineExceeded(
                f"process {launcher}, the launcher of {paths.root}, was asked to end and has not within {wait_s:.0f} s "
                f"- expected it to. `kill -9 {launcher}` ends it; nothing that was trained is lost."
            )
        time.sleep(POLL_S)


def _parse(argv: list[str]) -> Path:
    parser = ArgumentParser(
        prog="trireme cancel",
        description="Ends a run. What it has trained stays, and `--resume` goes on from there.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    folder: Path = parser.parse_args(argv).run
    return folder
