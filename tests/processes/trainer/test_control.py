"""Questions and answers between trainer and orchestrator, over real sockets."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from answering import DEADLINE_S, answering
from trireme import messages
from trireme.base.errors import DeadlineExceeded, Refused, TriremeError
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.messages import Live, NotYet, Ok, PolicySent, Reply, Request, encode
from trireme.transport.control import ControlClient

PROBE = messages.Probe(ids=[1, 2], logprobs=[-1.0])
QUESTION = PolicySent(run_id="run", version=3, attempt=1, digests={"weight": "9f"}, probe=PROBE)
BEAT = messages.Heartbeat(run_id="run", process="trainer", state="running", version=1, waits=[])
SOON_S = 0.1


@contextmanager
def open_client(address: str, *, logs: Path | None = None, **knobs: Any) -> Iterator[ControlClient]:
    with closing(ControlClient(address, Waits("trainer", logs), **knobs)) as client:
        yield client


def ask(client: ControlClient, request: Request = QUESTION, *, deadline_s: float = DEADLINE_S) -> Reply:
    return client.ask(request, what="version 3", deadline_s=deadline_s)


@contextmanager
def open_raw_server(port: int | None = None) -> Iterator[tuple[zmq.Socket, str]]:
    """The other end of the socket by itself, to answer late, twice, or not at all."""
    address = f"tcp://127.0.0.1:{port or free_port()}"
    with closing(zmq.Context.instance().socket(zmq.ROUTER)) as socket:
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = DEADLINE_S * 1000
        socket.bind(address)
        yield socket, address


@contextmanager
def in_a_thread(target: Callable[[], Any]) -> Iterator[None]:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    yield
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_question_is_asked_again_until_there_is_something_to_tell_and_what_was_only_told_is_no_question():
    asked: list[Request] = []
    replies = iter([Ok(), NotYet("2 of 8 groups missing"), NotYet("1 of 8 groups missing"), Live(version=3)])
    with answering(lambda request: asked.append(request) or next(replies)) as address, open_client(address) as client:
        client.tell(BEAT)
        assert ask(client) == Live(version=3)
    assert asked == [BEAT, QUESTION, QUESTION, QUESTION]


def test_a_refusal_is_raised_with_its_words_and_the_server_goes_on():
    def answer(request: Request) -> Reply:
        if isinstance(request, messages.Done):
            raise TriremeError("no such version")
        return messages.Refusal(error="another run") if isinstance(request, messages.GetNewest) else Live(version=3)

    refused = {
        messages.GetNewest(run_id="run"): "another run",
        messages.Done(run_id="run", version=1): "TriremeError: no such version",
        Live(version=1): "ValidationError",  # no question
        messages.GetBatch("run", step=3, rank=0, world=1): "answered GetBatch with Live - BatchReply or Publish was",
    }
    with answering(answer) as address, open_client(address) as client:
        for request, words in refused.items():
            with pytest.raises(Refused, match=words):
                ask(client, request)  # type: ignore[arg-type]
        assert ask(client) == Live(version=3)


FIRST, SECOND = encode(Live(version=1)), encode(Live(version=2))


@pytest.mark.parametrize(
    ("sent", "replies"),
    [
        ([[(0, b"\xc1")], [(1, SECOND)]], [2]),  # it cannot be read
        ([[(0, b"\x91" * 10_000)], [(1, SECOND)]], [2]),
        ([[(0,)], [(1, SECOND)]], [2]),
        ([[(0, FIRST, b"more")], [(1, SECOND)]], [2]),
        ([[], [], [(2, SECOND)]], [2]),  # it is lost, twice
        ([[], [(0, FIRST), (1, SECOND)]], [2]),  # it is late
        ([[(0, FIRST), (0, FIRST)], [(1, SECOND), (1, SECOND)], [(2, FIRST)]], [1, 2, 1]),  # it comes twice
    ],
)
def test_only_a_readable_answer_to_the_newest_question_counts(sent, replies):
    """`sent` has for each question that arrives: which question is answered then, and with what frames."""
    with open_raw_server() as (server, address), open_client(address, ask_again_s=2 * SOON_S) as client:

        def answer() -> None:
            numbers = []
            for answers in sent:
                peer, number, _ = server.recv_multipart()
                numbers.append(number)
                for which, *frames in answers:
                    server.send_multipart([peer, numbers[which], *frames])

        with in_a_thread(answer):
            assert [ask(client) for _ in replies] == [Live(version=version) for version in replies]


def test_a_flood_of_answers_to_nothing_does_not_keep_a_deadline_from_passing():
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
                ask(client, deadline_s=3 * SOON_S)
            stop.set()


def test_a_peer_that_is_busy_is_waited_for_beyond_the_deadline_and_others_are_told_meanwhile():
    waited: list[Request] = []
    told: list[int] = []
    answers = iter([NotYet("an evaluation is running", busy=True)] * 8)

    def answer(request: Request) -> Reply:
        time.sleep(0.1)
        waited.append(request)
        return next(answers, Live(version=3))

    with answering(answer) as address, open_client(address, meanwhile=lambda: told.append(len(waited))) as client:
        assert ask(client, deadline_s=0.4) == Live(version=3)
    assert told == list(range(1, 9))


def test_a_deadline_names_the_peer_the_matter_its_words_and_its_log(tmp_path):
    with answering(lambda request: NotYet("3 of 8 groups missing")) as address:
        with open_client(address, logs=tmp_path) as client, pytest.raises(DeadlineExceeded) as error:
            ask(client, deadline_s=0.3)
    expected = "trainer waits 0 s for version 3 from orchestrator (3 of 8 groups missing), longer than the 0 s allowed."
    assert str(error.value) == f"{expected} Look at {tmp_path / 'orchestrator.stdout'}"


def test_a_peer_that_is_gone_for_thousands_of_questions_blocks_nobody_and_is_not_asked_them_all_when_it_comes():
    port, gave_up = free_port(), threading.Event()
    questions: set[bytes] = set()
    replies: list[Reply] = []

    def ask_in_vain_and_again() -> None:
        with open_client(f"tcp://127.0.0.1:{port}", ask_again_s=SOON_S) as client:
            for _ in range(3000):
                client.tell(BEAT)
            with pytest.raises(DeadlineExceeded, match=r"for version 3 from orchestrator \(no answer\)"):
                ask(client, deadline_s=3 * SOON_S)
            gave_up.set()
            replies.append(ask(client))

    with in_a_thread(ask_in_vain_and_again):
        assert gave_up.wait(DEADLINE_S)
        with open_raw_server(port) as (server, _):
            while not replies and server.poll(1000):
                peer, number, _ = server.recv_multipart()
                questions.add(number)
                server.send_multipart([peer, number, encode(Live(version=3))])
    assert replies == [Live(version=3)]
    assert questions.isdisjoint({b"%d:0" % messages.WIRE_VERSION, b"%d:1" % messages.WIRE_VERSION})
