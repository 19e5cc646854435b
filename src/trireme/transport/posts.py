"""POST requests to engines, over connections that are kept.

An engine is asked once for every turn of every rollout, so what a request costs is much of what a rollout costs. This
does what that needs and no more: one kind of request, one answer with a status and a body. `httptools` (the parser of
Node.js, and of the servers that are asked) reads the answers; aiohttp, which does everything, takes nine times as long.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httptools

from trireme.base.network import watched_socket
from trireme.base.token import bearer, token
from trireme.base.turns import Turns

IDLE_S = 4.0
"""A connection that was not used for longer is not used again: vLLM hangs up after 5 s, maybe just as it is asked."""

KNOWN_S = 10.0
"""An address is looked up again after so long."""

LOOK_EVERY_S = 1.0

Answer = tuple[int, bytes]


class Unreachable(ConnectionError):
    """Nobody listens there."""


class Posts:
    """Connections to any number of servers, as many to each as requests are under way."""

    def __init__(self, *, timeout_s: float, headers: Mapping[str, str] | None = None, watched: bool = False) -> None:
        """
        Args:
            timeout_s: from a question to the end of its answer.
            watched: connections leave the machine, see `base.network`.
        """
        self._timeout_s = timeout_s
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._watched = watched
        self._servers: dict[str, _Server] = {}
        self._asked: dict[_Connection, float] = {}  # until when each must have answered, in order
        self._look: asyncio.TimerHandle | None = None
        self._turns = Turns()  # an answer wakes a rollout: a thousand of them may come at once

    async def post(self, url: str, path: str, body: bytes) -> Answer:
        """Status and body. Whoever is cancelled hangs up.

        Raises:
            Unreachable: there is nobody.
            ConnectionError: they hung up, or what they say is not HTTP.
            TimeoutError: no answer within `timeout_s`.
        """
        server = self._servers.get(url)
        if server is None:
            server = self._servers[url] = _Server(url, self._headers, self._turns)
        connection = server.idle_connection() or await self._connect(server)
        self._note(connection)
        try:
            return await connection.ask(server.head(path, len(body)) + body)
        finally:
            del self._asked[connection]

    async def _connect(self, server: _Server) -> _Connection:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await server.connect(watched=self._watched)
        except TimeoutError:
            raise
        except OSError as error:
            raise Unreachable(f"cannot connect: {error}") from error

    def _note(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        self._asked[connection] = loop.time() + self._timeout_s
        if self._look is None:
            self._look = loop.call_later(min(LOOK_EVERY_S, self._timeout_s / 4), self._look_for_late_ones)

    def _look_for_late_ones(self) -> None:
        """One timer for all of them."""
        loop, self._look = asyncio.get_running_loop(), None
        for connection, until in self._asked.items():
            if until > loop.time():
                break
            connection.fail(TimeoutError(f"no answer within {self._timeout_s:g} s"))
        if self._asked:
            self._look = loop.call_later(min(LOOK_EVERY_S, self._timeout_s / 4), self._look_for_late_ones)

    def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        for server in self._servers.values():
            server.close()


@contextmanager
def open_posts(*, timeout_s: float, watched: bool) -> Iterator[Posts]:
    """With the run's token where there is one."""
    posts = Posts(timeout_s=timeout_s, headers=bearer(token()), watched=watched)
    try:
        yield posts
    finally:
        posts.close()


class _Server:
    """One of those that are asked."""

    def __init__(self, url: str, headers: str, turns: Turns) -> None:
        parts = urlsplit(url)
        assert parts.scheme == "http", f"{url}: only http is spoken here"
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._rest = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n{headers}Content-Length: "
        self.turns = turns
        self._heads: dict[str, bytes] = {}
        self._connections: set[_Connection] = set()
        self._idle: dict[_Connection, float] = {}  # since when, in order
        self._known: list[Any] = []  # addresses
        self._known_until = 0.0

    def head(self, path: str, length: int) -> bytes:
        head = self._heads.get(path)
        if head is None:
            head = self._heads[path] = f"POST {self._prefix}/{path} HTTP/1.1\r\n{self._rest}".encode("latin-1")
        return b"%b%d\r\n\r\n" % (head, length)

    def idle_connection(self) -> _Connection | None:
        """The one that was used last, where that was not long ago. A few that are too old are left at each question:
        to hang up a thousand times at once would take its time."""
        now = asyncio.get_running_loop().time()
        for _ in range(min(2, len(self._idle))):
            connection, since = self._idle.popitem()
            if now - since < IDLE_S and connection.is_open:
                return connection
            connection.hang_up()
        return None

    async def connect(self, *, watched: bool) -> _Connection:
        loop = asyncio.get_running_loop()
        error: OSError = ConnectionRefusedError(f"{self._host} has no address")
        for info in await self._addresses():
            made = watched_socket(info) if watched else socket.socket(*info[:3])
            made.setblocking(False)
            try:
                await loop.sock_connect(made, info[4])
                _, connection = await loop.create_connection(lambda: _Connection(self), sock=made)
                return connection
            except BaseException as failure:
                made.close()
                if not isinstance(failure, OSError):
                    raise
                error = failure
        raise error

    async def _addresses(self) -> list[Any]:
        """What the name stood for a moment ago, or stands for now."""
        loop = asyncio.get_running_loop()
        if not self._known or loop.time() > self._known_until:
            self._known = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._known_until = loop.time() + KNOWN_S
        return self._known

    def opened(self, connection: _Connection) -> None:
        self._connections.add(connection)

    def is_idle(self, connection: _Connection) -> None:
        if connection.is_open:
            self._idle[connection] = asyncio.get_running_loop().time()

    def lost(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)

    def close(self) -> None:
        for connection in list(self._connections):
            connection.hang_up()


class _Connection(asyncio.Protocol):
    """One question at a time."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._transport: Any = None  # uvloop's are no asyncio.Transport
        self._asker: asyncio.Future[Answer] | None = None  # until its answer is there
        self._parser: Any = None
        self._body: list[bytes] = []
        self._is_kept = False

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    async def ask(self, request: bytes) -> Answer:
        asker = self._asker = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        try:
            answer = await asker
        except BaseException:
            self.hang_up()
            raise
        if self._is_kept:
            self._server.is_idle(self)
        else:
            self.hang_up()
        return answer

    def fail(self, error: Exception) -> None:
        asker, self._asker = self._asker, None
        if asker is not None and not asker.done():
            asker.set_exception(error)

    def hang_up(self) -> None:
        self._is_kept = False
        self._transport.abort()

    # called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._asker is None:  # whatever it is, it is not the next answer
            self.hang_up()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(ConnectionError(f"its answer is not HTTP: {error or type(error).__name__}"))
            self.hang_up()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.lost(self)
        self.fail(ConnectionResetError("it hung up before it had answered"))
        self._parser = None  # it refers to us

    # called by the parser

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        status, body, self._body = self._parser.get_status_code(), b"".join(self._body), []
        asker = self._asker
        if status < 200:  # more is to come
            return
        self._asker, self._is_kept = None, asker is not None and self._parser.should_keep_alive()
        if asker is not None:
            self._server.turns.call(_tell, asker, (status, body))


def _tell(asker: asyncio.Future[Answer], answer: Answer) -> None:
    if not asker.done():
        asker.set_result(answer)
