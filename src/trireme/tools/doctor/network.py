"""The wires of a run, on its own addresses: ports, HTTP as its servers speak it, ZeroMQ as batches travel, and the
collectives of trainer and engines between two processes."""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import uvicorn

from trireme.base.errors import TriremeError
from trireme.base.network import interface_of, is_here, is_loopback, numeric
from trireme.base.processes import free_port, port_is_free
from trireme.base.token import bearer, token
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.messages import Heartbeat, Ok, Request
from trireme.tools.doctor.commands import listeners_of, port_problems
from trireme.tools.doctor.finding import Case, Finding, of, ok, problem, skipped, told
from trireme.tools.doctor.programs import Ended, Program
from trireme.transport.bearer import Message, Receive, RequireToken, Send
from trireme.transport.control import ControlClient, ControlServer

MIB = 1 << 20
TIMES = 20
ANSWER_S = 5.0
COLLECTIVE_S = 120.0
ROUND_TRIP = "trireme.tools.replay.round_trip"
FIREWALL = "Look for a firewall, or a proxy, that takes connections of this machine to itself (`iptables -L -n`)."
NAMES = "Does the machine's own name lead anywhere? `getent hosts $(hostname)`; GLOO_SOCKET_IFNAME=lo takes loopback."


# ports


def free_ports(case: Case) -> Iterator[Finding]:
    messages = port_problems(case)
    yield from map(told, messages)
    listeners = listeners_of(case)
    if not messages and listeners:
        named = ", ".join(f"{each.port} on {each.host} ({each.key})" for each in listeners)
        yield ok(named if listeners[0].command.room else f"{named}; those that are not set, each `rl` chooses anew")
    elif not messages:
        yield skipped("no process of this run belongs on this machine")


# HTTP


def http(case: Case) -> Iterator[Finding]:
    """Whoever runs on several machines has only its own here."""
    servers = [each for each in listeners_of(case) if each.key.endswith(".server.port")]
    for server in servers:
        yield of(_http_at(server.host, server.port), f"{server.key.partition('.')[0]}'s server")
    if not servers:
        yield skipped("no server of this run belongs on this machine")


def _http_at(host: str, port: int) -> Finding:
    """A megabyte there and back, then small questions, with the token where there is one."""
    if used := _in_use(host, port):
        return used
    reached = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1"}.get(host, host)
    try:
        with _echoing(host, port):
            large_s, small_s = asked_over_http(f"http://{reached}:{port}")
    except (httpx.HTTPError, OSError) as error:
        return problem(f"{host}:{port} listens and cannot be asked ({error!r}) - expected an answer", FIREWALL)
    return ok(
        f"{small_s * 1000:.1f} ms for a question at {host}:{port}, 1 MiB there and back in {large_s * 1000:.0f} ms",
        question_s=small_s,
        mebibyte_s=large_s,
    )


def _in_use(host: str, port: int) -> Finding | None:
    return None if port_is_free(port, host) else skipped(f"port {port} on {host} is in use")


def asked_over_http(url: str) -> tuple[float, float]:
    """Raises: httpx.HTTPError, or ValueError where other bytes came back than were sent."""
    payload, took = os.urandom(MIB), []
    with httpx.Client(timeout=ANSWER_S, trust_env=False, headers=bearer(token())) as client:
        began = time.perf_counter()
        answer = client.post(url, content=payload).raise_for_status()
        large_s = time.perf_counter() - began
        if answer.content != payload:
            raise ValueError("other bytes came back than were sent")
        for _ in range(TIMES):
            began = time.perf_counter()
            client.post(url, content=b"?").raise_for_status()
            took.append(time.perf_counter() - began)
    return large_s, statistics.median(took)


@contextmanager
def _echoing(host: str, port: int) -> Iterator[None]:
    """A server as the run has them: uvicorn, behind the run's token."""
    server = uvicorn.Server(uvicorn.Config(RequireToken(_echo), log_config=None, lifespan="off", ws="none"))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(ANSWER_S)


async def _echo(scope: Message, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), bool(message.get("more_body"))
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]}
    )
    await send({"type": "http.response.body", "body": body})


# ZeroMQ


def zeromq(case: Case) -> Iterator[Finding]:
    for listener in listeners_of(case):
        if listener.key == "ports.batches":
            yield _in_use(listener.host, listener.port) or _zeromq_at(listener.host, listener.port)
            return
    yield skipped("the orchestrator belongs on another machine")


def _zeromq_at(host: str, port: int) -> Finding:
    try:
        question_s = asyncio.run(_asked_over_zeromq(host, port))
    except (TriremeError, OSError) as error:
        return problem(f"{host}:{port} listens and cannot be asked ({error}) - expected an answer", FIREWALL)
    sealed = "encrypted with the token" if bearer(token()) else "without a token"
    return ok(f"{question_s * 1000:.2f} ms for a question at {host}:{port}, {sealed}", question_s=question_s)


async def _asked_over_zeromq(host: str, port: int) -> float:
    """Seconds of the run's own questions and answers; the median."""
    server = ControlServer(host, port)
    serving = asyncio.create_task(server.serve(_answer))
    try:
        return await asyncio.to_thread(_ask, f"tcp://{host}:{port}")
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        server.close()
        await _until_free(host, port)


async def _until_free(host: str, port: int) -> None:
    """ZeroMQ closes behind our back. The run, and the next question, want this port."""
    gives_up = time.monotonic() + ANSWER_S
    while not port_is_free(port, host) and time.monotonic() < gives_up:
        await asyncio.sleep(0.01)


async def _answer(_: Request) -> Ok:
    return Ok()


def _ask(address: str) -> float:
    client, took = ControlClient(address, Waits("the doctor"), ask_again_s=ANSWER_S), []
    question = Heartbeat(run_id="doctor", process="doctor", state="asking", version=0, waits=[])
    try:
        for _ in range(TIMES):
            began = time.perf_counter()
            client.ask(question, what="an answer", deadline_s=ANSWER_S)
            took.append(time.perf_counter() - began)
    finally:
        client.close()
    return statistics.median(took)


# collectives


def collectives(case: Case) -> Iterator[Finding]:
    """As ranks add gradients, and as weights travel to an engine: two processes, for each kind that the run uses."""
    for kind, gpus in kinds_of(case.config):
        if any(gpu >= case.devices.num_gpus for gpu in gpus):
            yield skipped(f"{kind}: GPUs {', '.join(map(str, gpus))} are not here")
            continue
        yield of(_collective(kind, gpus, case), kind)


def kinds_of(config: RunConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Each with the GPUs of the two processes. gloo is everywhere: it carries checkpoints and barriers."""
    pair = tuple(dict.fromkeys((*(config.trainer_gpu_ids or ())[:1], *(config.inference_gpu_ids or ())[-1:])))
    if len(pair) < 2:
        pair = tuple((config.trainer_gpu_ids or ())[:2])
    return [("gloo", ()), *([("nccl", pair)] if len(pair) == 2 else [])]


def _collective(kind: str, gpus: tuple[int, ...], case: Case) -> Finding:
    ended = run_pair(kind, _address(case.config), [case.devices.gpus[gpu] for gpu in gpus])
    bad = [each for each in ended if each.code != 0]
    if bad:
        how = NAMES if kind == "gloo" else "`NCCL_DEBUG=INFO trireme doctor --only collectives` says where it stops."
        told_last = "\n".join(dict.fromkeys(each.last_words for each in bad))
        return problem(f"one of two processes {bad[0].how} - expected them to add up. Last words:\n{told_last}", how)
    figures = ended[0].answer or {}
    return ok(
        f"two processes add 4 MiB in {figures['all_reduce_s'] * 1000:.1f} ms, and one sends the other "
        f"{figures['broadcast_bytes'] / MIB:.0f} MiB at {figures['broadcast_bytes_per_s'] / 1e9:.2f} GB/s",
        **figures,
    )


def run_pair(kind: str, address: str, gpus: list[str], *, limit_s: float = COLLECTIVE_S) -> list[Ended]:
    """Both processes, as they ended."""
    with ExitStack() as stack:
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port(address)), "WORLD_SIZE": "2"}
        meeting |= {"TRIREME_DOCTOR_STORE": str(free_port(address)), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        if not is_loopback(address) and (interface := interface_of(address)):
            names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            meeting |= {name: os.environ.get(name, interface) for name in names}
        pair = [
            Program(ROUND_TRIP, kind, env=meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank if gpus else 0)})
            for rank in range(2)
        ]
        for program in pair:
            stack.callback(program.end)
        return [program.wait(limit_s) for program in pair]


def _address(config: RunConfig) -> str:
    """By which this machine is known to the others of the run."""
    return numeric(next((host for host in config.hosts.all if is_here(host)), "127.0.0.1"))
