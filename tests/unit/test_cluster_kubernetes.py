"""Manifests: valid by Kubernetes' own schemas, and they say what a run needs."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from trireme.base.errors import ConfigError
from trireme.launch.cluster.job import Job, Resources, Submission
from trireme.launch.cluster.kubernetes import (
    Options,
    addresses_of,
    describe_status,
    hide,
    log_command,
    manifests,
    name_of,
    on_volume,
    submit,
    to_yaml,
)
from trireme.launch.cluster.node_script import node_script
from trireme.launch.cluster.nodes import Wanted, plan_nodes

VERSIONS = ("1.33", "1.37")  # the first in which all of it is stable, and the newest
SECRETS = {"API_KEY": "s3cret", "TRIREME_TOKEN": "t0k3n"}


def job(**wanted: int) -> Job:
    return Job(
        id="20260102-030405-ab12",
        name="Qwen3 30B_wiki!",
        plan=plan_nodes(Wanted(**wanted)),
        run=Path("/runs/outputs/wiki"),
        state=Path("/runs/outputs/wiki.submissions/20260102-030405-ab12"),
        folder=Path("outputs/wiki.submissions/20260102-030405-ab12"),
        run_toml='max_steps = 3\nname = "a: b"\n\n[model]\nname = "m"\n',
    )


def rendered(
    given: Job, resources: Resources | None = None, options: Options | None = None
) -> dict[str, dict[str, Any]]:
    """By kind; what a cluster would read from the file."""
    options = options or Options("registry/trireme:1", storage="500Gi")
    made = manifests(given, resources or Resources(), options, node_script(given), SECRETS, Path("/runs"))
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(to_yaml(made))}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("wanted", [{"nodes": 1, "gpus_per_node": 0}, {"nodes": 4, "gpus_per_node": 8}])
def test_every_manifest_is_valid_by_kubernetes_own_schema(version, wanted):
    found = rendered(
        job(**wanted),
        Resources(time="1-00:00:00", cpus_per_node=96, memory_per_node="900G"),
        Options("i", namespace="lab", storage="2Ti", storage_class="fast"),
    )
    assert set(found) == {"ConfigMap", "Secret", "PersistentVolumeClaim", "Job"} | (
        {"Service"} if wanted["nodes"] > 1 else set()
    )
    for manifest in found.values():
        kubernetes_validate.validate(manifest, version, strict=True)
        assert manifest["metadata"]["namespace"] == "lab"


def test_a_schema_that_is_broken_is_noticed():
    """The validator sees what is inside a pod, too."""
    broken = rendered(job(nodes=2, gpus_per_node=8))["Job"]
    broken["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_files_reach_the_pods_as_they_are():
    given = job(nodes=3, gpus_per_node=8)
    data = rendered(given)["ConfigMap"]["data"]
    assert data == {"run.toml": given.run_toml, "node.sh": node_script(given)}


def test_pods_are_machines_with_names_that_stay():
    given = job(nodes=3, gpus_per_node=8)
    found = rendered(given)
    name = name_of(given)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-{99}") <= 63
    assert addresses_of(given) == [f"{name}-{index}.{name}" for index in range(3)]
    spec, pod = found["Job"]["spec"], found["Job"]["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert pod["subdomain"] == found["Service"]["metadata"]["name"] == found["Job"]["metadata"]["name"] == name
    assert found["Service"]["spec"]["publishNotReadyAddresses"]
    labels = found["Job"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()


def test_a_pods_command_names_its_own_number_and_all_addresses():
    given = job(nodes=2, gpus_per_node=8)
    container = rendered(given)["Job"]["spec"]["template"]["spec"]["containers"][0]
    shell = container["command"][2].replace("exec bash", "printf '%s\\n'")
    said = subprocess.run(
        ["bash", "-c", shell], env={"JOB_COMPLETION_INDEX": "1"}, capture_output=True, text=True, timeout=10
    )
    assert said.stdout.split() == ["/etc/trireme/node.sh", "1", *addresses_of(given)]


def test_the_run_succeeds_with_the_orchestrators_pod_and_fails_with_any():
    spec = rendered(job(nodes=3, gpus_per_node=8))["Job"]["spec"]
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "2"}]}
    assert spec["maxFailedIndexes"] == 0
    ignored, final = spec["podFailurePolicy"]["rules"]
    assert ignored["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    assert final["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_resources_are_each_pods_own():
    found = rendered(job(nodes=2, gpus_per_node=8), Resources(time="30", cpus_per_node=64, memory_per_node="500G"))[
        "Job"
    ]["spec"]
    assert found["activeDeadlineSeconds"] == 1800
    assert found["template"]["spec"]["containers"][0]["resources"]["limits"] == {
        "cpu": "64",
        "memory": "500Gi",
        "nvidia.com/gpu": "8",
    }


def test_a_volume_that_exists_is_used_and_none_is_made():
    found = rendered(job(nodes=2, gpus_per_node=8), options=Options("i", claim="lab-data"))
    assert "PersistentVolumeClaim" not in found
    volumes = {volume["name"]: volume for volume in found["Job"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == "lab-data"


@pytest.mark.parametrize(("nodes", "mode"), [(1, "ReadWriteOnce"), (2, "ReadWriteMany")])
def test_a_volume_for_several_machines_is_one_that_several_may_write_to(nodes, mode):
    found = rendered(job(nodes=nodes, gpus_per_node=8))
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == [mode]


def test_secrets_are_in_the_secret_alone_and_never_shown():
    given = job(nodes=2, gpus_per_node=8)
    made = manifests(given, Resources(), Options("i", storage="1Gi"), node_script(given), SECRETS, Path("/runs"))
    for manifest in made:
        text = to_yaml([manifest])
        assert ("s3cret" in text) == (manifest["kind"] == "Secret")
    shown = to_yaml(hide(made))
    assert "s3cret" not in shown
    assert "t0k3n" not in shown
    assert "API_KEY: (hidden)" in shown


@pytest.mark.parametrize(("folder", "there"), [("outputs", "/runs/outputs"), ("/mnt/lab", "/mnt/lab")])
def test_output_lies_on_the_volume(folder, there):
    assert on_volume(Path(folder)) == Path(there)


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """In place of kubectl: notes its words and input, and answers with what `answer` holds."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/bash\necho "$*" >>{tmp_path}/words\n[ "${{*: -1}}" != - ] || cat >{tmp_path}/given\n'
        f"cat {tmp_path}/answer >&2 2>/dev/null\n[ ! -s {tmp_path}/answer ]\n"
    )
    program.chmod(0o755)
    (tmp_path / "answer").touch()
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return tmp_path


def test_all_is_made_at_once_and_secrets_go_through_a_pipe(kubectl):
    given = job(nodes=2, gpus_per_node=8)
    options = Options("i", namespace="lab", claim="c")
    made = manifests(given, Resources(), options, node_script(given), SECRETS, Path("/runs"))
    assert submit(given, made, options) == name_of(given)
    assert (kubectl / "words").read_text() == "--namespace lab create --filename -\n"
    assert list(yaml.safe_load_all((kubectl / "given").read_text())) == made


def test_what_the_cluster_refuses_is_taken_back(kubectl):
    (kubectl / "answer").write_text('jobs.batch is forbidden: User "x" cannot create resource "jobs"')
    given = job(nodes=2, gpus_per_node=8)
    options = Options("i", storage="1Gi")
    made = manifests(given, Resources(), options, node_script(given), SECRETS, Path("/runs"))
    with pytest.raises(ConfigError, match="cannot create resource"):
        submit(given, made, options)
    assert f"--selector trireme-submission={given.id}" in (kubectl / "words").read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, "PENDING, 0 of 0 pods ready"),
        ({"active": 3, "ready": 2, "failed": 1}, "RUNNING, 2 of 3 pods ready, 1 replaced"),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, "COMPLETED"),
        ({"conditions": [{"type": "Failed", "status": "True", "message": "no"}]}, "FAILED (no)"),
        ({"conditions": [{"type": "Failed", "status": "False"}], "active": 1}, "PENDING, 0 of 1 pods ready"),
    ],
)
def test_a_jobs_status_in_words(status, said):
    assert describe_status(status) == said


def test_logs_of_one_process_are_those_of_its_machine():
    given = job(nodes=3, gpus_per_node=8)
    record = Submission(given.id, "kubernetes", name_of(given), str(given.run), given.plan.by_name)
    command = log_command(record, machine=record.processes["inference.1"], lines=5, follow=True)
    assert "trireme-submission=20260102-030405-ab12,batch.kubernetes.io/job-completion-index=1" in command
    assert command[-1] == "--follow"
    assert replace(record, namespace="lab").leader == 2
