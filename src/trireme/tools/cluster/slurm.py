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
ENDED = "ended"  # holds the exit code
MAX_REQUEUES = 20  # requeues of one job after its time limit
MAY_START = (
    *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "COMPLETING", "STAGE_OUT"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
)
"""States of a job that runs, or will: one that is ending may be about to be requeued."""
UNKNOWN = "unknown"
"""State of a job while Slurm's controller does not answer."""


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
        max_requeues=MAX_REQUEUES,
    )


def is_here() -> bool:
    return shutil.which("sbatch") is not None


def check_submission(script: str) -> str:
    """Ask Slurm whether it accepts the job, and when it would start. Submits nothing.

    Raises: ConfigError with Slurm's answer if it does not.
    """
    return _sbatch("--test-only", script).replace("sbatch: ", "").strip()


def submit(script: str) -> str:
    """Submit the script and return Slurm's job number.

    Raises: ConfigError with Slurm's answer if it rejects the job.
    """
    return _sbatch("--parsable", script).strip().partition(";")[0]


def _sbatch(option: str, script: str) -> str:
    """Pass the script through standard input, as a dry run writes no file."""
    answer = call_scheduler("sbatch", option, stdin=script)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if line]
        reason = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines)
        raise ConfigError(
            f"Slurm rejects the job: {reason} - expected a job that the cluster can run. "
            "`sinfo --format='%P %D %G'` shows its partitions with their machines and GPUs (`--partition`, `--nodes`, "
            "`--gpus-per-node`), and `scontrol ping` whether its controller can be reached."
        )
    return answer.stdout or answer.stderr  # `--test-only` answers on stderr, as warnings do


def state_of(submission: Submission) -> str:
    """Return "RUNNING on n[1-2]", "PENDING (Priority)", "COMPLETED on n1", …; from disk once Slurm has forgotten it."""
    job = submission.job
    if not is_here():
        return f"job {job}; Slurm's commands are not in PATH here"
    answer = call_scheduler("squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T %R")
    if row := answer.stdout.split():
        state, where = row[0], " ".join(row[1:]).removeprefix("(None)")  # no reason before Slurm's scheduler saw it
        return f"{state} {'' if where.startswith('(') else 'on '}{where}" if where else state
    # Slurm forgets jobs; the batch script writes its exit code to disk
    try:
        return f"ended with exit code {(submission.folder / ENDED).read_text().strip()}"
    except OSError:
        pass

    if answer.returncode and "Invalid job id" not in answer.stderr:
        return f"{UNKNOWN} ({answer.stderr.strip()})"
    return f"no longer known to Slurm; `sacct -j {job}` may show more"


def may_run(state: str) -> bool:
    """Return whether the job of this state (of `state_of`) runs, or may start yet."""
    return state.partition(" ")[0] in (*MAY_START, UNKNOWN)


def cancel(submission: Submission) -> None:
    """Cancel the job and delete its secrets.

    Raises: TriremeError with Slurm's answer.
    """
    answer = call_scheduler("scancel", submission.job)
    if answer.returncode:
        raise TriremeError(
            f"`scancel {submission.job}` failed: {answer.stderr.strip()} - expected a job of yours. "
            "`squeue --me` shows them."
        )
    (submission.folder / SECRETS).unlink(missing_ok=True)
