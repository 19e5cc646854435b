"""The wire between trainer and orchestrator where strangers can reach it: who has no token is not heard, and reads
nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from answering import DEADLINE_S, answering
from trireme.base.errors import DeadlineExceeded
from trireme.base.network import SILENCE_S
from trireme.base.processes import free_port
from trireme.base.token import TOKEN
from trireme.base.waiting import Waits
from trireme.messages import WIRE_VERSION, Done, Live, Ok, Request, encode
from trireme.transport.control import ControlClient
from trireme.transport.curve import as_asker, pair_of

SECRET = "a-token-for-tests-0123456789"
OTHER = "another-token-for-tests-01234"
SECRET_WORD = "a-run-that-nobody-may-read-of"
QUESTION = Done(run_id=SECRET_WORD, version=3)
SOON_S = 0.2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    monkeypatch.setenv(TOKEN, SECRET)
    return []


@pytest.fixture
def address(asked: list[Request]) -> Iterator[str]:
    with answering(lambda request: asked.append(request) or Ok()) as where:
        yield where


def ask(address: str, *, deadline_s: float = DEADLINE_S) -> object:
    client = ControlClient(address, Waits("trainer"), ask_again_s=SOON_S)
    try:
        return client.ask(QUESTION, what="leave", deadline_s=deadline_s)
    finally:
        client.close()


def test_whoever_has_the_token_is_answered(address: str, asked: list[Request]) -> None:
    assert ask(address) == Ok()
    assert asked == [QUESTION]


@pytest.mark.parametrize("theirs", [OTHER, None])
def test_whoever_has_another_token_or_none_is_not_heard_and_is_told_what_it_may_be(
    address: str, asked: list[Request], monkeypatch: pytest.MonkeyPatch, theirs: str | None
) -> None:
    monkeypatch.setenv(TOKEN, theirs) if theirs else monkeypatch.delenv(TOKEN)
    with pytest.raises(DeadlineExceeded, match=f"hangs up before a greeting: {TOKEN} must be the same"):
        ask(address, deadline_s=3 * SOON_S)
    assert asked == []


def test_a_token_is_of_no_use_with_an_orchestrator_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    asked: list[Request] = []
    with answering(lambda request: asked.append(request) or Ok()) as address:
        monkeypatch.setenv(TOKEN, SECRET)
        with pytest.raises(DeadlineExceeded, match="hangs up before a greeting"):
            ask(address, deadline_s=3 * SOON_S)
    assert asked == []


@pytest.mark.parametrize("ours", [SECRET, None])
def test_whoever_is_turned_away_does_not_knock_a_thousand_times(
    monkeypatch: pytest.MonkeyPatch, ours: str | None
) -> None:
    monkeypatch.setenv(TOKEN, ours) if ours else monkeypatch.delenv(TOKEN, raising=False)
    knocks = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def turn_away() -> None:
            nonlocal knocks
            while True:
                try:
                    knocker, _ = listener.accept()
                except OSError:
                    return
                knocks += 1
                knocker.close()

        threading.Thread(target=turn_away, daemon=True).start()
        with pytest.raises(DeadlineExceeded):
            ask(f"tcp://127.0.0.1:{listener.getsockname()[1]}", deadline_s=3 * SOON_S)
    assert 1 <= knocks < 50


def test_the_answer_comes_once_the_orchestrator_has_the_right_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one is no reason to end: whoever set it may be about to put it right."""
    port = free_port()
    found: list[object] = []
    monkeypatch.setenv(TOKEN, OTHER)
    with answering(lambda request: Ok(), port):
        monkeypatch.setenv(TOKEN, SECRET)
        asking = threading.Thread(target=lambda: found.append(ask(f"tcp://127.0.0.1:{port}")))
        asking.start()
        asking.join(3 * SOON_S)
        assert found == []
    with answering(lambda request: Ok(), port):
        asking.join(DEADLINE_S)
    assert found == [Ok()]


def test_a_stranger_who_knows_the_servers_key_alone_is_turned_away(address: str, asked: list[Request]) -> None:
    """The key of a CURVE server is called public; here it is not enough."""
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.linger, stranger.rcvtimeo = 0, int(SOON_S * 1000)
    as_asker(stranger, SECRET)
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.connect(address)
    stranger.send_multipart([b"%d:1" % WIRE_VERSION, encode(QUESTION)])
    with pytest.raises(zmq.Again):
        stranger.recv_multipart()
    stranger.close()
    assert asked == []


def test_nothing_of_what_is_said_can_be_read_on_the_way(address: str) -> None:
    heard = bytearray()
    with _tapped(address, heard) as tapped:
        assert ask(tapped) == Ok()
    assert len(heard) > 100
    assert SECRET_WORD.encode() not in heard
    assert pair_of(SECRET, "server").public not in heard


def test_without_a_token_nothing_is_encrypted_and_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    heard = bytearray()
    with answering(lambda request: Live(version=3) if not request else Ok()) as address:
        with _tapped(address, heard) as tapped:
            assert ask(tapped) == Ok()
    assert SECRET_WORD.encode() in heard


def test_a_connection_between_machines_is_given_up_when_its_other_end_says_nothing() -> None:
    client = ControlClient("tcp://203.0.113.1:1", Waits("trainer"))
    assert client._socket.heartbeat_timeout == SILENCE_S * 1000
    client.close()
    client = ControlClient("tcp://127.0.0.1:1", Waits("trainer"))
    assert client._socket.heartbeat_ivl == 0
    client.close()


class _tapped:
    """A wire tap: passes everything on, and keeps what passes."""

    def __init__(self, address: str, heard: bytearray) -> None:
        self._target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._heard = heard

    def __enter__(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._heard += data
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()
