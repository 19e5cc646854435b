"""Slurm: one batch job over all machines of a run, as a script, and the calls of Slurm's own commands.

Before its time limit the job gets SIGTERM. The run then ends in good order, and the job puts itself back into the
queue, where it resumes.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from trireme.base.errors import ConfigError, TriremeError
from trireme.tools.cluster.job import (
    END_S,
    GRACE_S,
    SECRETS,
    TEMPLATES,
    Job,
    Submission,
    SubmitOptions,
    call_scheduler,
)
from trireme.tools.templates import render

SCRIPT = "job.sbatch"
CANCELLED = "cancelled"  # a mark: the job must not requeue itself
ENDED = "ended"  # holds the exit code


def batch_script(job: Job, options: SubmitOptions, *, workdir: Path) -> str:
    """Render the batch script. Machines are taken whole, unless the user says how much of one is enough."""
    return render(
        TEMPLATES,
        SCRIPT,
        name=re.sub(r"[^A-Za-z0-9_.-]+", "-", job.name) or "trireme",
        plan=job.plan,
        options=options,
        workdir=workdir,
        here=job.state,
        end_s=END_S,
        grace_s=GRACE_S + 20,  # the machines wait for their processes meanwhile
    )


def is_here() -> bool:
    return shutil.which("sbatch") is not None


def check_submission(script: str) -> str:
    """Ask Slurm whether it accepts the job, and when it would start. Submits nothing.

    Raises: ConfigError with Slurm's answer where it does not.
    """
    return _sbatch(["--test-only"], script).replace("sbatch: ", "").strip()


def submit(script: Path) -> str:
    """Submit the script and return Slurm's job number."""
    return _sbatch(["--parsable"], script.read_text()).strip().partition(";")[0]


def _sbatch(options: list[str], script: str) -> str:
    """Pass the script through standard input, as a dry run writes no file."""
    answer = call_scheduler("sbatch", *options, stdin=script)
    if not answer.returncode:
        return answer.stdout + answer.stderr
    lines = [line for line in answer.stderr.splitlines() if line]
    reason = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines)
    advice = "`sinfo` shows what the cluster has."
    if "controller" in reason or "configuration source" in reason:
        advice = "`scontrol ping` says whether Slurm's controller can be reached from here."
    elif "partition" in reason.lower():
        names = [name.rstrip("*") for name in call_scheduler("sinfo", "--noheader", "--format=%P").stdout.split()]
        advice = f"Choose one with `--partition`: {', '.join(names) or 'none is known'}."
    elif "node configuration" in reason.lower():
        machines = "; ".join(call_scheduler("sinfo", "--noheader", "--format=%P %D x %G").stdout.splitlines())
        advice = f"Change `--nodes`, `--gpus-per-node` or `--partition`. The cluster has (machines, GPUs): {machines}."
    raise ConfigError(f"Slurm rejects the job: {reason} - expected a job that the cluster can run. {advice}")


def state_of(submission: Submission) -> str:
    """Return "RUNNING on n[1-2]", "PENDING (Priority)", "COMPLETED", …; read from disk once Slurm has forgotten it."""
    job = submission.job
    if not is_here():
        return f"job {job}; Slurm's commands are not in PATH here"
    if row := call_scheduler("squeue", "--noheader", "--jobs", job, "--format=%T|%R").stdout.strip():
        state, _, where = row.removesuffix("|(None)").partition("|")  # no reason before Slurm's scheduler saw the job
        if not where:
            return state
        return f"{state} {where}" if where.startswith("(") else f"{state} on {where}"
    if found := re.search(r"JobState=(\w+)", call_scheduler("scontrol", "show", "job", job).stdout):
        return found[1]
    if shutil.which("sacct"):
        lines = call_scheduler("sacct", "--noheader", "-X", "--jobs", job, "--format=State%40").stdout.splitlines()
        if lines:
            return lines[-1].strip()
    try:
        return f"ended with exit code {(submission.folder / ENDED).read_text().strip()}"
    except OSError:
        return "no longer known to Slurm"


def machines_of(submission: Submission) -> list[str]:
    """Return the machines of a running job."""
    listed = (
        call_scheduler("squeue", "--noheader", "--jobs", submission.job, "--format=%N").stdout.strip()
        if is_here()
        else ""
    )
    return call_scheduler("scontrol", "show", "hostnames", listed).stdout.split() if listed else []


def cancel(submission: Submission) -> None:
    """Cancel the job and delete its secrets.

    Raises: TriremeError with Slurm's answer.
    """
    mark = submission.folder / CANCELLED
    mark.touch()  # first: the job looks for it when it ends
    try:
        answer = call_scheduler("scancel", submission.job)
        if answer.returncode:
            raise TriremeError(
                f"`scancel {submission.job}` failed: {answer.stderr.strip()} - expected a job of yours. "
                "`squeue --me` shows them."
            )
    except TriremeError:
        mark.unlink()
        raise
    (submission.folder / SECRETS).unlink(missing_ok=True)


def logs_of(submission: Submission) -> list[Path]:
    """Return the job's own logs: steps, and what became of processes."""
    return sorted(submission.folder.glob("slurm-*.log"))
