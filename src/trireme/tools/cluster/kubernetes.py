"""Kubernetes: one indexed Job over all machines of a run, a headless Service that gives them names, and a Secret.

The manifests use core resources only, and no operator. Pod N is machine N, and a pod that replaces it keeps its name.
The Job succeeds with the orchestrator's pod, and Kubernetes then ends the others.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping

from trireme.base.errors import FINAL_EXIT_CODES, ConfigError, TriremeError
from trireme.tools.cluster.job import (
    END_S,
    NODE_SCRIPT,
    TEMPLATES,
    Job,
    Submission,
    SubmitOptions,
    call_scheduler,
    node_script,
)
from trireme.tools.templates import render

FILES = "/etc/trireme"
MOUNT = "/runs"  # the volume's folder in a pod; relative output folders lie in it
LABEL = "trireme-submission"  # also in manifests.yaml.j2
MAX_LOG_REQUESTS = 64  # pods whose logs kubectl reads at once


def name_of(job: Job) -> str:
    """Return the Job's name, a DNS label. Pods and their addresses are named after it."""
    # at most 63 letters for a label, with the id and the machine's number behind
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:30].strip("-")
    start = plain if plain[:1].isalpha() else f"run-{plain}".strip("-")
    return f"{start}-{job.id.partition('-')[2].lower()}"


def addresses_of(job: Job) -> list[str]:
    """Return the addresses of all machines, in order."""
    if job.plan.is_single:
        return ["127.0.0.1"]
    return [f"{name_of(job)}-{machine}.{name_of(job)}" for machine in range(job.plan.num_nodes)]


def manifests(job: Job, options: SubmitOptions, secrets: Mapping[str, str]) -> str:
    """Render all resources as YAML, in the order in which they are created."""
    # Kubernetes reads `Gi`, and the option has Slurm's form, `G`
    wanted = {
        "cpu": options.cpus_per_node,
        "memory": f"{options.memory_per_node}i" if options.memory_per_node else None,
        "nvidia.com/gpu": job.plan.gpus_per_node,
    }
    # a pod learns from its index in the Job which machine of the run it is
    command = f'exec bash {FILES}/{NODE_SCRIPT} "$JOB_COMPLETION_INDEX" {shlex.join(addresses_of(job))}'
    return render(
        TEMPLATES,
        "manifests.yaml",
        job=job,
        options=options,
        name=name_of(job),
        script=node_script(job, to_terminal=True),
        secrets=secrets,
        final_codes=FINAL_EXIT_CODES,
        end_s=END_S,
        command=command,
        limits={name: str(value) for name, value in wanted.items() if value},
        files=FILES,
        mount=MOUNT,
    )


def submit(submission: Submission, rendered: str) -> None:
    """Create all resources of `rendered`, or none. Secrets go through a pipe.

    Raises: ConfigError with the cluster's answer.
    """
    answer = _kubectl(submission, "create", "--filename", "-", stdin=rendered)
    if answer.returncode:
        # a half-created job would hold its secrets and its name
        _delete(submission)
        raise ConfigError(
            f"Kubernetes rejects the job: {answer.stderr.strip()} - expected it to create every resource that "
            "`--dry-run` shows. What it had created was deleted. `kubectl auth can-i create jobs` and "
            "`kubectl config current-context` help."
        )


def state_of(submission: Submission) -> str:
    """Return the job's row of `kubectl get job`: "x-ab12   Running   0/3   5m", say."""
    answer = _kubectl(submission, "get", "job", submission.job, "--no-headers")
    return (answer.stdout or answer.stderr).strip()


def ask_inside(submission: Submission) -> str | None:
    """Run `trireme status` in a pod, which has the run's files; None if no pod answers."""
    answer = _kubectl(submission, "exec", f"job/{submission.job}", "--", "trireme", "status", submission.run)
    return answer.stdout if answer.returncode == 0 else None


def log_command(submission: Submission, *, process: str | None, lines: int, follow: bool) -> list[str]:
    """Return the command that shows the logs of all pods; or that of a process, whose log each pod sees."""

    more = ["--follow"] if follow else []
    if process is None:
        more += [f"--tail={lines}", "--prefix", f"--max-log-requests={MAX_LOG_REQUESTS}"]
        return _command(submission, "logs", "--selector", f"{LABEL}={submission.id}", *more)
    # the log of one process is a file on the volume, which any pod can read
    inside = ["trireme", "logs", f"--lines={lines}", *more, "--", submission.run, process]
    return _command(submission, "exec", f"job/{submission.job}", "--", *inside)


def cancel(submission: Submission) -> None:
    """Delete all resources but the volume.

    Raises: TriremeError with the cluster's answer.
    """
    answer = _delete(submission)
    if answer.returncode:
        raise TriremeError(
            f"Kubernetes did not delete job {submission.job}: {answer.stderr.strip()} - expected it to be deleted. "
            f"`kubectl get all --selector {LABEL}={submission.id}` shows what is left."
        )


def _delete(submission: Submission) -> subprocess.CompletedProcess[str]:
    kinds = "job,service,secret,configmap"
    return _kubectl(submission, "delete", kinds, "--selector", f"{LABEL}={submission.id}", "--wait=false")


def _kubectl(submission: Submission, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return call_scheduler(*_command(submission, *words), stdin=stdin)


def _command(submission: Submission, *words: str) -> list[str]:
    return ["kubectl", *(["--namespace", submission.namespace] if submission.namespace else []), *words]
