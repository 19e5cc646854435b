"""Authentication for HTTP routes: vLLM's, and those of the orchestrator's status server.

With a token, each route but `/health` requires it. Without one, a server listens on loopback only, and must not answer
a web page in a browser of this machine: requests that name another host (DNS rebinding) or another site (a form, a
script) are refused. Of vLLM's `/collective_rpc`, which calls any method of a worker, only our own methods are allowed.

Example:
    vllm serve MODEL --middleware trireme.transport.bearer.RequireToken
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from trireme.base.log import RateLimitedLog, get_logger
from trireme.base.network import host_of, is_loopback
from trireme.base.token import KEY_FILE, TOKEN, is_same, token

OPEN = ("/health",)
REFUSAL = (
    "This route wants the run's token - expected the header `Authorization: Bearer …` - "
    f"set {TOKEN} to the same value for all processes of the run; the run's folder has it in {KEY_FILE}."
)
FOREIGN = (
    "This server has no token and answers only programs of this machine - expected a loopback address as Host, no "
    f"Origin, and of /collective_rpc methods of Trireme. Set {TOKEN} for the server and its clients."
)
RPC, OURS = "/collective_rpc", "trireme_"
MOST_BYTES = 64 << 20  # limit for a call of a worker's method; the names and shapes of all tensors are some MB

log = get_logger("http")
rate_limited = RateLimitedLog(log)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]


def may_enter(path: str, authorization: str, *keys: str | None) -> bool:
    """Return whether a server with these keys answers a request. A server without keys answers every request."""
    known = [key for key in keys if key is not None]
    return not known or path in OPEN or any(is_same(f"Bearer {key}", authorization) for key in known)


def is_from_here(scope: Message) -> bool:
    """Return whether a request comes from a program of this machine, not from a web page in its browser."""
    host, origin = header(scope, b"host"), header(scope, b"origin")
    site = header(scope, b"sec-fetch-site")
    return is_loopback(host_of(host)) and not origin and site in ("", "none", "same-origin")


def header(scope: Message, name: bytes) -> str:
    """Return the value of a header; "" if it is missing or given more than once."""
    values = [value for found, value in scope["headers"] if found.lower() == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


class ClientDisconnected(Exception):
    """The client closed the connection: no error, and nothing to log."""


class RequireToken:
    """ASGI middleware in front of all routes."""

    def __init__(self, app: App, reader_key: str | None = None) -> None:
        """Wrap an ASGI application, whose routes a second key may open as the token does."""
        self._app = app
        self._keys = (token(), reader_key)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif self._keys[0] is not None:
            if may_enter(scope["path"], header(scope, b"authorization"), *self._keys):
                await self._app(scope, receive, send)
                return

            # Rate-limited: a scanner or an engine of another run may ask many times a second.
            client = scope.get("client")
            name = client[0] if client else "an unknown client"
            rate_limited.warning("%s asked for %s without the run's token", name, scope["path"])
            await _refuse(scope, receive, send, 401, REFUSAL)
        elif not is_from_here(scope):
            await _refuse(scope, receive, send, 403, FOREIGN)
        elif scope["path"].rstrip("/") == RPC:
            await self._call(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _call(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass on a `/collective_rpc` request if it names one of our methods; refuse it otherwise."""
        try:
            body = await read_body(receive, MOST_BYTES)
            is_ours = str(json.loads(body)["method"]).startswith(OURS)
        except (ValueError, KeyError, TypeError, RecursionError, ClientDisconnected):
            # A body that cannot be read is refused like a foreign method; vLLM must not see it.
            is_ours = False

        if is_ours:
            await self._app(scope, replay(body, receive), send)
        else:
            await _refuse(scope, receive, send, 403, FOREIGN)


async def read_body(
    receive: Receive, most_bytes: float = math.inf, count: Callable[[int], None] = lambda num_bytes: None
) -> bytes:
    """Read the body of a request.

    Args:
        count: called with the bytes of each piece, before it is added; may raise.

    Raises:
        ClientDisconnected: the client closed the connection.
        ValueError: it has more than `most_bytes`.
    """
    body, has_more = bytearray(), True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        count(len(message.get("body", b"")))
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
        if len(body) > most_bytes:
            raise ValueError(f"a request of more than {most_bytes} bytes")
    return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns the body that was read already."""
    read = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        return next(read, None) or await receive()

    return again


async def answer(scope: Message, receive: Receive, send: Send, code: int, body: bytes, *headers: Header) -> None:
    """Answer an HTTP request with a status, a body and these headers; close a websocket."""
    if scope["type"] == "websocket":
        # A websocket must be accepted or closed after its `connect` message; it has no status and no body.
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": code, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def _refuse(scope: Message, receive: Receive, send: Send, code: int, reason: str) -> None:
    headers = ((b"content-type", b"application/json"), (b"www-authenticate", b"Bearer"))
    await answer(scope, receive, send, code, json.dumps({"error": reason}).encode(), *headers)
