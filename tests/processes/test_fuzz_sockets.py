"""Garbage on every socket: refused and logged, and nobody dies of it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import socket
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from answering import DEADLINE_S, answering
from mutations import mutations
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.orchestrator import StatusServer
from trireme.config.run import RunConfig
from trireme.messages import (
    WIRE_VERSION,
    Done,
    GetBatch,
    GetNewest,
    Heartbeat,
    Live,
    Ok,
    PolicyReady,
    PolicySent,
    Probe,
    Refusal,
    Request,
    TensorSpec,
    decode_reply,
    encode,
)
from trireme.orchestrator.answers import Peers
from trireme.orchestrator.environments import wire
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.environments.worker_process import RolloutFailed
from trireme.orchestrator.status import STUCK_S, Status, serve_status
from trireme.transport import control
from trireme.transport.control import ControlClient, NoQuestion, read_question
from trireme.transport.sanity import check_digests, check_request
from trireme.transport.weights.collective import open_store

READY = PolicyReady(
    run_id="run",
    version=3,
    incarnation="one",
    attempt=1,
    everywhere=True,
    specs=[TensorSpec(name="model.norm.weight", dtype="float32", shape=[4])],
    kind="gloo",
    host="127.0.0.1",
    port=1234,
)
SENT = PolicySent(
    run_id="run",
    version=3,
    attempt=1,
    digests={"model.norm.weight": "9f"},
    probe=Probe(ids=[3, 1, 4], logprobs=[-0.5, -1.5]),
    payload={"folder": "broadcast", "nested": {"handles": [b"abc", 1.5, None]}},
)
BATCH = GetBatch(run_id="run", step=3, rank=0, world=2)
BEAT = Heartbeat(run_id="run", process="trainer", state="running", version=3, waits=["trainer waits 3 s"])
REQUESTS: list[Request] = [READY, SENT, BATCH, BEAT, Done(run_id="run", version=9), GetNewest(run_id="run")]
FIRST = b"%d:1" % WIRE_VERSION


# the control socket


def test_whatever_bytes_come_are_a_request_or_no_question_and_nothing_else() -> None:
    requests, refusals = [], []
    for number, data in enumerate(mutations([encode(request) for request in REQUESTS], 20_000)):
        try:
            requests.append(read_question([FIRST, data] if number % 10 else [data[:30], data]))
        except NoQuestion as error:
            refusals.append(str(error))
    assert len(requests) > 100
    assert len(refusals) > 5_000
    assert {type(request) for request in requests} == control.ANSWERS.keys()
    assert all(" expected" in refusal for refusal in refusals)
    assert any(check_request(request, max_steps=10, num_batches=5) for request in requests)


@pytest.mark.parametrize("depth", [1_000, 1_000_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff\xa1x"])
def test_deep_nests_and_huge_promises_cost_nothing(opening: bytes, depth: int) -> None:
    whole = encode(msgspec.structs.replace(SENT, payload={"x": 1}))
    start = whole.index(b"\xa1x") + 2
    with pytest.raises(NoQuestion):
        read_question([FIRST, whole[:start] + opening * depth])


@contextmanager
def open_stranger(address: str) -> Iterator[zmq.Socket]:
    """Somebody who speaks ZeroMQ, and nothing else that we do."""
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.linger, stranger.rcvtimeo, stranger.sndtimeo = 0, DEADLINE_S * 1000, DEADLINE_S * 1000
    stranger.connect(address)
    try:
        yield stranger
    finally:
        stranger.close()


def still_answers(address: str) -> bool:
    client = ControlClient(address, Waits("trainer"))
    try:
        return client.ask(SENT, what="version 3", deadline_s=DEADLINE_S) == Live(version=3)
    finally:
        client.close()


def answer(request: Request) -> Any:
    return Live(version=3) if isinstance(request, (PolicyReady, PolicySent)) else Ok()


def test_an_orchestrator_under_garbage_answers_the_trainer() -> None:
    rng = random.Random(1)
    encoded = [encode(request) for request in REQUESTS]
    with answering(answer) as address, open_stranger(address) as stranger:
        for data in mutations(encoded, 3_000, seed=1):
            frames = [[data], [FIRST, data], [b"", data], [b"0:0", data, data], [data] * 40]
            stranger.send_multipart(rng.choice(frames))
        assert still_answers(address)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([FIRST], "1 frames - two were expected"),
        ([FIRST, b"a", b"b"], "3 frames - two were expected"),
        ([b"", b"x"], "`VERSION:NUMBER` was expected"),
        ([FIRST, b"\xc1"], f"one of GetNewest, GetBatch, .* in wire version {WIRE_VERSION}"),
        ([FIRST, encode(Live(version=3))], "Invalid value 'Live'"),
        ([b"999:1", encode(BATCH)], f"speaks wire version {WIRE_VERSION}, the trainer 999"),
    ],
)
def test_a_stranger_is_told_what_was_expected_and_it_is_logged(
    frames: list[bytes], words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control.sparingly, "_said_at", {})
    monkeypatch.setattr(logging.getLogger("trireme"), "propagate", True)
    with answering(answer) as address, open_stranger(address) as stranger:
        stranger.send_multipart(frames)
        first, reply = stranger.recv_multipart()
    refusal = decode_reply(reply)
    assert first == frames[0]
    assert isinstance(refusal, Refusal)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refusal.error)
    assert "was refused" in caplog.text


def test_a_thousand_refusals_are_a_few_lines_in_the_log(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("trireme"), "propagate", True)
    with answering(answer) as address, open_stranger(address) as stranger:
        for _ in range(1000):
            stranger.send_multipart([FIRST, b"\xc1"])
        for _ in range(1000):
            stranger.recv_multipart()
    assert len(caplog.records) < 20


def test_a_question_that_is_too_large_ends_the_connection_of_who_sends_it_and_no_other() -> None:
    with answering(answer) as address, open_stranger(address) as stranger:
        stranger.send_multipart([FIRST, bytes(control.LARGEST_QUESTION + 1)])
        assert still_answers(address)


def test_a_stranger_with_a_million_questions_is_answered_a_few_at_a_time() -> None:
    most = under_way = 0

    async def main() -> None:
        port = free_port()
        server = control.ControlServer("127.0.0.1", port)

        async def slowly(request: Request) -> Any:
            nonlocal most, under_way
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.2)
            under_way -= 1
            return Ok()

        serving = asyncio.create_task(server.serve(slowly))
        with open_stranger(f"tcp://127.0.0.1:{port}") as stranger:
            for _ in range(900):
                stranger.send_multipart([FIRST, encode(BEAT)])
            await asyncio.sleep(0.5)
        serving.cancel()
        server.close()

    asyncio.run(main())
    assert 1 < most <= control.QUESTIONS_AT_ONCE


def talk_nonsense(port: int, *, seed: int = 0, times: int = 30) -> None:
    """Random bytes, a few connections at a time, some of them hung up on in the middle."""
    rng = random.Random(seed)
    for _ in range(times):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.settimeout(0.02)
            try:
                connection.sendall(rng.choice([b"", b"\xff\0\0\0\0\0\0\0\x01\x7f", b"GET / HTTP/1.1\r\n"]))
                connection.sendall(rng.randbytes(rng.randrange(1, 5000)))
                connection.recv(100)
            except OSError:
                continue


def test_whoever_does_not_even_speak_zeromq_does_nothing_to_the_control_socket() -> None:
    with answering(answer) as address:
        talk_nonsense(int(address.rpartition(":")[2]))
        assert still_answers(address)


def test_nor_does_he_to_the_trainers_rendezvous_for_weights() -> None:
    port = free_port()
    ours = open_store("127.0.0.1", port, is_sender=True, timeout_s=DEADLINE_S)
    talk_nonsense(port)
    theirs = open_store("127.0.0.1", port, is_sender=False, timeout_s=DEADLINE_S)
    theirs.set("key", "value")
    assert ours.get("key") == b"value"


# requests that are well-formed and make no sense


@pytest.mark.parametrize("request_", REQUESTS)
def test_what_a_trainer_asks_makes_sense(request_: Request) -> None:
    assert check_request(request_, max_steps=10, num_batches=9) is None


def changed(request: Request, **fields: Any) -> Request:
    return msgspec.structs.replace(request, **fields)


ABSURD = [
    changed(BATCH, step=-5),
    changed(BATCH, step=10),  # of a run of 10 steps
    changed(BATCH, step=7),  # 6 is the batch being filled
    changed(BATCH, world=0),
    changed(BATCH, world=10**12),
    changed(BATCH, rank=2),
    changed(BATCH, rank=-1),
    changed(READY, version=-3),
    changed(READY, version=11),
    changed(READY, version=7),
    changed(READY, specs=[]),
    changed(READY, specs=2 * READY.specs),
    changed(READY, specs=[TensorSpec(name="a", dtype="float32", shape=[-1, -4])]),
    changed(READY, specs=[TensorSpec(name="a", dtype="float32", shape=[2**62])]),
    changed(READY, specs=[TensorSpec(name="a", dtype="__import__('os')", shape=[4])]),
    changed(READY, kind="pigeon"),
    changed(READY, port=-1),
    changed(READY, host=""),
    changed(READY, attempt=-1),
    changed(SENT, version=10**18),
    changed(SENT, digests={}),
    changed(SENT, digests={"a": "\n"}),
    changed(SENT, probe=Probe(ids=[1, 2], logprobs=[float("nan")])),
    changed(SENT, probe=Probe(ids=[1, 2], logprobs=[float("-inf")])),
    changed(SENT, probe=Probe(ids=[1, 2], logprobs=[5.0])),
    changed(SENT, probe=Probe(ids=[1, 2], logprobs=[])),
    changed(SENT, probe=Probe(ids=[], logprobs=[])),
    changed(SENT, probe=Probe(ids=[1, -2], logprobs=[-1.0])),
    changed(BEAT, version=-(2**40)),
    changed(BEAT, process="x" * 1000),
    changed(BEAT, waits=["x"] * 10_000),
    Done(run_id="run", version=-1),
]


@pytest.mark.parametrize("absurd", ABSURD)
def test_what_makes_no_sense_is_named_with_what_was_expected(absurd: Request) -> None:
    problem = check_request(absurd, max_steps=10, num_batches=6)
    assert problem is not None
    assert problem.startswith(type(absurd).__name__)
    assert "expected" in problem


def test_digests_must_be_those_of_the_announced_tensors() -> None:
    assert check_digests(READY, SENT) is None
    other = msgspec.structs.replace(SENT, digests={"lm_head.weight": "9f"})
    assert "lm_head.weight, model.norm.weight" in str(check_digests(READY, other))


# the socket of an environment worker

LINES = [
    b'{"type":"ready","num_train":5,"num_eval":0,"name":"toy","versions":{"python":"3.11"}}\n',
    b'{"type":"ask","task":"r1.0","call":"1","messages":[{"role":"user","content":"hi"}],"sampling":{"top_p":0.5}}\n',
    b'{"type":"done","task":"r1.0","reward":0.5,"metrics":{"n":1},"prompt":[],"completion":[],"example_id":3}\n',
    b'{"type":"error","task":"r1.0","stage":"score","error":"E","traceback":"T"}\n{"type":"pong"}\n',
]


def test_whatever_bytes_come_from_a_worker_are_messages_or_garbage_and_nothing_else() -> None:
    messages: list[wire.FromWorker] = []
    garbage: list[str] = []
    for data in mutations(LINES, 20_000):
        try:
            wire.LineReader(messages.append).feed(data)
        except wire.Garbage as error:
            garbage.append(str(error))
    assert len(garbage) > 3_000
    assert max(map(len, garbage)) < 1000
    assert {type(message) for message in messages} == {wire.Ready, wire.Ask, wire.Done, wire.Error, wire.Pong}


def test_a_line_without_an_end_is_garbage_before_it_fills_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(wire, "LONGEST_LINE", 1000)
    reader = wire.LineReader(lambda message: None)
    reader.feed(b"x" * 900)
    with pytest.raises(wire.Garbage, match="1800 bytes without an end of line, at most 1000"):
        reader.feed(b"x" * 900)


@pytest.mark.parametrize(
    "line",
    [
        LINES[2].replace(b"0.5", b"1e31"),
        LINES[2].replace(b"0.5", b"1e999"),
        LINES[2].replace(b"0.5", b"null"),
        LINES[2].replace(b"0.5", b"NaN, "),
        LINES[1].replace(b'"sampling":{"top_p":0.5}', b'"sampling":null'),
        LINES[2].replace(b'"example_id":3', b'"info":{"x":' + b"9" * 5000 + b'},"example_id":3'),
    ],
)
def test_an_answer_that_breaks_the_form_is_an_error_of_its_rollout(line: bytes) -> None:
    if b"NaN" in line:  # no JSON at all
        with pytest.raises(wire.Garbage):
            wire.decode(line)
        return
    message = wire.decode(line)
    assert isinstance(message, wire.Error)
    assert (message.task, message.stage) == ("r1.0", "rollout")


GARBLING = """
    import os, pathlib, sys, time
    once = pathlib.Path(__file__).with_name("once")

    def dataset():
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(20)]

    def reward(completion, answer):
        if answer == "3" and not once.exists():
            once.touch()
            os.write(int(sys.argv[1]), GARBAGE)
            time.sleep(0.1)
        return 1.0
"""


async def say(question: wire.Ask) -> wire.Reply:
    return wire.Reply(content="x", finish_reason="stop", prompt_ids=[1], completion_ids=[2], logprobs=[-0.5])


def with_environment(folder: Path, code: str, use: Callable[[Environment], Any], **config: Any) -> Any:
    path = folder / "toy.py"
    path.write_text(textwrap.dedent(code))

    async def main() -> Any:
        settings = EnvironmentConfig(id=str(path), **config)
        async with open_environment(settings, logs=folder / "logs", load_timeout_s=60) as environment:
            return await asyncio.wait_for(use(environment), DEADLINE_S)

    return asyncio.run(main())


async def run_all(environment: Environment, count: int) -> list[Any]:
    tasks = [environment.run(wire.RunTask(task=f"r{i}", index=i), say) for i in range(count)]
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xffgarbage\n",
        b"\n",
        b'{"type":"done","task":"r1',  # half a line: it joins the next one
        b'{"type":"surprise","task":"r3.3"}\n',
        b'{"type":"done","task":"r1.7777","reward":0,"metrics":{},"prompt":[],"completion":[],"example_id":3}\n',
        b'{"type":"error","task":"nobody","stage":"score","error":"","traceback":""}\n',
        b'{"type":"pong","x":"\xed\xa0\x80"}\n' + b"[" * 100_000 + b"\n",
    ],
)
def test_a_worker_that_sends_garbage_is_started_again_and_no_rollout_is_lost(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    monkeypatch.setattr(logging.getLogger("trireme"), "propagate", True)

    async def use(environment: Environment) -> tuple[list[Any], int]:
        return await run_all(environment, 8), environment.num_restarts

    outcomes, num_restarts = with_environment(tmp_path, GARBLING.replace("GARBAGE", repr(garbage)), use)
    assert [outcome.task for outcome in outcomes] == [f"r{i}" for i in range(8)]
    assert num_restarts == 1
    assert "Environment worker" in caplog.text
    assert ", and was killed (log: " in caplog.text


def test_a_rollout_that_always_makes_its_worker_send_garbage_is_dropped_with_the_reason(tmp_path: Path) -> None:
    code = GARBLING.replace(" and not once.exists()", "").replace("GARBAGE", r"b'\xff\n'")

    async def use(environment: Environment) -> list[Any]:
        return await run_all(environment, 5)

    outcomes = with_environment(tmp_path, code, use)
    assert [isinstance(outcome, RolloutFailed) for outcome in outcomes] == [i == 3 for i in range(5)]
    assert "worker died" in outcomes[3].error
    assert "bytes that are no message" in outcomes[3].error


def test_answers_to_what_was_cancelled_do_no_harm(tmp_path: Path) -> None:
    async def use(environment: Environment) -> tuple[list[Any], int]:
        cancelled = [asyncio.create_task(run_all(environment, 4)) for _ in range(5)]
        await asyncio.sleep(0.05)
        for task in cancelled:
            task.cancel()
        return await run_all(environment, 4), environment.num_restarts

    outcomes, num_restarts = with_environment(tmp_path, GARBLING.replace('answer == "3"', "False"), use)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 4
    assert num_restarts == 0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_frozen_worker_is_killed_and_its_rollouts_go_elsewhere(tmp_path: Path, num_workers: int) -> None:
    async def use(environment: Environment) -> int:
        os.kill(environment._workers[0].pid, signal.SIGSTOP)
        for _ in range(40):  # those that were given to the frozen worker first may run out of their time
            outcomes = await run_all(environment, 4)
            if environment.num_restarts and all(isinstance(outcome, wire.Done) for outcome in outcomes):
                return environment.num_restarts
        return -1

    code = GARBLING.replace('answer == "3"', "False")
    assert with_environment(tmp_path, code, use, rollout_timeout_s=1.0, num_workers=num_workers) == 1


def test_a_worker_that_waits_for_a_slow_engine_is_not_taken_for_frozen(tmp_path: Path) -> None:
    async def use(environment: Environment) -> int:
        async def never(question: wire.Ask) -> wire.Reply:
            return await asyncio.sleep(DEADLINE_S)

        for index in range(3):
            with pytest.raises(RolloutFailed, match="timeout"):
                await environment.run(wire.RunTask(task=f"r{index}", index=index), never)
        return environment.num_restarts

    code = GARBLING.replace('answer == "3"', "False")
    assert with_environment(tmp_path, code, use, rollout_timeout_s=0.5) == 0


# the status server


def fetch(port: int, path: str, *, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method, data=body)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@contextmanager
def open_status(folder: Path) -> Iterator[tuple[Status, int]]:
    status, port = Status(RunConfig(output_dir=folder), Waits("orchestrator"), Peers()), free_port()
    with serve_status(status, StatusServer(port=port)):
        yield status, port


def test_the_status_server_refuses_what_it_does_not_know_and_goes_on(tmp_path: Path) -> None:
    rng = random.Random(0)
    with open_status(tmp_path) as (_, port):
        for _ in range(100):
            path = "/" + "".join(rng.choice("ahelstu/.%?&=0;") for _ in range(rng.randrange(30)))
            method = rng.choice(["GET", "POST", "PUT", "DELETE", "BREW"])
            code, _ = fetch(port, path, method=method, body=rng.randbytes(rng.randrange(3000)))
            assert code in (200, 307, 400, 404, 405)
        talk_nonsense(port)
        assert json.loads(fetch(port, "/status")[1])["state"] == "starting"


def test_heartbeats_that_come_while_they_are_read_break_no_answer(tmp_path: Path) -> None:
    with open_status(tmp_path) as (status, port):
        for number in range(3_000):
            status.peers.note(msgspec.structs.replace(BEAT, process=f"trainer {number}"))
            if number % 300 == 0:
                assert fetch(port, "/status")[0] == 200
                assert fetch(port, "/metrics")[0] == 200


def test_an_event_loop_that_no_longer_turns_makes_health_say_so(tmp_path: Path) -> None:
    with open_status(tmp_path) as (status, port):
        assert fetch(port, "/health")[0] == 200

        async def beat_once() -> None:
            beating = asyncio.create_task(status.keep_beating())
            await asyncio.sleep(0)
            beating.cancel()

        asyncio.run(beat_once())
        assert fetch(port, "/health")[0] == 200
        assert status.beat_at is not None
        status.beat_at -= STUCK_S + 1
        code, body = fetch(port, "/health")
        assert code == 503
        assert "has not turned for 3" in json.loads(body)["reason"]
