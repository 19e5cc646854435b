"""Servers that answer in a thread of their own: one end of the control wire, and of HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from support.engines.fake_chat import served
from support.engines.fake_engine import serving
from trireme.base.processes import free_port
from trireme.messages import Reply, Request
from trireme.transport.control import ControlServer

DEADLINE_S = 30


@contextmanager
def answering(handle: Callable[[Request], Reply], port: int | None = None) -> Iterator[str]:
    """The address where a real `ControlServer` answers with `handle`."""
    port = port or free_port()

    async def answer(request: Request) -> Reply:
        return handle(request)

    @asynccontextmanager
    async def serve() -> AsyncIterator[None]:
        server = ControlServer("127.0.0.1", port)
        running = asyncio.create_task(server.serve(answer))
        try:
            yield
        finally:
            running.cancel()
            server.close()

    with served(serve):
        yield f"tcp://127.0.0.1:{port}"


@contextmanager
def answering_http(answer: Callable[[str, str | None], tuple[int, bytes]], port: int = 0) -> Iterator[int]:
    """The port of a server that answers GET with what `answer(path, authorization header)` returns."""
    port = port or free_port()

    async def get(request: web.Request) -> web.Response:
        status, body = answer(request.path_qs, request.headers.get("Authorization"))
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_get("/{path:.*}", get)
    with served(lambda: serving(app, port)):
        yield port
