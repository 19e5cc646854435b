"""Who is let in to the dashboard: this machine's own browser, or one that knows the key of the run's token.

The key is in the address that is printed; the browser keeps it in a cookie. A page of another site can make a browser
ask for addresses of this machine: such requests carry that site's name, and are refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from trireme.base.network import host_of, is_loopback
from trireme.base.token import derive, is_same

COOKIE = "trireme_dashboard"
KEY = "key"
CONFINING = (
    (
        b"content-security-policy",
        b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self' ws: wss:; "
        b"frame-ancestors 'self'; object-src 'none'; base-uri 'self'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
"""NiceGUI's own pages need inline scripts; what a page may talk to, and who may embed it, is confined."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

REFUSAL = b"This dashboard wants its key - expected the address that `trireme dashboard` printed. Open that one.\n"


def key_of(token: str) -> str:
    """Tells nothing of the token, and opens nothing but the dashboard."""
    return derive(token, "dashboard").hex()[:32]


class Gate:
    """An ASGI middleware, around everything."""

    def __init__(self, app: App, key: str | None) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or may_enter(scope, self._key):
            await self._app(scope, receive, self._with_headers(scope, send))
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send)

    def _with_headers(self, scope: Message, send: Send) -> Send:
        """Add the headers that confine a page, and hand the key that came with the address to the browser, once."""
        if scope["type"] != "http":
            return send
        headers = list(CONFINING)
        if self._key is not None and _asked_key(scope) is not None:
            cookie = f"{COOKIE}={self._key}; Path=/; HttpOnly; SameSite=Strict"
            headers.append((b"set-cookie", cookie.encode()))

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *headers]
            await send(message)

        return sending


def may_enter(scope: Message, key: str | None) -> bool:
    """Without a key the dashboard listens on loopback only, and answers only to loopback's names."""
    host, origin = _header(scope, b"host"), _header(scope, b"origin")
    if origin and origin.partition("://")[2] != host:
        return False
    if key is None:
        return is_loopback(host_of(host))
    given = _asked_key(scope) or _cookie_key(scope) or ""
    return is_same(key, given)


def _header(scope: Message, name: bytes) -> str:
    return next((value.decode("latin-1") for found, value in scope["headers"] if found.lower() == name), "")


def _asked_key(scope: Message) -> str | None:
    values = parse_qs(scope.get("query_string", b"").decode("latin-1")).get(KEY)
    return values[0] if values else None


def _cookie_key(scope: Message) -> str | None:
    try:
        found = SimpleCookie(_header(scope, b"cookie")).get(COOKIE)
    except CookieError:
        return None
    return found.value if found else None


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(REFUSAL)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": REFUSAL})
