"""The wire between trainer and orchestrator: a question that may be asked again, an answer within a second.

Lost, doubled or reordered messages do no harm: a question carries a number, answers to earlier questions are thrown
away, and every answer is idempotent. While there is nothing to tell the answer is `NotYet`, so silence always means
that the peer is gone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from trireme.base.errors import Refused
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.messages import NotYet, Refusal, Reply, Request, decode_reply, decode_request, encode

log = get_logger("control")

ASK_AGAIN_S = 5.0
"""A question without an answer for this long is sent again."""

PATIENCE_S = 1.0
"""A server answers `NotYet` after this long."""


class ControlClient:
    """The asking end; one per thread (ZeroMQ sockets are not thread-safe)."""

    def __init__(self, address: str, waits: Waits, *, ask_again_s: float = ASK_AGAIN_S) -> None:
        self._address = address
        self._waits = waits
        self._ask_again_s = ask_again_s
        self._numbers = itertools.count(1)
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket:
        socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self._address)
        return socket

    def ask(self, request: Request, *, what: str, deadline_s: float) -> Reply:
        """Asks until there is an answer other than `NotYet`.

        Raises:
            Refused: the orchestrator says that asking again would not help.
            DeadlineExceeded: named, after `deadline_s`.
        """
        with self._waits.waiting(what, peer="orchestrator", deadline_s=deadline_s) as wait:
            while True:
                reply = self._once(request)
                match reply:
                    case None:
                        wait.note = "no answer"
                    case NotYet(note):
                        wait.note = note
                    case Refusal(error):
                        raise Refused(error)
                    case _:
                        return reply
                wait.check()

    def tell(self, request: Request) -> None:
        """Sends without caring for the answer, nor for whether there is anybody."""
        while self._socket.poll(0):
            self._socket.recv_multipart()
        self._send(b"0", request)

    def _once(self, request: Request) -> Reply | None:
        number = str(next(self._numbers)).encode()
        self._send(number, request)
        while self._socket.poll(int(self._ask_again_s * 1000)):
            answered, payload = self._socket.recv_multipart()
            if answered == number:
                return decode_reply(payload)
        self._drop_unsent()
        return None

    def _send(self, number: bytes, request: Request) -> None:
        frames = [number, encode(request)]
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:  # the queue to a peer that is gone is full: blocking would be a wait without a deadline
            self._drop_unsent()
            self._socket.send_multipart(frames)

    def _drop_unsent(self) -> None:
        self._socket.close()
        self._socket = self._connect()

    def close(self) -> None:
        self._socket.close()


Handler = Callable[[Request], Awaitable[Reply]]


class ControlServer:
    """The answering end, bound before anybody asks."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(f"tcp://{host}:{port}")
        self._answering: set[asyncio.Task] = set()

    async def serve(self, handle: Handler) -> None:
        """Produces answers; waits for questions; woken by the socket. Runs until cancelled."""
        while True:
            peer, number, payload = await self._socket.recv_multipart()
            task = asyncio.create_task(self._answer(handle, peer, number, payload))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, handle: Handler, peer: bytes, number: bytes, payload: bytes) -> None:
        try:
            reply = await handle(decode_request(payload))
        except Exception as error:
            log.exception("a question could not be answered")
            reply = Refusal(error=f"{type(error).__name__}: {error}")
        await self._socket.send_multipart([peer, number, encode(reply)])

    def close(self) -> None:
        for task in self._answering:
            task.cancel()
        self._socket.close()


async def within_patience(task: asyncio.Future) -> bool:
    """Whether `task` is done, after waiting for it no longer than an asker should be kept without an answer."""
    done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
    return bool(done)
