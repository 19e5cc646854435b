"""Questions and answers between trainer and orchestrator, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from answering import DEADLINE_S, answering
from trireme.base.errors import DeadlineExceeded, Refused, TriremeError
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.messages import (
    WIRE_VERSION,
    Done,
    GetBatch,
    Heartbeat,
    Live,
    NotYet,
    Ok,
    PolicySent,
    Probe,
    Refusal,
    Reply,
    Request,
    decode_reply,
    encode,
)
from trireme.transport.control import ControlClient

QUESTION = PolicySent(run_id="run", version=3, attempt=1, digests={}, probe=Probe(ids=[1], logprobs=[]))
SOON_S = 0.1


@contextmanager
def open_client(address: str, *, logs: Path | None = None, **knobs: Any) -> Iterator[ControlClient]:
    client = ControlClient(address, Waits("trainer", logs), **knobs)
    try:
        yield client
    finally:
        client.close()


def ask(handle: Callable[[Request], Reply]) -> Reply:
    with answering(handle) as address, open_client(address) as client:
        return client.ask(QUESTION, what="version 3", deadline_s=DEADLINE_S)


@contextmanager
def open_raw_server(port: int | None = None) -> Iterator[tuple[zmq.Socket, str]]:
    """The other end of the socket by itself, to answer late, twice, or not at all."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 0
    socket.rcvtimeo = socket.sndtimeo = DEADLINE_S * 1000
    port = port or free_port()
    socket.bind(f"tcp://127.0.0.1:{port}")
    try:
        yield socket, f"tcp://127.0.0.1:{port}"
    finally:
        socket.close()


@contextmanager
def in_a_thread(target: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    yield
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_question_gets_its_answer() -> None:
    asked: list[Request] = []
    assert ask(lambda request: asked.append(request) or Live(version=3)) == Live(version=3)
    assert asked == [QUESTION]


def test_it_asks_again_until_there_is_something_to_tell() -> None:
    replies = iter([NotYet("2 of 8 groups missing"), NotYet("1 of 8 groups missing"), Live(version=3)])
    assert ask(lambda request: next(replies)) == Live(version=3)
    assert list(replies) == []


def test_a_refusal_is_raised_with_its_words() -> None:
    with pytest.raises(Refused, match="another run"):
        ask(lambda request: Refusal(error="another run"))


def test_an_error_of_the_answering_end_is_told_and_the_server_goes_on() -> None:
    def fail_first(request: Request) -> Reply:
        if isinstance(request, Done):
            raise TriremeError("no such version")
        return Live(version=3)

    with answering(fail_first) as address, open_client(address) as client:
        with pytest.raises(Refused, match="TriremeError: no such version"):
            client.ask(Done(run_id="run", version=1), what="its good-bye", deadline_s=DEADLINE_S)
        assert client.ask(QUESTION, what="version 3", deadline_s=DEADLINE_S) == Live(version=3)


def test_what_is_no_question_is_refused() -> None:
    with answering(lambda request: Ok()) as address, open_client(address) as client:
        with pytest.raises(Refused, match="ValidationError"):
            client.ask(Live(version=1), what="nonsense", deadline_s=DEADLINE_S)  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "words"), [(b"1:7", "the trainer 1"), (b"7", "the trainer an earlier one")])
def test_a_trainer_of_another_wire_version_is_told_both_numbers_and_what_to_do(first: bytes, words: str) -> None:
    with answering(lambda request: Live(version=3)) as address:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger, socket.rcvtimeo = 0, DEADLINE_S * 1000
        socket.connect(address)
        socket.send_multipart([first, encode(QUESTION)])
        answered, reply = socket.recv_multipart()
        socket.close()
    assert answered == first
    refusal = decode_reply(reply)
    assert isinstance(refusal, Refusal)
    assert f"speaks wire version {WIRE_VERSION}, {words}" in refusal.error
    assert "install the same version of Trireme on both" in refusal.error


def test_an_answer_that_the_question_cannot_have_is_named_with_what_was_expected() -> None:
    with answering(lambda request: Live(version=3)) as address, open_client(address) as client:
        with pytest.raises(Refused, match="answered GetBatch with Live - BatchReply or Publish was expected"):
            client.ask(GetBatch(run_id="run", step=3, rank=0, world=1), what="batch 3", deadline_s=DEADLINE_S)


@pytest.mark.parametrize("frames", [[b"\xc1"], [b"\x91" * 10_000], [], [b"one", b"more"]])
def test_an_answer_that_cannot_be_read_is_waited_past(frames: list[bytes]) -> None:
    with open_raw_server() as (server, address), open_client(address, ask_again_s=SOON_S) as client:

        def answer_garbage_first() -> None:
            peer, first, _ = server.recv_multipart()
            server.send_multipart([peer, first, *frames])
            peer, first, _ = server.recv_multipart()
            server.send_multipart([peer, first, encode(Live(version=7))])

        with in_a_thread(answer_garbage_first):
            assert client.ask(QUESTION, what="version 3", deadline_s=DEADLINE_S) == Live(version=7)


def test_a_flood_of_answers_to_nothing_does_not_keep_a_deadline_from_passing() -> None:
    stop = threading.Event()
    with open_raw_server() as (server, address), open_client(address, ask_again_s=SOON_S) as client:

        def flood() -> None:
            peer, _, _ = server.recv_multipart()
            while not stop.is_set():
                if server.poll(0):
                    peer, _, _ = server.recv_multipart()
                server.send_multipart([peer, b"0:0", b"\xc1"])

        with in_a_thread(flood):
            with pytest.raises(DeadlineExceeded):
                client.ask(QUESTION, what="version 3", deadline_s=3 * SOON_S)
            stop.set()


def test_a_lost_answer_is_asked_for_again() -> None:
    with open_raw_server() as (server, address), open_client(address, ask_again_s=SOON_S) as client:

        def lose_two() -> None:
            for _ in range(2):
                server.recv_multipart()
            peer, number, _ = server.recv_multipart()
            server.send_multipart([peer, number, encode(Live(version=7))])

        with in_a_thread(lose_two):
            assert client.ask(QUESTION, what="version 3", deadline_s=DEADLINE_S) == Live(version=7)


def test_a_late_answer_to_an_earlier_question_is_thrown_away() -> None:
    with open_raw_server() as (server, address), open_client(address, ask_again_s=SOON_S) as client:

        def answer_late() -> None:
            peer, number, _ = server.recv_multipart()
            other_peer, other_number, _ = server.recv_multipart()
            server.send_multipart([peer, number, encode(Live(version=1))])
            server.send_multipart([other_peer, number, encode(Live(version=2))])
            server.send_multipart([other_peer, other_number, encode(Live(version=3))])

        with in_a_thread(answer_late):
            assert client.ask(QUESTION, what="version 3", deadline_s=DEADLINE_S) == Live(version=3)


def test_an_answer_that_came_twice_does_not_answer_the_next_question() -> None:
    with open_raw_server() as (server, address), open_client(address) as client:

        def answer_twice() -> None:
            for version in range(3):
                peer, number, _ = server.recv_multipart()
                for _ in range(2):
                    server.send_multipart([peer, number, encode(Live(version=version))])

        with in_a_thread(answer_twice):
            replies = [client.ask(QUESTION, what="version 3", deadline_s=DEADLINE_S) for _ in range(3)]
        assert replies == [Live(version=version) for version in range(3)]


def test_the_answer_to_what_was_only_told_is_thrown_away() -> None:
    with answering(lambda request: Live(version=3) if request == QUESTION else Ok()) as address:
        with open_client(address) as client:
            client.tell(Done(run_id="run", version=1))
            assert client.ask(QUESTION, what="version 3", deadline_s=DEADLINE_S) == Live(version=3)


def test_a_peer_that_is_busy_is_waited_for_beyond_the_deadline_and_others_are_told_meanwhile() -> None:
    waited: list[Request] = []
    told: list[int] = []
    answers = iter([NotYet("an evaluation is running", busy=True)] * 8)

    def answer(request: Request) -> Reply:
        time.sleep(0.25)
        waited.append(request)
        return next(answers, Live(version=3))

    with answering(answer) as address, open_client(address, meanwhile=lambda: told.append(len(waited))) as client:
        assert client.ask(QUESTION, what="version 3", deadline_s=1.0) == Live(version=3)
    assert told == list(range(1, 9))


def test_a_deadline_names_the_peer_the_matter_its_words_and_its_log(tmp_path: Path) -> None:
    with answering(lambda request: NotYet("3 of 8 groups missing")) as address:
        with open_client(address, logs=tmp_path) as client, pytest.raises(DeadlineExceeded) as error:
            client.ask(QUESTION, what="version 3", deadline_s=0.3)
    expected = "trainer waits 0 s for version 3 from orchestrator (3 of 8 groups missing), longer than the 0 s allowed."
    assert str(error.value) == f"{expected} Look at {tmp_path / 'orchestrator.stdout'}"


def test_silence_ends_at_the_deadline_and_is_named() -> None:
    with open_client(f"tcp://127.0.0.1:{free_port()}", ask_again_s=SOON_S) as client:
        with pytest.raises(DeadlineExceeded, match=r"for version 3 from orchestrator \(no answer\)"):
            client.ask(QUESTION, what="version 3", deadline_s=0.2)


def test_a_peer_that_is_gone_for_thousands_of_questions_blocks_nobody() -> None:
    def tell_and_ask_in_vain() -> None:
        beat = Heartbeat(run_id="run", process="trainer", state="running", version=1, waits=[])
        with open_client(f"tcp://127.0.0.1:{free_port()}", ask_again_s=SOON_S) as client:
            for _ in range(3000):
                client.tell(beat)
            with pytest.raises(DeadlineExceeded):
                client.ask(QUESTION, what="version 3", deadline_s=0.5)
            done.set()

    done = threading.Event()
    with in_a_thread(tell_and_ask_in_vain):
        assert done.wait(DEADLINE_S)


def test_questions_that_nobody_took_are_not_asked_all_at_once_when_somebody_comes() -> None:
    port = free_port()
    with open_client(f"tcp://127.0.0.1:{port}", ask_again_s=SOON_S) as client:
        with pytest.raises(DeadlineExceeded):
            client.ask(QUESTION, what="version 3", deadline_s=3 * SOON_S)
        questions: list[bytes] = []
        replies: list[Reply] = []
        with open_raw_server(port) as (server, _):
            with in_a_thread(lambda: replies.append(client.ask(QUESTION, what="version 3", deadline_s=DEADLINE_S))):
                while not replies and server.poll(1000):
                    peer, number, _ = server.recv_multipart()
                    questions.append(number)
                    server.send_multipart([peer, number, encode(Live(version=3))])
    assert replies == [Live(version=3)]
    assert b"%d:1" % WIRE_VERSION not in questions


def test_an_orchestrator_that_comes_back_is_asked_again() -> None:
    port = free_port()
    with open_client(f"tcp://127.0.0.1:{port}", ask_again_s=SOON_S) as client:
        with answering(lambda request: Live(version=1), port):
            assert client.ask(QUESTION, what="version 3", deadline_s=DEADLINE_S) == Live(version=1)
        replies: list[Reply] = []
        with in_a_thread(lambda: replies.append(client.ask(QUESTION, what="version 3", deadline_s=DEADLINE_S))):
            with answering(lambda request: Live(version=2), port):
                _wait_for(replies)
        assert replies == [Live(version=2)]


def _wait_for(replies: list[Reply]) -> None:
    arrived = threading.Event()
    for _ in range(int(DEADLINE_S / 0.02)):
        if replies:
            return
        arrived.wait(0.02)
