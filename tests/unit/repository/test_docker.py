"""`docker/`: what can be known of images and services without building or starting them."""

import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema.validators import validator_for

from support.engines.answering import answering_http
from trireme.base.token import TOKEN
from trireme.cli.inference import inference
from trireme.cli.orchestrator import orchestrator
from trireme.cli.rl import rl
from trireme.cli.trainer import trainer

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
PORTS = {"inference": "http 8000", "orchestrator": "status 8001, batches 5555", "trainer": "weights 5556"}
COMMANDS = {"inference": inference, "orchestrator": orchestrator, "trainer": trainer, "rl": rl}
SECRET = "0123456789abcdef0123456789abcdef"
DEADLINE_S = 60


def texts(word: str) -> list[str]:
    """The Dockerfile's instructions of one kind, with continued lines joined and comments left out."""
    plain = re.sub("^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(f"^{word} (.*)", plain, re.MULTILINE)


def compose(file: str = "compose.yaml", **variables: str) -> dict[str, Any]:
    """As the compose program would read it: variables filled in, their defaults where they are not set."""

    def fill(found: re.Match[str]) -> str:
        name, otherwise, text = found.groups()
        if name not in variables and otherwise == "?":
            raise LookupError(f"{name}: {text}")
        return variables.get(name, text)

    return yaml.safe_load(re.sub(r"\$\{(\w+):([-?])([^}]*)\}", fill, (DOCKER / file).read_text()))


def test_the_linter_of_dockerfiles_finds_nothing():
    command = [Path(sys.executable).with_name("hadolint"), DOCKER / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_compose_files_are_what_their_specification_says():
    schema = json.loads((files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json").read_text())
    validator = validator_for(schema)(schema)
    for content in (compose(TRIREME_TOKEN=SECRET), compose("compose.gpu.yaml")):
        assert [error.message for error in validator.iter_errors(content)] == []


def test_all_that_an_image_copies_is_there_and_not_kept_out():
    kept = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for text in texts("COPY") for name in text.split()[:-1] if not name.startswith("--")}
    assert copied - {"."} <= kept
    assert all((ROOT / name).exists() for name in kept)
    assert {"src", "packages", "configs", "environments", "models", "docker", "pyproject.toml"} <= kept


def test_the_command_of_an_image_is_ready_to_run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    program, *argv = json.loads(texts("CMD")[0])
    assert COMMANDS[program]([*argv, "--dry-run", "--device", "cpu", "--output-dir", str(tmp_path)]) == 0
    assert "not ready" not in capsys.readouterr().out


@pytest.mark.parametrize(("service", "ports"), PORTS.items())
def test_each_service_is_a_process_of_one_run_with_a_token_and_no_rights(service, ports, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(TOKEN, SECRET)
    found = compose(TRIREME_TOKEN=SECRET, TRIREME_RUN="configs/wiki-search/rl.toml")["services"][service]
    program, *argv = found["command"]
    assert program == service
    assert "--resume" in argv, "a container that is started again resumes its run"
    with pytest.raises(SystemExit):
        COMMANDS[program]([*argv, "--dry-run", "--output-dir", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "wiki-search\n" in shown
    assert f"{service}  on CPU; ports: {ports}" in shown
    for port in found.get("ports", []):
        assert port.startswith("127.0.0.1:")
        assert f" {port.split(':')[2]}" in ports
    assert f"{TOKEN}={SECRET}" in found["environment"]
    assert (found["cap_drop"], found["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert not {"privileged", "user", "network_mode", "pid"} & found.keys()
    assert found["restart"].startswith("on-failure")
    assert found["healthcheck"]["test"][:2] == ["CMD", "python"]
    assert {volume.split(":")[0] for volume in found["volumes"]} >= {"outputs", "cache"}
    with pytest.raises(LookupError, match="TRIREME_TOKEN: make one with"):
        compose()


def heard(**s_ago: float) -> dict[str, Any]:
    return {"processes": {name.replace("_", "."): {"heard_s_ago": ago} for name, ago in s_ago.items()}}


@pytest.mark.parametrize(
    ("path", "body", "token", "why"),
    [
        ("/health", {}, "another", "401"),
        ("/status", heard(orchestrator=99.0, trainer=0.4), SECRET, None),
        ("/status", heard(trainer=0.4, trainer_1=90.0), SECRET, "not been heard of for 90 s"),
        ("/status", heard(), SECRET, "trainer has not been heard of yet"),
    ],
)
def test_a_health_check_tells_by_its_exit_code_and_needs_nothing_installed(path, body, token, why):
    def ask(url: str, *process: str) -> tuple[int, str]:
        command = [sys.executable, "-I", "-S", str(DOCKER / "healthy.py"), url, *process]
        environ = {TOKEN: token, "http_proxy": "http://127.0.0.1:9"}  # for what is outside
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
        return done.returncode, done.stdout + done.stderr

    def answer(asked: str, shown: str | None) -> tuple[int, bytes]:
        right = asked == path and shown == f"Bearer {SECRET}"
        return (200 if right else 401), json.dumps(body).encode()

    process = ["trainer"] if path == "/status" else []
    with answering_http(answer) as port:
        code, message = ask(f"http://127.0.0.1:{port}{path}", *process)
    assert (code, (why or "") in message) == (int(why is not None), True)
    if why is None:
        assert "refused" in ask(f"http://127.0.0.1:{port}{path}")[1]
