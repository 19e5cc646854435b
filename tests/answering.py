"""An answering end of the control wire, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trireme.base.processes import free_port
from trireme.messages import Reply, Request
from trireme.transport.control import ControlServer

DEADLINE_S = 30


@contextmanager
def answering(handle: Callable[[Request], Reply], port: int | None = None) -> Iterator[str]:
    """The address where a real `ControlServer` answers with `handle`."""
    port = port or free_port()
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def answer(request: Request) -> Reply:
        return handle(request)

    async def serve() -> None:
        server = ControlServer("127.0.0.1", port)
        ready.set()
        try:
            await server.serve(answer)
        finally:
            server.close()

    serving = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_until_complete, args=[asyncio.wait([serving])], daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(DEADLINE_S)
        loop.close()
