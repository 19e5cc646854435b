"""`docker/`: what can be known of images and services without building or starting them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema.validators import validator_for

from trireme.base.token import TOKEN
from trireme.cli.inference import inference
from trireme.cli.orchestrator import orchestrator
from trireme.cli.rl import rl
from trireme.cli.trainer import trainer

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
BIN = Path(sys.executable).parent
SERVICES = ("inference", "orchestrator", "trainer")
DOORS: dict[str, Callable[[list[str]], Any]] = {
    "inference": inference,
    "orchestrator": orchestrator,
    "trainer": trainer,
    "rl": rl,
}
SECRET = "0123456789abcdef0123456789abcdef"
DEADLINE_S = 60


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: word and text, with continued lines joined and comments left out."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined.splitlines() if line.strip()]


def compose(*, gpu: bool = False, **variables: str) -> dict[str, Any]:
    """As the compose program would read it: variables filled in, their defaults where they are not set."""
    text = (DOCKER / ("compose.gpu.yaml" if gpu else "compose.yaml")).read_text()
    filled: dict[str, Any] = yaml.safe_load(
        re.sub(r"\$\{(\w+):([-?])([^}]*)\}", lambda found: _fill(found, variables), text)
    )
    return filled


def _fill(found: re.Match[str], variables: dict[str, str]) -> str:
    name, otherwise, text = found.groups()
    if name in variables:
        return variables[name]
    if otherwise == "?":
        raise LookupError(f"{name}: {text}")
    return text


def services(**variables: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose(TRIREME_TOKEN=SECRET, **variables)["services"]
    return found


def test_the_linter_of_dockerfiles_finds_nothing() -> None:
    done = subprocess.run(
        [BIN / "hadolint", DOCKER / "Dockerfile"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0)


def problems_of(content: object) -> list[str]:
    """By the specification's own schema, which check-jsonschema brings along."""
    schema = json.loads((files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json").read_text())
    return [error.message for error in validator_for(schema)(schema).iter_errors(content)]


def test_compose_files_are_what_their_specification_says() -> None:
    assert problems_of(compose(TRIREME_TOKEN=SECRET)) == []
    assert problems_of(compose(gpu=True)) == []
    misspelt = {"services": {"trainer": {"image": "trireme", "comand": ["trainer"]}}}
    assert "'comand' was unexpected" in problems_of(misspelt)[0]


@pytest.mark.parametrize("text", [text for word, text in instructions() if word == "RUN"])
def test_what_an_image_runs_while_it_is_built_is_a_shells(text: str) -> None:
    command = re.sub(r"^(--\S+\s+)*", "", text)
    assert subprocess.run(["bash", "-n", "-c", command], timeout=DEADLINE_S, check=False).returncode == 0


def test_an_image_ends_as_a_user_without_rights() -> None:
    users = [text for word, text in instructions() if word == "USER"]
    assert users
    assert users[-1].isdigit()
    assert int(users[-1]) > 0


def test_all_that_an_image_copies_is_there_and_not_kept_out() -> None:
    kept = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name
        for word, text in instructions()
        if word == "COPY"
        for name in text.split()[:-1]
        if not name.startswith("--")
    }
    assert copied - {"."} <= kept
    assert all((ROOT / name).exists() for name in kept)
    needed = {"src", "configs", "environments", "models", "docker", "pyproject.toml"}
    assert needed <= kept


def test_the_images_python_is_one_that_the_project_takes() -> None:
    image = next(text for word, text in instructions() if word == "FROM")
    version = re.match(r"python:(\d+)\.(\d+)", image)
    assert version
    assert (3, 11) <= (int(version[1]), int(version[2])) < (3, 14)


def test_the_command_of_an_image_is_ready_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    program, *argv = json.loads(next(text for word, text in instructions() if word == "CMD"))
    assert DOORS[program]([*argv, "--dry-run", "--device", "cpu", "--output-dir", str(tmp_path)]) == 0
    assert "not ready" not in capsys.readouterr().out


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("name", ["reverse-text", "wiki-search"])
def test_the_command_of_each_service_is_a_process_of_one_run(
    service: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(TOKEN, SECRET)
    program, *argv = services(TRIREME_RUN=f"configs/{name}/rl.toml")[service]["command"]
    assert program == service
    assert "--resume" in argv, "a container that is started again goes on with its run"
    DOORS[program]([*argv, "--dry-run", "--output-dir", str(tmp_path)])
    said = capsys.readouterr().out
    assert f"{name}\n" in said
    published = [port.split(":")[2] for port in services()[service].get("ports", [])]
    ports = {"inference": "http 8000", "orchestrator": "status 8001, batches 5555", "trainer": "weights 5556"}[service]
    assert f"{service}  on CPU; ports: {ports}" in said
    assert all(f" {port}" in ports for port in published)


def test_containers_can_be_reached_from_their_own_machine_alone() -> None:
    published = [port for service in services().values() for port in service.get("ports", [])]
    assert len(published) == 2
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_nothing_starts_without_a_token() -> None:
    with pytest.raises(LookupError, match="TRIREME_TOKEN: make one with"):
        compose()
    for service in services().values():
        assert f"{TOKEN}={SECRET}" in service["environment"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_no_rights_is_watched_and_started_again(service: str) -> None:
    found = services()[service]
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "user", "network_mode", "pid"} & found.keys()
    assert found["restart"].startswith("on-failure")
    assert found["healthcheck"]["test"][:2] == ["CMD", "python"]
    assert {volume.split(":")[0] for volume in found["volumes"]} >= {"outputs", "cache"}


def test_one_variable_chooses_image_engine_and_machine() -> None:
    for service in services(TRIREME_ENGINE="gpu").values():
        assert service["image"] == "trireme:gpu"
        assert service["build"]["args"] == {"ENGINE": "gpu"}
        assert "docker/gpu.toml" in service["command"]


def test_engine_and_trainer_have_gpus_of_their_own() -> None:
    def gpus_of(service: dict[str, Any]) -> set[str]:
        devices = service["deploy"]["resources"]["reservations"]["devices"]
        return {number for device in devices for number in device["device_ids"]}

    added = compose(gpu=True)["services"]
    assert added.keys() == {"inference", "trainer"}
    assert (len(gpus_of(added["inference"])), len(gpus_of(added["trainer"]))) == (1, 1)
    assert gpus_of(added["inference"]) != gpus_of(added["trainer"])


# health checks


@contextmanager
def answering(path: str, code: int, body: object) -> Iterator[str]:
    """A server that answers those who have the token."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self.path == path and self.headers["Authorization"] == f"Bearer {SECRET}"
            self.send_response(code if right else 401)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{path}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(url: str, process: str | None = None) -> str | None:
    problem: str | None = runpy.run_path(str(DOCKER / "healthy.py"))["main"](url, process)
    return problem


@pytest.fixture
def _in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the run's token, and a proxy for what is outside."""
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


@pytest.mark.usefixtures("_in_a_container")
@pytest.mark.parametrize(("code", "expected"), [(200, None), (503, "503")])
def test_a_server_is_well_that_says_so(code: int, expected: str | None) -> None:
    with answering("/health", code, {}) as url:
        problem = ask(url)
    assert problem is None if expected is None else expected in str(problem)


@pytest.mark.usefixtures("_in_a_container")
def test_nobody_is_well_who_does_not_answer_or_wants_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering("/health", 200, {}) as url:
        monkeypatch.setenv(TOKEN, "another")
        assert "401" in str(ask(url))
    assert "refused" in str(ask(url))


@pytest.mark.usefixtures("_in_a_container")
@pytest.mark.parametrize(
    ("processes", "why"),
    [
        ({"trainer": {"heard_s_ago": 0.4}}, None),
        ({"trainer": {"heard_s_ago": 0.4}, "trainer.1": {"heard_s_ago": 2.0}}, None),
        ({"trainer": {"heard_s_ago": 61.0}}, "trainer has not been heard of for 61 s"),
        ({"trainer": {"heard_s_ago": 0.4}, "trainer.1": {"heard_s_ago": 90.0}}, "not been heard of for 90 s"),
        ({}, "trainer has not been heard of yet"),
    ],
)
def test_the_trainer_is_well_while_the_orchestrator_hears_its_heart(
    processes: dict[str, dict[str, float]], why: str | None
) -> None:
    status = {"processes": {"orchestrator": {"state": "running"}} | processes}
    with answering("/status", 200, status) as url:
        problem = ask(url, "trainer")
    assert problem is None if why is None else why in str(problem)


def test_a_health_check_tells_by_its_exit_code_and_needs_nothing_installed() -> None:
    def code(path: str) -> int:
        command = [sys.executable, "-I", "-S", str(DOCKER / "healthy.py"), url.replace("/health", path)]
        return subprocess.run(command, env={TOKEN: SECRET}, capture_output=True, timeout=DEADLINE_S).returncode

    with answering("/health", 200, {}) as url:
        assert (code("/health"), code("/elsewhere")) == (0, 1)
