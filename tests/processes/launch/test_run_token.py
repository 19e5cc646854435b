"""Each run on one machine has a token of its own; without one, servers answer only programs of this machine."""

import json
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from answering import answering_http
from limits import file_size_limit
from resolved_runs import refusals
from stage import until
from trireme.base.token import KEY_FILE, TOKEN, make_token, read_key, status_key, token, write_key
from trireme.base.waiting import Waits
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.launch.run_state import look_at
from trireme.monitor.view import open_view
from trireme.orchestrator.status import Status, build_app
from trireme.orchestrator.trainer_requests import Peers
from trireme.tools.dashboard.runs import status_of
from trireme.transport.bearer import RequireToken

SECRET = "a-token-for-tests-0123456789"


def open_app() -> TestClient:
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(await request.json() if await request.body() else {})

    paths = ("/health", "/pause", "/collective_rpc", "/weight_info")
    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in paths])
    app.add_middleware(RequireToken)
    return TestClient(app, base_url="http://127.0.0.1:8000")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:8000"},
        {"Origin": "https://evil.example", "Content-Type": "text/plain"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_page_in_a_browser_of_this_machine_reaches_no_route(headers) -> None:
    client = open_app()
    for path in ("/pause", "/weight_info", "/collective_rpc"):
        assert client.post(path, headers=headers).status_code == 403
    assert client.post("/pause").status_code == 200
    assert client.get("/weight_info", headers={"Host": "localhost:8000"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"method": "trireme_weight_report"}', 200),
        (b'{"method": "reset_weights"}', 403),
        (b'{"method": "__setattr__", "args": ["trireme_x", "y"]}', 403),
        (b'{"method": ["trireme_weight_report"]}', 403),
        (b'{"method": "reset_weights", "method": "trireme_x"}', 200),  # the last one counts, as it does for vLLM
        (b"[" * 100_000, 403),
        (b"", 403),
    ],
)
def test_of_the_methods_of_a_worker_only_ours_can_be_called(body: bytes, code: int) -> None:
    answer = open_app().post("/collective_rpc", content=body)
    assert answer.status_code == code
    if code == 200:
        assert answer.json() == json.loads(body)


OPENING = "host port uds middleware api_key allowed-origins ssl_keyfile config hos middlewar api_k host=0.0.0.0"


@pytest.mark.parametrize("name", OPENING.split())
def test_arguments_of_vllm_do_not_open_its_server(name: str) -> None:
    (message,) = refusals(f"""--inference.args '{{"{name}" = "0.0.0.0"}}'""", "inference.args")
    assert f"inference.args.{name.replace('_', '-')}" in message


def test_a_key_lies_in_the_run_folder_for_its_owner_alone(tmp_path: Path) -> None:
    assert make_token()
    assert not make_token()  # a token that was given stays
    write_key(tmp_path, token())
    write_key(tmp_path, status_key())
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert read_key(tmp_path) == status_key() != token()
    write_key(tmp_path, None)
    with file_size_limit(9), pytest.raises(OSError, match="File too large"):
        write_key(tmp_path, token())
    assert read_key(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_status_key_opens_the_status_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    client = TestClient(build_app(Status(config, Waits("orchestrator"), Peers())))
    bearer = {"Authorization": f"Bearer {status_key()}"}
    assert client.get("/health").json() == {"status": "ok", "state": "starting"}
    for path in ("/status", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 401
        for key in (status_key(), SECRET):
            assert client.get(path, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert open_app().get("/pause", headers=bearer).status_code == 401


def test_no_token_is_sent_to_an_address_out_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str | None] = []
    with answering_http(lambda _, bearer: shown.append(bearer) or (404, b"")) as port:
        monkeypatch.setenv(TOKEN, SECRET)
        config = RunConfig.model_validate({"output_dir": str(tmp_path), "orchestrator": {"server": {"port": port}}})
        write_run(config, config.paths.run_config)
        look_at(tmp_path)
        status_of(config.model_dump(mode="json"), tmp_path)
        write_key(tmp_path, "the-key-of-this-very-folder")
        look_at(tmp_path)
        assert shown == [None, None, "Bearer the-key-of-this-very-folder"]
        monkeypatch.setattr("trireme.monitor.view.POLL_S", 0.01)
        with open_view(config, tmp_path):
            until(lambda: len(shown) > 3)
        assert set(shown[3:]) == {"Bearer the-key-of-this-very-folder"}
        (tmp_path / KEY_FILE).rename(tmp_path / "another-secret-of-this-user")
        (tmp_path / KEY_FILE).symlink_to("another-secret-of-this-user")
        look_at(tmp_path)
        assert shown[-1] is None
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/status").raise_for_status()
