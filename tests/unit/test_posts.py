"""Requests over connections that are kept: what comes back, what is reused, and how a server can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest

from trireme.base.processes import free_port
from trireme.transport.posts import Posts, open_posts

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
DEADLINE_S = 10.0


class Server:
    """Answers each request with the next of what it was given; None hangs up, silence is b""."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.hung_up = asyncio.Event()  # by the asker
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if self.answers else OK
                if answer is None:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hung_up.set()
        writer.close()


def ask(answers: list[bytes | None], use: Callable[[Posts, Server], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        server = Server(*answers)
        posts = Posts(**{"timeout_s": DEADLINE_S} | options)
        async with await asyncio.start_server(server.serve, "127.0.0.1", server.port), asyncio.timeout(DEADLINE_S):
            with closing(posts):
                return await use(posts, server)

    return asyncio.run(main())


async def twice(posts: Posts, server: Server) -> tuple[int, bytes, bytes]:
    """The status and the answers to two requests."""
    (status, first), (_, second) = [await posts.post(server.url, "ask", b"{}") for _ in range(2)]
    return status, first, second


def test_the_request_is_what_http_says_and_carries_the_token():
    async def use(posts: Posts, server: Server) -> list[bytes]:
        assert await posts.post(server.url, "v1/ask", b'{"a":1}') == (200, b"hi")
        assert server.requests[0].endswith(b'\r\n\r\n{"a":1}')
        return server.requests[0].partition(b"\r\n\r\n")[0].split(b"\r\n")

    lines = ask([], use, headers={"Authorization": "Bearer secret"})
    assert lines[0] == b"POST /v1/ask HTTP/1.1"
    assert {b"Content-Type: application/json", b"Authorization: Bearer secret", b"Content-Length: 7"} <= set(lines)


def test_one_after_the_other_need_one_connection_and_many_at_once_one_each():
    async def use(posts: Posts, server: Server) -> tuple[int, int]:
        await twice(posts, server)
        alone = server.num_connections
        await asyncio.gather(*(posts.post(server.url, "ask", b"{}") for _ in range(20)))
        return alone, server.num_connections

    assert ask([], use) == (1, 20)


CHUNKED = b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
STRAY = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstray"
LAST = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("first", "expected", "num_connections"),
    [
        (CHUNKED, (503, b"abcde", b"hi"), 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, (200, b"hi", b"hi"), 1),
        (OK + STRAY, (200, b"hi", b"hi"), 2),  # more than an answer is no part of the next
        (LAST, (200, b"hi", b"hi"), 2),  # the server will not keep the connection
    ],
)
def test_an_answer_is_read_to_its_end_and_no_further(first, expected, num_connections):
    async def use(posts: Posts, server: Server) -> tuple:
        return await twice(posts, server), server.num_connections

    assert ask([first], use) == (expected, num_connections)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "ConnectionResetError: it hung up"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close", "TimeoutError: no answer within 0.2 s"),
        (b"SSH-2.0-OpenSSH\r\n", "ConnectionError: its answer is not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n", "ConnectionError: its answer is not HTTP"),
        (b"", "TimeoutError: no answer within 0.2 s"),
    ],
)
def test_whatever_a_server_does_instead_is_said(answer, words):
    async def use(posts: Posts, server: Server) -> str:
        with pytest.raises((ConnectionError, TimeoutError)) as caught:
            await posts.post(server.url, "ask", b"{}")
        return f"{type(caught.value).__name__}: {caught.value}"

    assert ask([answer], use, timeout_s=0.2).startswith(words)


def test_nobody_there_is_a_connection_error():
    with open_posts(timeout_s=1.0, watched=True) as posts, pytest.raises(ConnectionError, match="cannot connect"):
        asyncio.run(posts.post(f"http://127.0.0.1:{free_port()}", "ask", b"{}"))


def test_whoever_is_cancelled_hangs_up_so_that_the_engine_stops():
    async def use(posts: Posts, server: Server) -> bool:
        asking = asyncio.create_task(posts.post(server.url, "ask", b"{}"))
        while not server.requests:
            await asyncio.sleep(0)
        asking.cancel()
        await server.hung_up.wait()
        return asking.cancelled()

    assert ask([b""], use)
