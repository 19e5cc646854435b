"""`trireme logs RUN [PROCESS] [-f]`: what a run says, on this machine or on the cluster that it was submitted to."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from difflib import get_close_matches
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.tools.cluster import kubernetes, slurm
from trireme.tools.cluster.job import Submission, find_submission

ENDING = ".stdout"


def logs(argv: list[str]) -> int:
    """Becomes the program that shows them.

    Raises: ConfigError where there are none, or none of that name.
    """
    options = _parse(argv)
    submission = find_submission(options.run)
    command = _command(options, submission)
    sys.stdout.flush()
    os.execvp(command[0], command)


def _command(options: Namespace, submission: Submission | None) -> list[str]:
    if submission and submission.scheduler == "kubernetes":
        machine = _machine_of(options.process, submission) if options.process else None
        return kubernetes.log_command(submission, machine=machine, lines=options.lines, follow=options.follow)
    run = Path(submission.run) if submission else options.run
    files = _logs_of(run)
    if options.process:
        shown = [_one(options.process, files, run)]
    else:
        shown = (submission and slurm.logs_of(submission)) or list(files.values())
    if not shown:
        raise ConfigError(
            f"there are no logs in {RunPaths(run).logs} - expected those of a run that was started. "
            f"{_when(submission) or 'Check the folder.'}"
        )
    return [
        "tail",
        f"--lines={options.lines}",
        *(["--follow=name", "--retry"] if options.follow else []),
        *map(str, shown),
    ]


def _when(submission: Submission | None) -> str:
    return f"`trireme status {submission.run}` says whether job {submission.job} runs." if submission else ""


def _logs_of(run: Path) -> dict[str, Path]:
    return {file.name.removesuffix(ENDING): file for file in sorted(RunPaths(run).logs.glob(f"*{ENDING}"))}


def _one(process: str, files: dict[str, Path], run: Path) -> Path:
    if process in files:
        return files[process]
    raise ConfigError(_unknown(process, list(files), f"{RunPaths(run).logs} has"))


def _machine_of(process: str, submission: Submission) -> int:
    if process in submission.processes:
        return submission.processes[process]
    raise ConfigError(_unknown(process, list(submission.processes), "the run has"))


def _unknown(process: str, known: list[str], has: str) -> str:
    near = get_close_matches(process, known, n=1)
    advice = f"Did you mean `{near[0]}`?" if near else "Leave it out to see all."
    return f"there is no log of `{process}` - {has} {', '.join(known) or 'none'}. {advice}"


def _parse(argv: list[str]) -> Namespace:
    parser = ArgumentParser(
        prog="trireme logs",
        description="Shows the newest lines of a run's logs: of its job where it was submitted, of each process, or of "
        "one.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("process", metavar="PROCESS", nargs="?", help="inference, orchestrator, trainer, …")
    parser.add_argument("-f", "--follow", action="store_true", help="go on showing what comes")
    parser.add_argument("-n", "--lines", metavar="N", type=int, default=20, help="of each; 20 where not given")
    return parser.parse_args(argv)
