"""A connection of the gateway, with the limits that uvicorn does not set. They hold for clients without a key, too.

A head has to be whole within `HEAD_S`, and a body to come at a lowest rate. At the largest number of connections, the
one that has been without a request for longest makes room for a new one.
"""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trireme.base.log import RateLimitedLog, get_logger

rate_limited = RateLimitedLog(get_logger("gateway"))

LARGEST_HEAD = 1 << 20  # bytes of a request without its body: headers, and the frames of a chunked body

MOST_CONNECTIONS = 1 << 14
"""The most of one gateway, unless half of the files that the orchestrator may open are fewer."""

HEAD_S = 30.0  # time for a head, counted from the connection's beginning or the first byte of a further request
BODY_S = 30.0  # time in which a body that is not whole has to bring the bytes of the lowest rate
SLOWEST_BODY = 32 << 10  # bytes per second


class Idle(dict["Connection", None]):
    """The connections of one gateway that have no request, the oldest first."""


class Connection(HttpToolsProtocol):
    """One connection of a client.

    Example:
        uvicorn.Config(app, http=partial(Connection, Idle()))
    """

    def __init__(self, idle: Idle, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._idle = idle
        self._num_beside = 0  # bytes of the request that are not its body
        self._num_body = 0  # bytes of the body since the timer was set
        self._has_head = False  # a body is being received
        self._timer: asyncio.TimerHandle | None = None  # deadline of the head, or of the body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # replaces uvicorn's, as a client is not slow while this server does not read
        self.flow = self._flow = _TimedFlow(transport)

        # clients without a key can open connections too, and must not shut out the programs of rollouts
        most = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        if len(self.connections) > most:
            rate_limited.warning(
                "%d connections are open, the most that the gateway allows; the one that has been without a request "
                "for longest is closed for each new one. See who holds them with `ss -tnp`.",
                most,
            )
            oldest = next(iter(self._idle), self)
            self._idle.pop(oldest, None)
            oldest.transport.abort()
            # no other one is idle: the new connection itself is refused
            if oldest is self:
                return

        self._idle[self] = None
        self._set_timer(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._set_timer(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # the first bytes of a further request on a connection that was kept open
        if self._timer is None and not self._is_busy():
            self._set_timer(HEAD_S)
        # all bytes count here, and `on_body` takes those of the body off again
        self._num_beside += len(data)
        super().data_received(data)
        if self._num_beside > LARGEST_HEAD:
            self.transport.close()

    def on_message_begin(self) -> None:
        self._num_beside = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._idle.pop(self, None)
        self._has_head = True
        self._set_timer(BODY_S)

    def on_body(self, body: bytes) -> None:
        self._num_beside -= len(body)
        self._num_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._has_head = False
        self._set_timer(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self._is_busy():
            self._idle[self] = None

    def _is_busy(self) -> bool:
        """Return whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _set_timer(self, after_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if after_s is None else self.loop.call_later(after_s, self._look)
        self._num_body, self._paused_before_s = 0, self._flow.paused_s() if after_s else 0.0

    def _look(self) -> None:
        """Close the connection if its head is late or its body too slow."""
        # the rate is asked for only in the time in which this server did read
        read_s = BODY_S - (self._flow.paused_s() - self._paused_before_s)
        if self._has_head and self._num_body >= SLOWEST_BODY * read_s:
            self._set_timer(BODY_S)
        else:
            self._timer = None
            rate_limited.warning("a connection was closed: its request did not come in time")
            self.transport.abort()


class _TimedFlow(FlowControl):
    """Flow control that knows for how long the server itself did not read: its clients are not slow then."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._paused_s, self._since = 0.0, 0.0

    def paused_s(self) -> float:
        return self._paused_s + (time.monotonic() - self._since if self.read_paused else 0.0)

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._since = time.monotonic()
        super().pause_reading()

    def resume_reading(self) -> None:
        self._paused_s = self.paused_s()
        super().resume_reading()
