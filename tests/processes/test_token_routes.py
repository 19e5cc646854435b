"""HTTP routes of a run that strangers can reach: each is shut without the token, but for `/health`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse

from fake_engine import open_fake_engine
from trireme.base.token import TOKEN, bearer
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.inference.server import server_arguments
from trireme.orchestrator.answers import Peers
from trireme.orchestrator.engine_keeper import world_size
from trireme.orchestrator.inference_pool import open_inference_pool
from trireme.orchestrator.status import Status, build_app
from trireme.transport.bearer import RequireToken
from whole_run import build_config, run

SECRET = "a-token-for-tests-0123456789"
HEADER = {"Authorization": f"Bearer {SECRET}"}
WRONG = [
    {},
    {"Authorization": "Bearer another-token-for-tests"},
    {"Authorization": f"Basic {SECRET}"},
    {"Authorization": f"Bearer {SECRET} "},
    {"Authorization": SECRET},
    {"Authorization": "Bearer \xff".encode("latin-1")},
]


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)


def open_app() -> TestClient:
    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("in")

    async def talk(socket: Any) -> None:
        await socket.accept()
        await socket.send_text("in")
        await socket.close()

    inner = Starlette(routes=[Route("/health", answer), Route("/deep", answer)])
    routes = [Route(path, answer, methods=["GET", "POST"]) for path in ("/health", "/pause", "/inference/v1/generate")]
    app = Starlette(routes=[*routes, Mount("/metrics", inner), WebSocketRoute("/v1/realtime", talk)])
    app.add_middleware(RequireToken)
    return TestClient(app)


@pytest.mark.parametrize("headers", WRONG)
@pytest.mark.parametrize("path", ["/pause", "/inference/v1/generate", "/metrics/deep", "/metrics/health", "/nowhere"])
def test_every_route_is_shut_without_the_right_token(path: str, headers: dict) -> None:
    client = open_app()
    for method in ("GET", "POST", "OPTIONS"):
        answer = client.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert TOKEN in answer.json()["error"]
        assert SECRET not in answer.text


def test_the_token_opens_every_route_and_health_needs_none() -> None:
    client = open_app()
    assert client.post("/inference/v1/generate", headers=HEADER).text == "in"
    assert client.get("/metrics/deep", headers=HEADER).text == "in"
    assert client.get("/nowhere", headers=HEADER).status_code == 404
    assert client.get("/health").text == "in"


def test_two_headers_are_one_too_many() -> None:
    both = [("Authorization", f"Bearer {SECRET}"), ("Authorization", "Bearer other")]
    assert open_app().get("/pause", headers=both).status_code == 401  # type: ignore[arg-type]


def test_websockets_are_shut_too() -> None:
    client = open_app()
    with pytest.raises((WebSocketDenialResponse, Exception)), client.websocket_connect("/v1/realtime") as stranger:
        stranger.receive_text()
    with client.websocket_connect("/v1/realtime", headers=HEADER) as friend:
        assert friend.receive_text() == "in"


def test_without_a_token_everybody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN)
    assert open_app().get("/pause").text == "in"
    assert bearer() == {}


def test_the_inference_server_is_given_the_door_keeper_last_and_only_with_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last middleware is the outermost."""
    config = RunConfig.model_validate({"inference": {"args": {"middleware": "mine.Middleware"}}})
    assert server_arguments(config)[-2:] == ["--middleware", "trireme.transport.bearer.RequireToken"]
    assert "mine.Middleware" in server_arguments(config)
    assert SECRET not in " ".join(server_arguments(config))
    monkeypatch.delenv(TOKEN)
    assert "trireme.transport.bearer.RequireToken" not in server_arguments(config)


def test_the_status_server_tells_strangers_only_that_it_is_well(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    client = TestClient(build_app(Status(config, Waits("orchestrator"), Peers())))
    assert client.get("/health").json() == {"status": "ok", "state": "starting"}
    for path in ("/status", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=HEADER).status_code == 200


def test_the_orchestrator_shows_its_token_to_engines_and_a_whole_run_goes_through(tmp_path: Path) -> None:
    outcome = run(build_config(tmp_path), engine={"token": SECRET})
    assert outcome.error is None
    assert len(outcome.records) == 3
    assert outcome.engine.shown == {f"Bearer {SECRET}"}


def test_environments_are_not_given_the_token(tmp_path: Path) -> None:
    code = """
        import os

        def dataset():
            return [{"prompt": f"say {i}", "answer": ""} for i in range(8)]

        def reward(completion, answer):
            return float("TRIREME_TOKEN" not in os.environ)
    """
    outcome = run(build_config(tmp_path, code), engine={"token": SECRET})
    assert outcome.error is None
    assert {rollout.reward for record in outcome.records for rollout in record.rollouts} == {1.0}


def test_an_engine_with_another_token_never_counts_as_there(caplog: pytest.LogCaptureFixture) -> None:
    async def look() -> int | None:
        async with open_fake_engine(token="another-token-for-tests") as engine:
            sizes = {"max_model_len": 8, "timeout_s": 5.0, "max_concurrent": 1}
            async with open_inference_pool([engine.url], waits=Waits("orchestrator"), **sizes) as pool:  # type: ignore[arg-type]
                return await world_size(pool, pool.engines[0])

    logger = logging.getLogger("trireme")
    logger.addHandler(caplog.handler)
    try:
        assert asyncio.run(look()) is None
    finally:
        logger.removeHandler(caplog.handler)
    assert f"does not let us in: {TOKEN} is another one there" in caplog.text
