"""What strangers can reach of a run: HTTP routes are shut without the token, but for `/health`, and on the wire between
trainer and orchestrator who has no token is not heard, and reads nothing."""

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from answering import DEADLINE_S, answering
from fake_engine import open_fake_engine
from trireme.base.errors import DeadlineExceeded
from trireme.base.network import SILENCE_S
from trireme.base.processes import free_port
from trireme.base.token import TOKEN
from trireme.base.waiting import Waits
from trireme.messages import WIRE_VERSION, Done, Ok, Request, encode
from trireme.orchestrator.engines.pool import open_inference_pool
from trireme.transport.bearer import RequireToken
from trireme.transport.control import ControlClient
from trireme.transport.curve import pair_of, set_client_keys
from whole_run import build_config, run

SECRET = "a-token-for-tests-0123456789"
OTHER = "another-token-for-tests-01234"
HEADER = {"Authorization": f"Bearer {SECRET}"}
WRONG = [
    {},
    {"Authorization": f"Bearer {OTHER}"},
    {"Authorization": f"Basic {SECRET}"},
    {"Authorization": f"Bearer {SECRET} "},
    {"Authorization": SECRET},
    {"Authorization": "Bearer \xff".encode("latin-1")},
    [*HEADER.items(), ("Authorization", "Bearer other")],
]


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)


def set_token(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    monkeypatch.setenv(TOKEN, token) if token else monkeypatch.delenv(TOKEN, raising=False)


# HTTP routes


def open_app() -> TestClient:
    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("in")

    async def talk(socket: Any) -> None:
        await socket.accept()
        await socket.send_text("in")
        await socket.close()

    inner = Starlette(routes=[Route("/health", answer), Route("/deep", answer)])
    routes = [Route(path, answer, methods=["GET", "POST"]) for path in ("/health", "/inference/v1/generate")]
    app = Starlette(routes=[*routes, Mount("/metrics", inner), WebSocketRoute("/v1/realtime", talk)])
    app.add_middleware(RequireToken)
    return TestClient(app)


@pytest.mark.parametrize("headers", WRONG)
def test_every_route_is_shut_without_the_right_token(headers: Any) -> None:
    client = open_app()
    for path in ("/inference/v1/generate", "/metrics/deep", "/metrics/health", "/nowhere"):
        for method in ("GET", "POST", "OPTIONS"):
            answer = client.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert TOKEN in answer.json()["error"]
            assert SECRET not in answer.text
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime") as stranger:
        stranger.receive_text()


def test_the_token_opens_every_route_and_health_needs_none() -> None:
    client = open_app()
    assert client.post("/inference/v1/generate", headers=HEADER).text == "in"
    assert client.get("/metrics/deep", headers=HEADER).text == "in"
    assert client.get("/nowhere", headers=HEADER).status_code == 404
    assert client.get("/health").text == "in"
    with client.websocket_connect("/v1/realtime", headers=HEADER) as friend:
        assert friend.receive_text() == "in"


def test_the_orchestrator_shows_its_token_to_engines_and_does_not_give_it_to_environments(tmp_path: Path) -> None:
    code = """
        import os

        def dataset():
            return [{"prompt": f"say {i}", "answer": ""} for i in range(8)]

        def reward(completion, answer):
            return float("TRIREME_TOKEN" not in os.environ)
    """
    outcome = run(build_config(tmp_path, code), engine={"token": SECRET})
    assert (outcome.error, len(outcome.records)) == (None, 3)
    assert outcome.engine.shown == {f"Bearer {SECRET}"}
    assert {rollout.reward for record in outcome.records for rollout in record.rollouts} == {1.0}


def test_an_engine_with_another_token_never_counts_as_there(monkeypatch, caplog):
    async def look() -> int | None:
        async with open_fake_engine(token=OTHER) as engine:
            sizes = {"max_model_len": 8, "timeout_s": 5.0, "max_concurrent": 1}
            async with open_inference_pool([engine.url], waits=Waits("orchestrator"), **sizes) as pool:
                return await pool.engines[0].world_size()

    monkeypatch.setattr(logging.getLogger("trireme"), "propagate", True)
    assert asyncio.run(look()) is None
    assert f"returned 401: its {TOKEN} differs" in caplog.text


# the wire between trainer and orchestrator

SECRET_WORD = "a-run-that-nobody-may-read-of"
QUESTION = Done(run_id=SECRET_WORD, version=3)
SOON_S = 0.2


@contextmanager
def hearing(port: int | None = None) -> Iterator[tuple[str, list[Request]]]:
    asked: list[Request] = []
    with answering(lambda request: asked.append(request) or Ok(), port) as address:
        yield address, asked


def ask(address: str, *, deadline_s: float = DEADLINE_S) -> object:
    client = ControlClient(address, Waits("trainer"), ask_again_s=SOON_S)
    try:
        return client.ask(QUESTION, what="leave", deadline_s=deadline_s)
    finally:
        client.close()


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)])
def test_whoever_has_another_token_or_none_is_not_heard_and_is_told_what_it_may_be(monkeypatch, ours, theirs):
    set_token(monkeypatch, ours)
    with hearing() as (address, asked):
        set_token(monkeypatch, theirs)
        with pytest.raises(DeadlineExceeded, match=f"{TOKEN} must be the same"):
            ask(address, deadline_s=3 * SOON_S)
    assert asked == []


@pytest.mark.parametrize("ours", [SECRET, None])
def test_whoever_is_turned_away_does_not_knock_a_thousand_times(monkeypatch, ours):
    set_token(monkeypatch, ours)
    knocks = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def turn_away() -> None:
            nonlocal knocks
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    knocks += 1

        threading.Thread(target=turn_away, daemon=True).start()
        with pytest.raises(DeadlineExceeded):
            ask(f"tcp://127.0.0.1:{listener.getsockname()[1]}", deadline_s=3 * SOON_S)
    assert 1 <= knocks < 50


def test_the_answer_comes_once_the_orchestrator_has_the_right_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one is no reason to end: whoever set it may be about to put it right."""
    port = free_port()
    found: list[object] = []
    set_token(monkeypatch, OTHER)
    with hearing(port) as (address, _):
        set_token(monkeypatch, SECRET)
        asking = threading.Thread(target=lambda: found.append(ask(address)))
        asking.start()
        asking.join(3 * SOON_S)
        assert found == []
    with hearing(port):
        asking.join(DEADLINE_S)
    assert found == [Ok()]


def test_a_stranger_who_knows_the_servers_key_alone_is_turned_away() -> None:
    """The key of a CURVE server is called public; here it is not enough."""
    with hearing() as (address, asked), zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.linger, stranger.rcvtimeo = 0, int(SOON_S * 1000)
        set_client_keys(stranger, SECRET)
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(address)
        stranger.send_multipart([b"%d:1" % WIRE_VERSION, encode(QUESTION)])
        with pytest.raises(zmq.Again):
            stranger.recv_multipart()
    assert asked == []


@pytest.mark.parametrize("token", [SECRET, None])
def test_what_is_said_can_be_read_on_the_way_only_where_there_is_no_token(monkeypatch, token):
    set_token(monkeypatch, token)
    heard = bytearray()
    with hearing() as (address, asked), tapped(address, heard) as tap:
        assert ask(tap) == Ok()
    assert asked == [QUESTION]
    assert len(heard) > 100
    assert (SECRET_WORD.encode() in heard) is (token is None)
    assert pair_of(SECRET, "server")[0] not in heard


@contextmanager
def tapped(address: str, heard: bytearray) -> Iterator[str]:
    """A wire tap for one connection: passes everything on, and keeps what passes."""

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError), sink:
            while data := source.recv(1 << 16):
                heard.extend(data)
                sink.sendall(data)

    def accept() -> None:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pass_on, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_a_connection_between_machines_is_given_up_when_its_other_end_says_nothing() -> None:
    for host, option, value in [("203.0.113.1", "timeout", SILENCE_S * 1000), ("127.0.0.1", "ivl", 0)]:
        client = ControlClient(f"tcp://{host}:1", Waits("trainer"))
        assert getattr(client._socket, f"heartbeat_{option}") == value
        client.close()
