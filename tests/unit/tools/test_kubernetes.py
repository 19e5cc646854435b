"""Manifests: valid by Kubernetes' own schemas, and they say what a run needs."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from trireme.base.errors import ConfigError
from trireme.tools.cluster.cancel import command as cancel
from trireme.tools.cluster.job import Job, SubmitOptions, find_submission, node_script, submissions_of
from trireme.tools.cluster.kubernetes import addresses_of, manifests
from trireme.tools.cluster.nodes import ClusterPlan
from trireme.tools.cluster.status import command as status
from trireme.tools.cluster.submit import command as submit_run

VERSIONS = ("1.33", "1.37")  # the first in which all of it is stable, and the newest
SECRETS = {"API_KEY": "s3cret", "TRIREME_TOKEN": "t0k3n"}


def job(nodes: int, gpus_per_node: int = 8) -> Job:
    plan, run = ClusterPlan(nodes, gpus_per_node, nodes // 2), Path("/runs/outputs/wiki")
    state, folder = (Path(root, "outputs/wiki.submissions/20260102-030405-ab12") for root in ("/runs", ""))
    toml = 'max_steps = 3\nname = "a: b"\n\n[model]\nname = "m"\n'
    return Job("20260102-030405-ab12", "Qwen3 30B_wiki!", plan, run, state, folder, toml)


def rendered(given: Job, secrets: dict[str, str] = SECRETS, **options: Any) -> dict[str, dict[str, Any]]:
    given_options = SubmitOptions(**({"image": "registry/trireme:1", "volume": "runs"} | options))
    return by_kind(manifests(given, given_options, secrets))


def by_kind(text: str) -> dict[str, dict[str, Any]]:
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 0), (4, 8)])
def test_every_manifest_is_valid_by_kubernetes_own_schema(nodes, gpus):
    found = rendered(job(nodes, gpus), namespace="lab", cpus_per_node=96, memory_per_node="900G")
    assert found.keys() == {"ConfigMap", "Secret", "Job", *(["Service"] if nodes > 1 else [])}
    for manifest in found.values():
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
        assert manifest["metadata"]["namespace"] == "lab"


def test_kubernetes_secrets_appear_only_in_the_secret_manifest():
    given = job(2)
    found = rendered(given)
    assert found["ConfigMap"]["data"] == {"run.toml": given.run_toml, "node.sh": node_script(given, to_terminal=True)}
    command = found["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
    shell = command[2].replace("exec bash", "printf '%s\n'")
    typed = subprocess.check_output(["bash", "-c", shell], env={"JOB_COMPLETION_INDEX": "1"}, text=True, timeout=10)
    assert typed.split() == ["/etc/trireme/node.sh", "1", *addresses_of(given)]
    assert found["Secret"]["stringData"] == SECRETS
    assert [kind for kind, manifest in found.items() if "s3cret" in str(manifest)] == ["Secret"]


def test_the_run_succeeds_with_the_orchestrators_pod_and_fails_with_any():
    spec = rendered(job(3), cpus_per_node=64, memory_per_node="500G")["Job"]["spec"]
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "1"}]}
    assert (spec["maxFailedIndexes"], spec["template"]["spec"]["restartPolicy"]) == (0, "Never")
    ignored, final = spec["podFailurePolicy"]["rules"]
    assert ignored["onPodConditions"][0]["type"] == "DisruptionTarget"
    (container,) = spec["template"]["spec"]["containers"]
    codes = final["onExitCodes"]
    assert (final["action"], codes["values"], codes["containerName"]) == ("FailJob", [2, 3], container["name"])
    assert container["resources"]["limits"] == {"cpu": "64", "memory": "500Gi", "nvidia.com/gpu": "8"}


def test_every_text_reaches_the_cluster_as_it_is():
    for text in ("a\"b'c: {d} #", "x\n y\n\n", "  first\n2nd", "\t\x7f\x85\u2028é\U0001f600", "- no"):
        given = replace(job(1), run_toml=text)
        found = rendered(given, {"ODD": text}, image=text, volume=text, namespace=text)
        assert found["Secret"]["stringData"]["ODD"] == found["ConfigMap"]["data"]["run.toml"] == text
        pod = found["Job"]["spec"]["template"]["spec"]
        claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if volume["name"] == "runs"]
        assert claims == [pod["containers"][0]["image"]] == [found["Job"]["metadata"]["namespace"]] == [text]


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


def test_refused_kubernetes_submission_is_taken_back(kubectl, monkeypatch):
    monkeypatch.chdir(kubectl)
    Path("run.toml").write_text('orchestrator.env = [{ id = "reverse-text" }]')
    words = ["run.toml", "--on", "kubernetes", "--image", "i", "--volume", "c", "--gpus-per-node", "0", "--name", "x"]
    Path("outputs").touch()  # in the place of a folder
    with pytest.raises(ConfigError, match="could not be written"):
        submit_run(words)
    for place in ("/runs", "/data/runs", "../outputs"):
        with pytest.raises(ConfigError, match="expected one inside of /runs"):
            submit_run([*words[:-2], "--output-dir", place])
    assert not (kubectl / "words").exists()
    Path("outputs").unlink()
    submit_run([*words, "--namespace", "lab"])
    found = find_submission(Path("outputs/x"))
    assert (kubectl / "words").read_text() == "--namespace lab create --filename -\n"
    made = by_kind((kubectl / "given").read_text())
    assert made["Job"]["metadata"]["name"] == found.job
    assert len(made["Secret"]["stringData"]["TRIREME_TOKEN"]) >= 32
    assert "(hidden)" in (found.folder / "manifests.yaml").read_text()
    (kubectl / "answer").write_text("forbidden")
    with pytest.raises(ConfigError, match="forbidden"):
        submit_run([*words[:-1], "y"])
    deleted = (kubectl / "words").read_text().splitlines()[-1]
    assert deleted.startswith("delete job,service,secret,configmap --selector trireme-submission=")
    assert find_submission(Path("outputs/y")) is None


def test_forged_submission_record_reaches_no_scheduler_command(kubectl):
    record = {"id": "20260102-030405-ab12", "scheduler": "kubernetes", "job": "x-ab12", "run": "/runs/x"}
    file = submissions_of(kubectl / "x") / "1" / "submission.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(record | {"namespace": None}))
    assert find_submission(kubectl / "x").job == "x-ab12"
    odd = {"job": "--kubeconfig=config", "id": "x,app!=y", "namespace": "-n", "run": "--follow"}
    for changed in ({"job": ["7"]}, *({key: value} for key, value in odd.items())):
        file.write_text(json.dumps(record | changed))
        for verb in (status, cancel):
            with pytest.raises(ConfigError, match="cannot be read"):
                verb([str(kubectl / "x")])
    assert not (kubectl / "words").exists()
