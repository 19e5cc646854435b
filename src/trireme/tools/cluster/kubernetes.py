"""Kubernetes: one indexed Job over all machines of a run, a headless Service that gives them names, a Secret, a volume.

Only what every cluster has: no operator, no resource of its own. Pod N is machine N, under a name that its successor
has too; the Job succeeds with the orchestrator's pod, and the others are ended then. Rendering is pure; `kubectl` does
the rest.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trireme.base.errors import FINAL_EXIT_CODES, ConfigError, TriremeError
from trireme.tools.cluster.job import Job, Resources, Submission, seconds_of
from trireme.tools.cluster.node_script import NODE_SCRIPT, RUN_TOML
from trireme.tools.cluster.secrets import HIDDEN

FILES = "/etc/trireme"
VOLUME = "/runs"  # where relative output folders lie
USER = 1000  # of the images in docker/; the volume is made theirs
END_S = 120
ASK_S = 60.0
LABEL = "trireme-submission"
PODS_ASKED = 64  # whose logs are read at once

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What only Kubernetes has."""

    image: str
    namespace: str | None = None  # kubectl's own where not given
    claim: str | None = None  # a volume that exists
    storage: str | None = None  # or one to make: "500Gi"
    storage_class: str | None = None
    restarts: int = 3  # of a pod


def on_volume(output_dir: Path) -> Path:
    """Where a run's output lies in a pod."""
    return output_dir if output_dir.is_absolute() else Path(VOLUME) / output_dir


def name_of(job: Job) -> str:
    """A label of DNS. Pods and their addresses are named after it."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:30].strip("-")
    start = plain if plain[:1].isalpha() else f"run-{plain}".strip("-")
    return f"{start}-{job.id.partition('-')[2].lower()}"


def addresses_of(job: Job) -> list[str]:
    return [f"{name_of(job)}-{node.index}.{name_of(job)}" for node in job.plan.nodes]


def manifests(
    job: Job, resources: Resources, options: Options, script: str, secrets: Mapping[str, str], mount: Path
) -> list[Manifest]:
    """In the order in which they are made.

    Args:
        script: what each pod runs.
        mount: where the volume is in a pod.
    """
    made = [_config(job, script), _secret(job, secrets)]
    if options.storage:
        made.append(_claim(job, options))
    if not job.plan.is_single:
        made.append(_service(job))
    made.append(_job(job, resources, options, mount))
    return [_in_namespace(manifest, options.namespace) for manifest in made]


def _in_namespace(manifest: Manifest, namespace: str | None) -> Manifest:
    return manifest | {"metadata": manifest["metadata"] | ({"namespace": namespace} if namespace else {})}


def _metadata(job: Job) -> Manifest:
    return {"name": name_of(job), "labels": {"app.kubernetes.io/name": "trireme", LABEL: job.id}}


def _config(job: Job, script: str) -> Manifest:
    data = {RUN_TOML: job.run_toml, NODE_SCRIPT: script}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job), "data": data}


def _secret(job: Job, secrets: Mapping[str, str]) -> Manifest:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(job), "stringData": dict(secrets)}


def _claim(job: Job, options: Options) -> Manifest:
    """Not deleted with the run: it holds what the run was for."""
    spec: Manifest = {
        "accessModes": ["ReadWriteOnce" if job.plan.is_single else "ReadWriteMany"],
        "resources": {"requests": {"storage": options.storage}},
    }
    if options.storage_class:
        spec["storageClassName"] = options.storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": _metadata(job), "spec": spec}


def _service(job: Job) -> Manifest:
    """Names before pods are ready: they wait for one another."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: job.id}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def _job(job: Job, resources: Resources, options: Options, mount: Path) -> Manifest:
    count = len(job.plan.nodes)
    limit = seconds_of(resources.time) if resources.time else None
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": options.restarts,
        "maxFailedIndexes": 0,  # a machine that is given up ends the run
        "successPolicy": {"rules": [{"succeededIndexes": str(job.plan.leader)}]},
        "podFailurePolicy": {"rules": _failure_rules()},
        **({"activeDeadlineSeconds": limit} if limit else {}),
        "template": {
            "metadata": {"labels": _metadata(job)["labels"]},
            "spec": _pod(job, resources, options, mount),
        },
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}


def _failure_rules() -> list[Manifest]:
    """An evicted pod is no fault of the run's; what trying again would repeat is not tried again."""
    final = {"containerName": "machine", "operator": "In", "values": list(FINAL_EXIT_CODES)}
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": final},
    ]


def _pod(job: Job, resources: Resources, options: Options, mount: Path) -> Manifest:
    pod: Manifest = {
        "restartPolicy": "Never",  # a pod that failed is replaced, under the same name
        "terminationGracePeriodSeconds": END_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [_container(job, resources, options, mount)],
        "volumes": [
            {"name": "files", "configMap": {"name": name_of(job)}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim or name_of(job)}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return pod | ({} if job.plan.is_single else {"subdomain": name_of(job)})


def _container(job: Job, resources: Resources, options: Options, mount: Path) -> Manifest:
    addresses = ["127.0.0.1"] if job.plan.is_single else addresses_of(job)
    command = f'exec bash {FILES}/{NODE_SCRIPT} "$JOB_COMPLETION_INDEX" {shlex.join(addresses)}'
    return {
        "name": "machine",
        "image": options.image,
        "command": ["bash", "-c", command],
        "env": [{"name": "HF_HOME", "value": str(PurePosixPath(mount) / "huggingface")}],
        "envFrom": [{"secretRef": {"name": name_of(job)}}],
        "resources": _limits(job, resources),
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": "files", "mountPath": FILES, "readOnly": True},
            {"name": "runs", "mountPath": str(mount)},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _limits(job: Job, resources: Resources) -> Manifest:
    wanted: Manifest = {}
    if resources.cpus_per_node:
        wanted["cpu"] = str(resources.cpus_per_node)
    if resources.memory_per_node:
        wanted["memory"] = f"{resources.memory_per_node}i"
    if job.plan.gpus_per_node:
        wanted["nvidia.com/gpu"] = str(job.plan.gpus_per_node)
    return {"limits": wanted, "requests": wanted} if wanted else {}


def hide(manifests: list[Manifest]) -> list[Manifest]:
    """As they may be shown, or kept on disk."""
    return [
        manifest | {"stringData": dict.fromkeys(manifest["stringData"], HIDDEN)}
        if manifest["kind"] == "Secret"
        else manifest
        for manifest in manifests
    ]


def to_yaml(manifests: list[Manifest]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Scripts and files as they are, line by line; nothing said by reference."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


# kubectl


def is_here() -> bool:
    return shutil.which("kubectl") is not None


def submit(job: Job, manifests: list[Manifest], options: Options) -> str:
    """Makes all of it, or nothing. Secrets go through a pipe.

    Returns: the Job's name.
    Raises: ConfigError with the cluster's answer.
    """
    answer = _kubectl(["create", "--filename", "-"], options.namespace, to_yaml(manifests))
    if answer.returncode:
        _delete(job.id, options.namespace, "persistentvolumeclaim")
        raise ConfigError(
            f"Kubernetes does not take the job: {answer.stderr.strip()} - expected it to make a ConfigMap, a Secret"
            f"{', a volume claim' if options.storage else ''}{'' if job.plan.is_single else ', a Service'} and a Job. "
            "What was made was deleted. `kubectl auth can-i create jobs` and `kubectl config current-context` help."
        )
    return name_of(job)


def state_of(submission: Submission) -> str:
    answer = _kubectl(["get", "job", submission.job, "--output", "json"], submission.namespace)
    if answer.returncode:
        return f"job {submission.job}: {answer.stderr.strip()}"
    return describe_status(json.loads(answer.stdout).get("status", {}))


def describe_status(status: Mapping[str, Any]) -> str:
    """
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
    """`trireme status` where the run's files are: in the orchestrator's pod. None where it does not answer."""
    pod = _pod_of(submission, submission.leader)
    command = ["exec", pod, "--", "trireme", "status", submission.run] if pod else None
    answer = _kubectl(command, submission.namespace) if command else None
    return answer.stdout if answer and answer.returncode == 0 else None


def _pod_of(submission: Submission, index: int) -> str | None:
    selector = f"{LABEL}={submission.id},batch.kubernetes.io/job-completion-index={index}"
    names = ["get", "pods", "--selector", selector, "--field-selector", "status.phase=Running", "--output", "name"]
    found = _kubectl(names, submission.namespace).stdout.split()
    return found[-1] if found else None


def log_command(submission: Submission, *, machine: int | None, lines: int, follow: bool) -> list[str]:
    selector = f"{LABEL}={submission.id}"
    if machine is not None:
        selector += f",batch.kubernetes.io/job-completion-index={machine}"
    return [
        "kubectl",
        *_namespace(submission.namespace),
        "logs",
        "--selector",
        selector,
        f"--tail={lines}",
        f"--max-log-requests={PODS_ASKED}",
        *(["--prefix"] if machine is None else []),
        *(["--follow"] if follow else []),
    ]


def cancel(submission: Submission) -> None:
    """The volume stays.

    Raises: TriremeError with the cluster's answer.
    """
    answer = _delete(submission.id, submission.namespace)
    if answer.returncode:
        raise TriremeError(
            f"Kubernetes did not delete job {submission.job}: {answer.stderr.strip()} - expected it to. "
            f"`kubectl get all --selector {LABEL}={submission.id}` shows what is left."
        )


def _delete(identity: str, namespace: str | None, *more: str) -> subprocess.CompletedProcess[str]:
    kinds = ",".join(["job", "service", "secret", "configmap", *more])
    return _kubectl(["delete", kinds, "--selector", f"{LABEL}={identity}", "--wait=false"], namespace)


def _kubectl(words: list[str], namespace: str | None, given: str = "") -> subprocess.CompletedProcess[str]:
    command = ["kubectl", *_namespace(namespace), *words]
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=ASK_S, check=False)
    except FileNotFoundError:
        raise ConfigError(
            "there is no `kubectl` in PATH - expected it, to talk to the cluster with. Install it, or write the "
            "manifests with `--dry-run` and apply them where it is."
        ) from None
    except subprocess.TimeoutExpired:
        raise TriremeError(
            f"`kubectl {words[0]}` has not answered for {ASK_S:.0f} s - expected the cluster to. "
            "`kubectl cluster-info` says whether it can be reached."
        ) from None


def _namespace(namespace: str | None) -> list[str]:
    return ["--namespace", namespace] if namespace else []


def notes(job: Job, options: Options, environments: tuple[str, ...]) -> Iterator[str]:
    yield f"the image {options.image} must hold trireme and the environments {', '.join(environments)}"
    if not job.plan.is_single:
        yield f"the volume {options.claim or name_of(job)} must be one that several pods write to (ReadWriteMany)"
