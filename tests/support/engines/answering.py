"""Servers that answer in a thread of their own: one end of the control wire, and of HTTP."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.engines.fake_chat import served
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
        serving = asyncio.create_task(server.serve(answer))
        try:
            yield
        finally:
            serving.cancel()
            server.close()

    with served(serve):
        yield f"tcp://127.0.0.1:{port}"


@contextmanager
def answering_http(answer: Callable[[str, str | None], tuple[int, bytes]], port: int = 0) -> Iterator[int]:
    """The port of a server that answers GET with what `answer(path, authorization header)` returns."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, self.headers["Authorization"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()
