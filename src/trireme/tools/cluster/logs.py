"""`trireme logs RUN [PROCESS] [-f]`: the logs of a run, on this machine or on the cluster that it was submitted to."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from difflib import get_close_matches
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.tools.cluster import kubernetes
from trireme.tools.cluster.job import Submission, find_submission

ENDING = ".stdout"


def command(argv: list[str]) -> int:
    """Replace this process by the program that shows the logs.

    Raises: ConfigError if there are none, or none of that name.
    """
    parser = ArgumentParser(
        prog="trireme logs",
        description="Shows the newest lines of a run's logs: of its job where it was submitted, of each process, or of "
        "one.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("process", metavar="PROCESS", nargs="?", help="inference, orchestrator, trainer, …")
    parser.add_argument("-f", "--follow", action="store_true", help="keep showing new lines")
    parser.add_argument("-n", "--lines", metavar="N", type=int, default=20, help="lines of each log; default 20")
    options = parser.parse_args(argv)
    program = _log_command(options, find_submission(options.run))
    sys.stdout.flush()
    os.execvp(program[0], program)


def _log_command(options: Namespace, submission: Submission | None) -> list[str]:
    if submission and submission.scheduler == "kubernetes":
        return kubernetes.log_command(submission, process=options.process, lines=options.lines, follow=options.follow)

    folder = RunPaths(Path(submission.run) if submission else options.run).logs
    files = {file.name.removesuffix(ENDING): file for file in sorted(folder.glob(f"*{ENDING}"))}

    # Without a name, show the job's own log if there is one: it reports which process failed.
    if (process := options.process) is None:
        of_job = sorted(submission.folder.glob("slurm-*.log")) if submission else []  # they report all exits
        shown = of_job or list(files.values())
    elif process in files:
        shown = [files[process]]
    else:
        near = get_close_matches(process, files, n=1)
        raise ConfigError(
            f"There is no log of `{process}`: {folder} has {', '.join(files) or 'none'}. "
            + (f"Did you mean `{near[0]}`?" if near else "Leave the name out to see all.")
        )

    if not shown:
        advice = "Check the folder."
        if submission:
            advice = f"`trireme status {submission.run}` says whether job {submission.job} runs."
        raise ConfigError(f"There are no logs in {folder}. Expected those of a run that was started. {advice}")

    # By name and with retries: a log may not exist yet, or be replaced.
    follow = ["--follow=name", "--retry"] if options.follow else []
    return ["tail", f"--lines={options.lines}", *follow, *map(str, shown)]
