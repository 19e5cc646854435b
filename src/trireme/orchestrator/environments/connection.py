"""The orchestrator's end of the socket pair to an environment worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trireme.base.errors import PeerDied
from trireme.orchestrator.environments import wire


class Connection(asyncio.Protocol):
    """Sends and receives messages. Those sent in one iteration of the event loop leave with one write."""

    def __init__(
        self,
        on_message: Callable[[wire.AboutRollout | wire.Pong], None],
        on_garbage: Callable[[str], None],
        answer: asyncio.Future[wire.Ready | wire.Failed],
    ) -> None:
        self.closed = asyncio.Event()
        self._on_message = on_message
        self._on_garbage = on_garbage
        self._answer = answer  # to Load; this connection's own, so that an old one's end cannot fail a new one's start
        self._reader = LineReader(self._receive)
        self._transport: asyncio.WriteTransport | None = None
        self._outbox: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are no asyncio.WriteTransport

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
        except wire.Garbage as error:
            self._on_garbage(str(error))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.closed.set()
        if not self._answer.done():
            self._answer.set_exception(PeerDied("The worker hung up before it had loaded the environment."))

    def send(self, message: wire.ToWorker) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(wire.encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _receive(self, message: wire.FromWorker) -> None:
        if not isinstance(message, (wire.Ready, wire.Failed)):
            self._on_message(message)
        elif not self._answer.done():
            self._answer.set_result(message)

    def _flush(self) -> None:
        if self._transport is not None:  # else the worker is dead, and `wait_for_death` fails its rollouts
            self._transport.write(b"".join(self._outbox))
        self._outbox.clear()


class LineReader:
    """Cuts the bytes of a stream socket into messages.

    Example:
        reader = LineReader(on_message)
        reader.feed(b'{"type":"done"')
        reader.feed(b',...}\\n')  # on_message(Done(...))
    """

    def __init__(self, on_message: Callable[[wire.FromWorker], None]) -> None:
        self._on_message = on_message
        self._partial = bytearray()

    def feed(self, data: bytes) -> None:
        """Raises: Garbage."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._keep(data)
            return
        lines = bytes(self._partial) + data[:end]
        self._partial.clear()
        self._keep(data[end:])
        for line in lines.splitlines():
            self._on_message(wire.decode(line))

    def _keep(self, data: bytes) -> None:
        self._partial += data
        if len(self._partial) > wire.LONGEST_LINE:
            raise wire.Garbage(
                f"sent {len(self._partial)} bytes without an end of line, at most {wire.LONGEST_LINE} expected"
            )
