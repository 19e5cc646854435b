"""Authentication of browsers at the dashboard: those of this machine alone, or those that send the key of a token.

The key is in the address that is printed; a browser keeps it in a cookie. A page of another site can make a browser
send requests to this machine. Such requests name that site or its host, and are refused.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from trireme.base.network import host_of, is_loopback
from trireme.base.token import derive, is_same
from trireme.transport.bearer import App, Message, Receive, Send, answer, header

COOKIE = "trireme_dashboard"
KEY = "key"  # in the query of the address
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self' ws: wss:; "
        b"frame-ancestors 'self'; object-src 'none'; base-uri 'self'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
"""NiceGUI's own pages need inline scripts; the servers that a page may talk to, and who may embed it, are limited."""
REFUSAL = b"This dashboard requires its key - expected the address that `trireme dashboard` printed. Open that one.\n"


def key_of(token: str) -> str:
    """Derive the key. It reveals nothing of the token, and is good for the dashboard alone."""
    return derive(token, "dashboard").hex()[:32]


def address_of(host: str, port: int, key: str | None) -> str:
    """Return the address to print, with the key in it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/" + (f"?{KEY}={key}" if key else "")


class RequireKey:
    """An ASGI middleware that answers only requests with the key, and gives every page the headers that confine it."""

    def __init__(self, app: App, key: str | None) -> None:
        """
        Args:
            key: None if the dashboard listens on loopback only, and answers to loopback's names only.
        """
        self._app = app
        self._key = key

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or may_enter(scope, self._key):
            await self._app(scope, receive, self._with_headers(scope, send))
        else:
            await answer(scope, receive, send, 401, REFUSAL, (b"content-type", b"text/plain"))

    def _with_headers(self, scope: Message, send: Send) -> Send:
        """Add `HEADERS` to answers, and a cookie if the key was in the address."""
        if scope["type"] != "http":
            return send

        headers = list(HEADERS)
        if self._key is not None and _key_in_address(scope):
            cookie = f"{COOKIE}={self._key}; Path=/; HttpOnly; SameSite=Strict"
            headers.append((b"set-cookie", cookie.encode()))

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *headers]
            await send(message)

        return sending


def may_enter(scope: Message, key: str | None) -> bool:
    """Return whether no other site sent a request, and it has the key if there is one."""
    host, origin = header(scope, b"host"), header(scope, b"origin")

    # A page of another site names that site as Origin, which this server is not.
    if origin and origin.partition("://")[2] != host:
        return False

    # Without a key, names other than loopback mean that a foreign DNS name points here (DNS rebinding).
    if key is None:
        return is_loopback(host_of(host))

    # The first visit has the key in its address; later requests have the cookie that it was given.
    given = _key_in_address(scope)
    if not given:
        try:
            cookie = SimpleCookie(header(scope, b"cookie")).get(COOKIE)
        except CookieError:
            return False
        given = cookie.value if cookie else ""
    return is_same(key, given)


def _key_in_address(scope: Message) -> str:
    return parse_qs(scope.get("query_string", b"").decode("latin-1")).get(KEY, [""])[0]
