"""HTTP routes for those who know the token: vLLM's, and those of the orchestrator's status server.

`/health` is open, for those who start a process again: it tells whether a server is well and nothing else.

Example:
    vllm serve MODEL --middleware trireme.transport.bearer.RequireToken     # with TRIREME_TOKEN set
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from trireme.base.log import Sparingly, get_logger
from trireme.base.token import TOKEN, is_same, token

OPEN = ("/health",)
REFUSAL = (
    "This route wants the token that the machines of the run share - expected the header `Authorization: Bearer …` - "
    f"set {TOKEN} to the same value on all of them."
)

log = get_logger("http")
sparingly = Sparingly(log)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def may_enter(path: str, authorization: str, secret: str | None) -> bool:
    """Whether a request is answered."""
    return secret is None or path in OPEN or is_same(f"Bearer {secret}", authorization)


class RequireToken:
    """An ASGI middleware. Without a token it lets everybody in: then nobody but this machine can knock."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._secret = token()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._lets_in(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            sparingly.warning("%s asked for %s without the run's token", _who(scope), scope["path"])
            await _refuse(send)

    def _lets_in(self, scope: Message) -> bool:
        headers = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        authorization = headers[0].decode("latin-1") if len(headers) == 1 else ""
        return may_enter(scope["path"], authorization, self._secret)


def _who(scope: Message) -> str:
    client = scope.get("client")
    return client[0] if client else "somebody"


async def _refuse(send: Send) -> None:
    body = json.dumps({"error": REFUSAL}).encode()
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
