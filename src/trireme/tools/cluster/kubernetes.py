"""Kubernetes: one indexed Job over all machines of a run, a headless Service that gives them names, a Secret, a volume.

The manifests use core resources only, and no operator. Pod N is machine N, and a pod that replaces it keeps its name.
The Job succeeds with the orchestrator's pod, and Kubernetes then ends the others.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
VOLUME = "/runs"  # where relative output folders lie
LABEL = "trireme-submission"  # as in manifests.yaml.j2
MAX_LOG_REQUESTS = 64  # pods whose logs kubectl reads at once


def on_volume(output_dir: Path) -> Path:
    """Return where a run's output lies in a pod."""
    return output_dir if output_dir.is_absolute() else Path(VOLUME) / output_dir


def name_of(job: Job) -> str:
    """Return the Job's name, a DNS label. Pods and their addresses are named after it."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:30].strip("-")
    start = plain if plain[:1].isalpha() else f"run-{plain}".strip("-")
    return f"{start}-{job.id.partition('-')[2].lower()}"


def addresses_of(job: Job) -> list[str]:
    """Return the addresses of all machines, in order."""
    if job.plan.is_single:
        return ["127.0.0.1"]
    return [f"{name_of(job)}-{machine}.{name_of(job)}" for machine in range(job.plan.num_nodes)]


def manifests(job: Job, options: SubmitOptions, secrets: Mapping[str, str], mount: Path) -> str:
    """Render all resources as YAML, in the order in which they are created.

    Args:
        mount: where the volume is mounted in a pod.
    """
    wanted = {
        "cpu": options.cpus_per_node,
        "memory": f"{options.memory_per_node}i" if options.memory_per_node else None,
        "nvidia.com/gpu": job.plan.gpus_per_node,
    }
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
        mount=mount,
    )


def is_here() -> bool:
    return shutil.which("kubectl") is not None


def submit(job: Job, rendered: str, namespace: str | None) -> None:
    """Create all resources of `rendered`, or none. Secrets go through a pipe.

    Raises: ConfigError with the cluster's answer.
    """
    answer = _kubectl(namespace, "create", "--filename", "-", stdin=rendered)
    if answer.returncode:
        _delete(job.id, namespace, "persistentvolumeclaim")
        raise ConfigError(
            f"Kubernetes rejects the job: {answer.stderr.strip()} - expected it to create every resource that "
            "`--dry-run` shows. What it had created was deleted. `kubectl auth can-i create jobs` and "
            "`kubectl config current-context` help."
        )


def state_of(submission: Submission) -> str:
    answer = _kubectl(submission.namespace, "get", "job", submission.job, "--output", "json")
    if answer.returncode:
        return f"job {submission.job}: {answer.stderr.strip()}"
    return describe_status(json.loads(answer.stdout).get("status", {}))


def describe_status(status: Mapping[str, Any]) -> str:
    """Return a Job's status in a few words.

    Example:
        describe_status({"active": 3, "ready": 2})  # "RUNNING, 2 of 3 pods ready"
    """
    for condition in status.get("conditions", ()):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            why = f" ({condition['message']})" if condition["type"] == "Failed" and condition.get("message") else ""
            return f"{'COMPLETED' if condition['type'] == 'Complete' else 'FAILED'}{why}"
    active, ready = status.get("active", 0), status.get("ready", 0)
    failed = f", {status['failed']} replaced" if status.get("failed") else ""
    return f"{'RUNNING' if ready else 'PENDING'}, {ready} of {active} pods ready{failed}"


def ask_inside(submission: Submission) -> str | None:
    """Run `trireme status` in the orchestrator's pod, which has the run's files; None where the pod does not answer."""
    selector = f"{LABEL}={submission.id},batch.kubernetes.io/job-completion-index={submission.leader}"
    names = ["get", "pods", "--selector", selector, "--field-selector", "status.phase=Running", "--output", "name"]
    pods = _kubectl(submission.namespace, *names).stdout.split()
    if not pods:
        return None
    answer = _kubectl(submission.namespace, "exec", pods[-1], "--", "trireme", "status", submission.run)
    return answer.stdout if answer.returncode == 0 else None


def log_command(submission: Submission, *, machine: int | None, lines: int, follow: bool) -> list[str]:
    """Return the command that shows the logs of one machine, or of all."""
    selector = f"{LABEL}={submission.id}"
    if machine is not None:
        selector += f",batch.kubernetes.io/job-completion-index={machine}"
    command = ["kubectl", *_namespace(submission.namespace), "logs", "--selector", selector]
    command += [f"--tail={lines}", f"--max-log-requests={MAX_LOG_REQUESTS}"]
    return command + (["--prefix"] if machine is None else []) + (["--follow"] if follow else [])


def cancel(submission: Submission) -> None:
    """Delete all resources but the volume.

    Raises: TriremeError with the cluster's answer.
    """
    answer = _delete(submission.id, submission.namespace)
    if answer.returncode:
        raise TriremeError(
            f"Kubernetes did not delete job {submission.job}: {answer.stderr.strip()} - expected it to be deleted. "
            f"`kubectl get all --selector {LABEL}={submission.id}` shows what is left."
        )


def _delete(identity: str, namespace: str | None, *more: str) -> subprocess.CompletedProcess[str]:
    kinds = ",".join(["job", "service", "secret", "configmap", *more])
    return _kubectl(namespace, "delete", kinds, "--selector", f"{LABEL}={identity}", "--wait=false")


def _kubectl(namespace: str | None, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return call_scheduler("kubectl", *_namespace(namespace), *words, stdin=stdin)


def _namespace(namespace: str | None) -> list[str]:
    return ["--namespace", namespace] if namespace else []
