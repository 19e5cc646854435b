"""Servers in an event loop of their own, beside commands that run one here; and one with OpenAI's chat completions."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from aiohttp import web

from support.engines.fake_engine import serving
from trireme.base.processes import free_port


@contextmanager
def served(start: Callable[[], Any], leave: threading.Event | None = None) -> Iterator[Any]:
    """What an async context manager opens, in an event loop of its own: commands run theirs here.

    Args:
        leave: ends it before its time.
    """
    opened: list[Any] = []
    ready, leave = threading.Event(), leave or threading.Event()

    async def main() -> None:
        async with start() as server:
            opened.append(server)
            ready.set()
            while not leave.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(20)
        yield opened[0]
    finally:
        leave.set()
        thread.join(20)


class FakeChat:
    def __init__(self, port: int | None = None) -> None:
        self.leave = threading.Event()  # then nobody listens any more
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.answers: Callable[[int], tuple[int, Any]] = lambda number: (200, completion("yes"))
        self.port = port or free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def chat(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        self.requests.append(await request.json())
        status, body = self.answers(len(self.requests) - 1)
        return web.json_response(body, status=status)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "grand-model"}]})

    @contextmanager
    def running(self) -> Iterator[Self]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        with served(lambda: serving(app, self.port), self.leave):
            yield self


def completion(content: str | list[Any] | None, *, reason: str = "stop", **message: Any) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": content} | message, "finish_reason": reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 2}}
