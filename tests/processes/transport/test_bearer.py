"""What strangers can reach of a run. HTTP routes are shut without the token, but for `/health`; without a token, they
answer only programs of this machine. On the wire between trainer and orchestrator, who has no token is not heard."""

import asyncio
import json
import logging
import socket
import threading
from contextlib import closing, contextmanager, suppress
from typing import Any

import httpx
import pytest
import zmq
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from support.engines.answering import DEADLINE_S, answering, answering_http
from support.engines.fake_engine import open_fake_engine
from support.processes.stage import until
from support.runs.resolved_runs import refusals
from support.runs.whole_run import build_config, run
from trireme.base.errors import DeadlineExceeded
from trireme.base.network import SILENCE_S
from trireme.base.processes import free_port
from trireme.base.token import KEY_FILE, TOKEN, status_key, write_key
from trireme.base.waiting import Waits
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.messages import WIRE_VERSION, Done, Ok, Request, encode
from trireme.monitor.view import open_view
from trireme.orchestrator.engines.pool import open_inference_pool
from trireme.orchestrator.status import Status, build_app
from trireme.orchestrator.trainer_requests import Peers
from trireme.tools.cluster.status import look_at
from trireme.tools.dashboard.runs import status_of
from trireme.transport.bearer import RequireToken
from trireme.transport.control import ControlClient
from trireme.transport.curve import pair_of, set_client_keys

SECRET = "a-token-for-tests-0123456789"
OTHER = "another-token-for-tests-01234"
HEADER = {"Authorization": f"Bearer {SECRET}"}
WRONG: list[Any] = [
    {},
    {"Authorization": f"Bearer {OTHER}"},
    {"Authorization": f"Basic {SECRET}"},
    {"Authorization": f"Bearer {SECRET} "},
    {"Authorization": SECRET},
    {"Authorization": "Bearer \xff".encode("latin-1")},
    [*HEADER.items(), ("Authorization", "Bearer other")],
]


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    return SECRET


def open_app():
    async def answer(request: HttpRequest) -> JSONResponse:
        return JSONResponse(await request.json() if await request.body() else {})

    async def talk(socket: Any) -> None:
        await socket.accept()
        await socket.send_text("in")
        await socket.close()

    paths = ("/health", "/pause", "/collective_rpc", "/weight_info")
    routes = [Route(path, answer, methods=["GET", "POST"]) for path in paths]
    mounted = Mount("/metrics", Starlette(routes=[Route("/health", answer), Route("/deep", answer)]))
    app = Starlette(routes=[*routes, mounted, WebSocketRoute("/v1/realtime", talk)])
    app.add_middleware(RequireToken)
    return TestClient(app, base_url="http://127.0.0.1:8000")


# HTTP routes with a token


def test_every_route_but_health_requires_the_token(secret):
    client = open_app()
    for headers in WRONG:
        for path in ("/pause", "/metrics/deep", "/metrics/health", "/nowhere"):
            for method in ("GET", "POST", "OPTIONS"):
                answer = client.request(method, path, headers=headers)
                assert answer.status_code == 401
                assert TOKEN in answer.json()["error"]
                assert secret not in answer.text
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime") as stranger:
        stranger.receive_text()
    assert client.post("/pause", headers=HEADER).status_code == 200
    assert client.get("/metrics/deep", headers=HEADER).status_code == 200
    assert client.get("/nowhere", headers=HEADER).status_code == 404
    assert client.get("/health").status_code == 200
    with client.websocket_connect("/v1/realtime", headers=HEADER) as friend:
        assert friend.receive_text() == "in"


def test_orchestrator_shows_its_token_with_every_engine_request(tmp_path, secret):
    outcome = run(build_config(tmp_path), engine={"token": secret})
    assert (outcome.error, len(outcome.records)) == (None, 3)
    assert outcome.engine.shown == {f"Bearer {secret}"}


def test_an_engine_with_another_token_never_counts_as_there(secret, monkeypatch, caplog):
    async def look() -> bool:
        async with open_fake_engine(token=OTHER) as engine:
            sizes = {"max_model_len": 8, "timeout_s": 5.0, "max_concurrent": 1}
            async with open_inference_pool([engine.url], waits=Waits("orchestrator"), **sizes) as pool:
                return await pool.engines[0].learn_size()

    monkeypatch.setattr(logging.getLogger("trireme"), "propagate", True)
    assert not asyncio.run(look())
    assert f"returned 401: its {TOKEN} differs" in caplog.text


def test_the_status_key_opens_the_status_alone(tmp_path, secret):
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    client = TestClient(build_app(Status(config, Waits("orchestrator"), Peers())))
    bearer = {"Authorization": f"Bearer {status_key()}"}
    assert client.get("/health").json() == {"status": "ok", "state": "starting"}
    for path in ("/status", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 401
        for key in (status_key(), secret):
            assert client.get(path, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert open_app().get("/pause", headers=bearer).status_code == 401


# HTTP routes without a token


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
def test_a_page_in_a_browser_of_this_machine_reaches_no_route(headers):
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
def test_of_the_methods_of_a_worker_only_ours_can_be_called(body, code):
    answer = open_app().post("/collective_rpc", content=body)
    assert answer.status_code == code
    if code == 200:
        assert answer.json() == json.loads(body)


OPENING = "host port uds middleware api_key allowed-origins ssl_keyfile config hos middlewar api_k host=0.0.0.0"


@pytest.mark.parametrize("name", OPENING.split())
def test_arguments_of_vllm_do_not_open_its_server(name):
    (message,) = refusals(f"""--inference.args '{{"{name}" = "0.0.0.0"}}'""", "inference.args")
    assert f"inference.args.{name.replace('_', '-')}" in message


# the key in a run's folder


def test_no_token_is_sent_to_an_address_out_of_a_folder(tmp_path, monkeypatch):
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
        monkeypatch.setattr("trireme.monitor.status.POLL_S", 0.01)
        with open_view(config, tmp_path):
            until(lambda: len(shown) > 3)
        assert set(shown[3:]) == {"Bearer the-key-of-this-very-folder"}
        (tmp_path / KEY_FILE).rename(tmp_path / "another-secret-of-this-user")
        (tmp_path / KEY_FILE).symlink_to("another-secret-of-this-user")
        look_at(tmp_path)
        assert shown[-1] is None
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/status").raise_for_status()


# the wire between trainer and orchestrator

SECRET_WORD = "a-run-that-nobody-may-read-of"
QUESTION = Done(run_id=SECRET_WORD, version=3)
SOON_S = 0.2


def set_token(monkeypatch, token):
    monkeypatch.setenv(TOKEN, token) if token else monkeypatch.delenv(TOKEN, raising=False)


@contextmanager
def hearing(port=None):
    asked: list[Request] = []
    with answering(lambda request: asked.append(request) or Ok(), port) as address:
        yield address, asked


def ask(address, *, deadline_s=DEADLINE_S):
    with closing(ControlClient(address, Waits("trainer"), ask_again_s=SOON_S)) as client:
        return client.ask(QUESTION, what="leave", deadline_s=deadline_s)


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)])
def test_control_request_with_a_different_token_is_never_answered(monkeypatch, ours, theirs):
    set_token(monkeypatch, ours)
    with hearing() as (address, asked):
        set_token(monkeypatch, theirs)

        # On a busy machine the connection may not have been rejected yet when a short deadline ends.
        def names_the_token() -> bool:
            with pytest.raises(DeadlineExceeded) as refused:
                ask(address, deadline_s=3 * SOON_S)
            return f"{TOKEN} must be the same" in str(refused.value)

        until(names_the_token)
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


def test_the_answer_comes_once_the_orchestrator_has_the_right_token(monkeypatch):
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


def test_a_stranger_who_knows_the_servers_key_alone_is_turned_away(secret):
    """The key of a CURVE server is called public; here it is not enough."""
    with hearing() as (address, asked), zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.linger, stranger.rcvtimeo = 0, int(SOON_S * 1000)
        set_client_keys(stranger, secret)
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
def tapped(address, heard):
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


def test_control_connection_to_another_machine_has_a_heartbeat():
    for host, option, value in [("203.0.113.1", "timeout", SILENCE_S * 1000), ("127.0.0.1", "ivl", 0)]:
        client = ControlClient(f"tcp://{host}:1", Waits("trainer"))
        assert getattr(client._socket, f"heartbeat_{option}") == value
        client.close()
