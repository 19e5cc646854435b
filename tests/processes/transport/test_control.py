"""Every socket: what is asked is answered, and garbage is refused and logged and ends no process."""

import asyncio
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import httpx
import pytest
import zmq
import zmq.asyncio
from msgspec.structs import replace

from support.engines.answering import DEADLINE_S, answering
from support.processes.mutations import mutations
from support.runs.toy_environments import run_one, says, with_environment, write
from trireme import messages
from trireme.base.errors import DeadlineExceeded, PeerDied, PeerRefused, TriremeError
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.orchestrator import StatusServer
from trireme.config.run import RunConfig
from trireme.messages import Live, NotYet, Ok, PolicyReady, PolicySent, Probe, Refusal, Reply, Request, encode
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.session import wire
from trireme.orchestrator.status import STUCK_S, Status, serve_status
from trireme.orchestrator.trainer_requests import Peers
from trireme.transport import control
from trireme.transport.control import ControlClient, MalformedRequest, read_request
from trireme.transport.sanity import check_digests, check_request
from trireme.transport.weights.collective import open_store

NORM = messages.TensorSpec(name="model.norm.weight", dtype="float32", shape=[4])
TRANSFER = {"run_id": "run", "version": 3, "attempt": 1}
ADDRESS = {"kind": "gloo", "host": "127.0.0.1", "port": 1234}
PAYLOAD = {"folder": "broadcast", "nested": {"handles": [b"abc", 1.5, None]}}
PROBE = Probe(ids=[3, 1, 4], logprobs=[-0.5, -1.5])
READY = PolicyReady(**TRANSFER, **ADDRESS, incarnation="one", everywhere=True, specs=[NORM])
SENT = PolicySent(**TRANSFER, digests={NORM.name: "9f"}, probe=PROBE, payload=PAYLOAD)
BATCH = messages.GetBatch(run_id="run", step=3, rank=0, world=2)
BEAT = messages.Heartbeat(run_id="run", process="trainer", state="running", version=3, waits=["trainer waits 3 s"])
DONE = messages.Done(run_id="run", version=9)
JOIN = messages.Join("ticket", "http://10.0.0.2:8000", {"vllm": "0.32.0"})
MEMBERSHIP = [messages.GetTerms(), JOIN, messages.Beat(3, "ticket"), messages.Leave(3, "ticket", at_once=True)]
REQUESTS: list[Request] = [READY, SENT, BATCH, BEAT, DONE, messages.GetNewest(run_id="run"), *MEMBERSHIP]
WIRE = messages.WIRE_VERSION
FIRST = b"%d:1" % WIRE
SOON_S = 0.1


def open_client(address: str, **options: Any) -> closing[ControlClient]:
    return closing(ControlClient(address, Waits("trainer"), **options))


def ask(client: ControlClient, request: Request = SENT, *, deadline_s: float = DEADLINE_S) -> Reply:
    return client.ask(request, what="version 3", deadline_s=deadline_s)


@contextmanager
def open_raw(kind: int, address: str, context: zmq.Context | None = None) -> Iterator[Any]:
    """One end of the wire by itself: a ROUTER to answer late, twice or not at all, a DEALER to ask anything."""
    with closing((context or zmq.Context.instance()).socket(kind)) as socket:
        socket.linger, socket.rcvtimeo, socket.sndtimeo = 0, DEADLINE_S * 1000, DEADLINE_S * 1000
        (socket.bind if kind == zmq.ROUTER else socket.connect)(address)
        yield socket


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@contextmanager
def in_a_thread(target: Callable[[], Any]) -> Iterator[None]:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    yield
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_control_request_is_repeated_until_it_has_an_answer():
    asked: list[Request] = []
    replies = iter([Ok(), NotYet("2 of 8 groups missing"), NotYet("1 of 8 groups missing"), Live(version=3)])
    with answering(lambda request: asked.append(request) or next(replies)) as address, open_client(address) as client:
        client.tell(BEAT)
        assert ask(client) == Live(version=3)
    assert asked == [BEAT, SENT, SENT, SENT]


def answer(request: Request) -> Reply:
    if isinstance(request, messages.Done):
        raise TriremeError("no such version")
    if isinstance(request, messages.GetNewest):
        return Refusal(error="another run")
    return Ok() if isinstance(request, messages.Heartbeat) else Live(version=3)


def test_a_refusal_is_raised_with_its_words_and_the_server_goes_on():
    refused = {
        messages.GetNewest(run_id="run"): "another run",
        DONE: "TriremeError: no such version",
        Live(version=1): "ValidationError",  # no question
        BATCH: "answered GetBatch with Live - BatchReply or Publish was",
    }
    with answering(answer) as address, open_client(address) as client:
        for request, words in refused.items():
            with pytest.raises(PeerRefused, match=words):
                ask(client, request)  # type: ignore[arg-type]
        assert ask(client) == Live(version=3)


ONE, TWO = encode(Live(version=1)), encode(Live(version=2))


@pytest.mark.parametrize(
    ("sent", "replies"),
    [
        *(([[(0, *frames)], [(1, TWO)]], [2]) for frames in ([b"\xc1"], [b"\x91" * 10_000], [], [ONE, b"more"])),
        ([[], [], [(2, TWO)]], [2]),  # it is lost, twice
        ([[], [(0, ONE), (1, TWO)]], [2]),  # it is late
        ([[(0, ONE), (0, ONE)], [(1, TWO), (1, TWO)], [(2, ONE)]], [1, 2, 1]),  # it comes twice
    ],
)
def test_only_a_readable_answer_to_the_newest_question_counts(sent, replies):
    """`sent` has for each question that arrives: which question is answered then, and with what frames."""
    address = free_address()
    with open_raw(zmq.ROUTER, address) as server, open_client(address, ask_again_s=2 * SOON_S) as client:

        def answer() -> None:
            numbers = []
            for answers in sent:
                peer, number, _ = server.recv_multipart()
                numbers.append(number)
                for which, *frames in answers:
                    server.send_multipart([peer, numbers[which], *frames])

        with in_a_thread(answer):
            assert [ask(client) for _ in replies] == [Live(version=version) for version in replies]


def test_flood_of_stray_answers_never_extends_a_deadline():
    stop, address = threading.Event(), free_address()
    with open_raw(zmq.ROUTER, address) as server, open_client(address, ask_again_s=SOON_S) as client:

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


def test_deadline_passes_only_if_the_peer_is_not_busy():
    waited: list[Request] = []
    told: list[int] = []
    answers = iter([*[NotYet("an evaluation is running", busy=True)] * 8, Live(version=3)])

    def answer(request: Request) -> Reply:
        time.sleep(0.1)
        waited.append(request)
        return next(answers, NotYet("3 of 8 groups missing"))

    with answering(answer) as address, open_client(address, meanwhile=lambda: told.append(len(waited))) as client:
        assert ask(client, deadline_s=0.4) == Live(version=3)
        assert told == list(range(1, 9))
        with pytest.raises(DeadlineExceeded, match=r"for version 3 from orchestrator \(3 of 8 groups missing\)"):
            ask(client, deadline_s=0.4)


def test_returning_peer_is_not_sent_thousands_of_expired_requests():
    address, gave_up = free_address(), threading.Event()
    questions: set[bytes] = set()
    replies: list[Reply] = []

    def ask_in_vain_and_again() -> None:
        with open_client(address, ask_again_s=SOON_S) as client:
            for _ in range(3000):
                client.tell(BEAT)
            with pytest.raises(DeadlineExceeded, match=r"\(no answer\)"):
                ask(client, deadline_s=3 * SOON_S)
            gave_up.set()
            replies.append(ask(client))

    with in_a_thread(ask_in_vain_and_again):
        assert gave_up.wait(DEADLINE_S)
        with open_raw(zmq.ROUTER, address) as server:
            while not replies and server.poll(1000):
                peer, number, _ = server.recv_multipart()
                questions.add(number)
                server.send_multipart([peer, number, encode(Live(version=3))])
    assert replies == [Live(version=3)]
    assert questions.isdisjoint({b"%d:0" % WIRE, FIRST})


def test_whatever_bytes_come_are_a_request_or_no_question_and_nothing_else():
    requests, refusals = [], []
    for number, data in enumerate(mutations([encode(request) for request in REQUESTS], 20_000)):
        try:
            requests.append(read_request([FIRST, data] if number % 10 else [data[:30], data]))
        except MalformedRequest as error:
            refusals.append(str(error))
    assert len(requests) > 100
    assert len(refusals) > 5_000
    assert {type(request) for request in requests} == control.ANSWERS.keys()
    assert all(" expected" in refusal for refusal in refusals)
    assert any(check_request(request, max_steps=10, num_batches=5) for request in requests)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff\xa1x"])
def test_deep_nests_and_huge_promises_cost_nothing(opening):
    whole = encode(replace(SENT, payload={"x": 1}))
    for depth in (1_000, 1_000_000):
        with pytest.raises(MalformedRequest):
            read_request([FIRST, whole[: whole.index(b"\xa1x") + 2] + opening * depth])


def talk_nonsense(port: int) -> None:
    """Random bytes on one connection after the other, some of them hung up on in the middle."""
    rng = random.Random(0)
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.settimeout(0.02)
            try:
                connection.sendall(rng.choice([b"", b"\xff\0\0\0\0\0\0\0\x01\x7f", b"GET / HTTP/1.1\r\n"]))
                connection.sendall(rng.randbytes(rng.randrange(1, 5000)))
                connection.recv(100)
            except OSError:
                continue


def test_an_orchestrator_under_garbage_answers_the_trainer():
    rng = random.Random(1)
    with answering(answer) as address, open_raw(zmq.DEALER, address) as stranger:
        for data in mutations([encode(request) for request in REQUESTS], 3_000, seed=1):
            stranger.send_multipart(rng.choice([[data], [FIRST, data], [b"", data], [b"0:0", data, data], [data] * 40]))
        for more_garbage in (
            lambda: None,
            lambda: stranger.send_multipart([FIRST, bytes(control.LARGEST_REQUEST + 1)]),  # ends its connection
            lambda: talk_nonsense(int(address.rpartition(":")[2])),  # not even ZeroMQ
        ):
            more_garbage()
            with open_client(address) as client:
                assert ask(client) == Live(version=3)


STRANGE = [
    ([FIRST], "1 frames - two were expected"),
    ([FIRST, b"a", b"b"], "3 frames - two were expected"),
    ([b"", b"x"], "`VERSION:NUMBER` was expected"),
    ([FIRST, b"\xc1"], f"one of GetNewest, GetBatch, .* in wire version {WIRE}"),
    ([FIRST, encode(Live(version=3))], "Invalid value 'Live'"),
    ([b"999:1", encode(BATCH)], f"speaks wire version {WIRE}, its peer 999 .* the same version of Trireme"),
    ([b"7", encode(BATCH)], f"speaks wire version {WIRE}, its peer an earlier one"),
]


def test_control_server_tells_a_stranger_the_expected_message(caplog, monkeypatch):
    monkeypatch.setattr(control.rate_limited, "_said_at", {})
    with answering(answer) as address, open_raw(zmq.DEALER, address) as stranger:
        for frames, words in STRANGE:
            stranger.send_multipart(frames)
            first, reply = stranger.recv_multipart()
            refusal = messages.decode_reply(reply)
            assert first == frames[0]
            assert isinstance(refusal, Refusal)
            assert re.search(words, refusal.error), refusal.error
        for _ in range(1000):
            stranger.send_multipart([FIRST, b"\xc1"])
        for _ in range(1000):
            stranger.recv_multipart()
    assert "was refused" in caplog.text
    assert len(caplog.records) < 20


def test_requests_in_flight_are_bounded_per_client_and_in_bytes(monkeypatch):
    """Others are dropped. A refused message after them is answered in its turn: all of them were read by then."""
    monkeypatch.setattr(control, "BYTES_AT_ONCE", 10 << 20)
    large = replace(READY, run_id="r" * (2 << 20))
    unlisted = replace(BATCH, run_id=large.run_id)  # a large request that lists no tensors
    under_way: list[Request] = []

    async def main() -> None:
        release, port = asyncio.Event(), free_port()

        async def slowly(request: Request) -> Reply:
            under_way.append(request)
            await release.wait()
            return Ok()

        with closing(control.ControlServer("127.0.0.1", port)) as server, ExitStack() as stack:
            serving = asyncio.create_task(server.serve(slowly))
            context = zmq.asyncio.Context.instance()
            opened = [open_raw(zmq.DEALER, f"tcp://127.0.0.1:{port}", context) for _ in range(9)]
            first, *others = map(stack.enter_context, opened)
            for data in [encode(BEAT)] * 900 + [b"\xc1"]:
                await first.send_multipart([FIRST, data])
            await first.recv_multipart()
            assert under_way == [BEAT] * control.REQUESTS_AT_ONCE
            release.set()
            for _ in under_way:
                await first.recv_multipart()
            release.clear()
            under_way.clear()
            for client in others:
                await client.send_multipart([FIRST, encode(large)])
                await client.send_multipart([FIRST, encode(unlisted)])
                reply = messages.decode_reply((await client.recv_multipart())[1])
                assert isinstance(reply, Refusal)
                assert "at most" in reply.error
            assert under_way == [large] * 4
            release.set()
            await others[0].recv_multipart()
            await first.send_multipart([FIRST, encode(BATCH)])
            await first.recv_multipart()
            assert under_way[-1] == BATCH
            serving.cancel()

    asyncio.run(main())


def test_nonsense_does_nothing_to_the_trainers_rendezvous_for_weights():
    port = free_port()
    ours = open_store("127.0.0.1", port, is_sender=True, timeout_s=DEADLINE_S)
    talk_nonsense(port)
    theirs = open_store("127.0.0.1", port, is_sender=False, timeout_s=DEADLINE_S)
    theirs.set("key", "value")
    assert ours.get("key") == b"value"


def tensor(**fields: Any) -> dict[str, Any]:
    return {"specs": [replace(NORM, **fields)]}


def probe(ids: list[int], *logprobs: float) -> dict[str, Any]:
    return {"probe": Probe(ids=ids, logprobs=list(logprobs))}


ABSURD: list[tuple[Request, int, list[dict[str, Any]]]] = [  # with how many batches are in the journal
    (BATCH, 20, [{"step": -1}, {"step": 10}, {"world": 0}, {"world": 2**16 + 1}, {"rank": 2}, {"rank": -1}]),
    (BATCH, 6, [{"step": 7}]),
    (READY, 20, [{"version": -1}, {"version": 11}, {"attempt": -1}, {"port": -1}, {"port": 65536}]),
    (READY, 6, [{"version": 7}, {"kind": "pigeon"}, {"host": ""}, {"host": "x" * 257}, {"incarnation": ""}]),
    (READY, 6, [{"specs": []}, {"specs": [NORM, NORM]}, tensor(dtype="__import__('os')"), tensor(dtype="f")]),
    (READY, 6, [tensor(shape=[-1, -4]), tensor(shape=[0]), tensor(shape=[2**48]), tensor(shape=[1] * 9)]),
    (SENT, 20, [{"version": -1}, {"version": 11}, {"attempt": -1}, {"digests": {}}, {"digests": {"a": "\n"}}]),
    (SENT, 6, [probe([1, 2], float("nan")), probe([1, 2], float("-inf")), probe([1, 2], 0.002)]),
    (SENT, 6, [{"version": 7}, probe([1, 2]), probe([]), probe([1]), probe([1, -2], -1.0), probe([1, 2**31], -1.0)]),
    (BEAT, 6, [{"version": -2}, {"version": 11}, {"process": ""}, {"process": "x" * 65}, {"state": "x" * 4097}]),
    (BEAT, 6, [{"waits": ["x"] * 1025}, {"waits": ["x" * 4097]}]),
    (DONE, 6, [{"version": -1}, {"version": 7}]),
    (DONE, 20, [{"version": 11}]),
]


def problem_of(request: Request, num_batches: int) -> str | None:
    try:
        return check_request(read_request([FIRST, encode(request)]), max_steps=10, num_batches=num_batches)
    except MalformedRequest as error:
        return str(error)


def test_implausible_trainer_request_names_the_expected_value():
    assert [problem_of(request, 9) for request in REQUESTS] == [None] * len(REQUESTS)
    for request, num_batches, changes in ABSURD:
        for fields in changes:
            absurd = replace(request, **fields)
            assert "expected" in str(problem_of(absurd, num_batches)), absurd
    assert check_digests(READY, SENT) is None
    other = replace(SENT, digests={"lm_head.weight": "9f"})
    assert f"lm_head.weight, {NORM.name}" in str(check_digests(READY, other))


LOOP = asyncio.new_event_loop()
LINES = [
    b'{"type":"ready","num_train":5,"num_eval":0,"name":"toy","versions":{"python":"3.11"}}\n',
    b'{"type":"ask","task":"r1.0","call":"1","messages":[{"role":"user","content":"hi"}],"sampling":{"top_p":0.5}}\n',
    b'{"type":"done","task":"r1.0","reward":0.5,"metrics":{"n":1},"prompt":[],"completion":[],"example_id":3}\n',
    b'{"type":"error","task":"r1.0","stage":"score","error":"E","traceback":"T"}\n{"type":"pong"}\n',
]


def test_random_worker_bytes_are_read_as_messages_or_garbage(monkeypatch):
    read: list[wire.FromWorker] = []
    garbage: list[str] = []

    def connect() -> tuple[wire.Connection, asyncio.Future]:
        answer: asyncio.Future = asyncio.Future(loop=LOOP)
        return wire.Connection(read.append, garbage.append, answer), answer

    for data in (b"[" * 100_000 + b"\n", *mutations(LINES, 20_000)):
        connection, answer = connect()
        connection.data_received(data)
        read += [answer.result()] if answer.done() else []
    assert len(garbage) > 3_000
    assert max(map(len, garbage)) < 1000
    assert {type(message) for message in read} == {wire.Ready, wire.Ask, wire.Done, wire.Error, wire.Pong}
    monkeypatch.setattr(wire, "LONGEST_LINE", 1000)
    garbage.clear()
    connection, _ = connect()
    for half in (b'{"type":', b'"pong"}\n'):
        connection.data_received(half)
    assert read[-1] == wire.Pong()
    connection.data_received(b"x" * 900)
    assert not garbage
    connection.data_received(b"x" * 101)
    assert garbage == ["sent 1001 bytes without an end of line, at most 1000 expected"]


async def receive_at_once(read: list[wire.FromWorker], count: int) -> wire.Connection:
    connection = wire.Connection(read.append, print, asyncio.get_running_loop().create_future())
    connection.data_received(b'{"type":"pong"}\n' * count)
    return connection


def test_other_tasks_run_between_the_messages_that_a_worker_sends_at_once():
    async def use() -> list[int]:
        await receive_at_once(read := [], 100)
        seen = [len(read)]
        while seen[-1] < 100:
            await asyncio.sleep(0)
            seen.append(len(read))
        return seen

    assert len(asyncio.run(use())) > 3


def test_all_that_a_worker_sent_before_it_hung_up_is_read():
    async def use() -> int:
        connection = await receive_at_once(read := [], 100)
        connection.connection_lost(None)
        assert isinstance(connection.answer.exception(), PeerDied)
        return len(read)

    assert asyncio.run(use()) == 100


UNKNOWN = b'{"type":"done","task":"r1.7","reward":0,"metrics":{},"prompt":[],"completion":[],"example_id":3}\n'
GARBLING = f"""
import os, pathlib, sys, time

def dataset():
    return [{{"prompt": "say it", "answer": ""}}]

def reward(completion):
    once = pathlib.Path(__file__).with_name("once")
    if not once.exists():
        once.touch()
        os.write(int(sys.argv[1]), {UNKNOWN!r})
        time.sleep(0.1)
    return 1.0
"""


def test_worker_that_ends_a_rollout_it_never_had_is_restarted(tmp_path, caplog):
    async def use(environment: Environment) -> None:
        assert (await run_one(environment, says("x"))).reward == 1.0
        assert environment.num_restarts == 1

    with_environment(tmp_path, write(tmp_path, GARBLING), use)
    assert re.search(r"about a rollout that it never had, 'r1\.7', and was killed \(log: ", caplog.text)


@pytest.fixture
def served(tmp_path):
    status, port = Status(RunConfig(output_dir=tmp_path), Waits("orchestrator"), Peers()), free_port()
    with serve_status(status, StatusServer(port=port)):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S, trust_env=False) as client:
            yield status, client


@pytest.mark.parametrize(("host", "asked"), [("::", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]")])
def test_status_server_on_all_interfaces_answers_ipv4_too(tmp_path, host, asked):
    status, port = Status(RunConfig(output_dir=tmp_path), Waits("orchestrator"), Peers()), free_port()
    with serve_status(status, StatusServer(host=host, port=port)):
        assert httpx.get(f"http://{asked}:{port}/status", trust_env=False).json()["state"] == "starting"


def test_the_status_server_refuses_what_it_does_not_know_and_goes_on(served):
    rng = random.Random(0)
    status, client = served
    for _ in range(100):
        path = "/" + "".join(rng.choice("ahelstu/.%?&=0;") for _ in range(rng.randrange(30)))
        method = rng.choice(["GET", "POST", "PUT", "DELETE", "BREW"])
        response = client.request(method, path, content=rng.randbytes(rng.randrange(3000)))
        assert response.status_code in (200, 307, 400, 404, 405)
    talk_nonsense(client.base_url.port)
    assert client.get("/status").json()["state"] == "starting"
    for number in range(3_000):  # heartbeats that come while they are read break no answer
        status.peers.note(replace(BEAT, process=f"trainer {number}"))
        if number % 300 == 0:
            assert [client.get(path).status_code for path in ("/status", "/metrics")] == [200, 200]


def test_an_event_loop_that_no_longer_turns_makes_health_say_so(served):
    async def beat_once() -> None:
        beating = asyncio.create_task(status.keep_beating())
        await asyncio.sleep(0)
        beating.cancel()

    status, client = served
    assert client.get("/health").status_code == 200
    asyncio.run(beat_once())
    assert client.get("/health").status_code == 200
    assert status.beat_at is not None
    status.beat_at -= STUCK_S + 1
    stuck = client.get("/health")
    assert stuck.status_code == 503
    assert "has not run for 3" in stuck.json()["reason"]
