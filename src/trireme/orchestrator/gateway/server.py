"""The gateway's HTTP server: the policy behind the APIs that agent programs speak.

    POST /v1/chat/completions             OpenAI's Chat Completions
    POST /v1/responses                    OpenAI's Responses
    POST /v1/messages                     Anthropic's Messages
    POST /v1/messages/count_tokens
    GET  /v1/models, HEAD /
    GET  /transcript                      the longest conversation of the session, as chat messages

An API key is a session: one rollout, and one role in it. A client that cannot set a key puts it into the path:
`/s/KEY/v1/messages`. A key that no open session has is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from trireme.base.log import RateLimitedLog, get_logger
from trireme.journal.model_turn import Message
from trireme.orchestrator.gateway.budgets import LARGEST_KEPT_BY_ALL, Inflow
from trireme.orchestrator.gateway.connections import Connection, Idle
from trireme.orchestrator.gateway.dialects.anthropic import ANTHROPIC
from trireme.orchestrator.gateway.dialects.chat import CHAT
from trireme.orchestrator.gateway.dialects.responses import RESPONSES, ResponsesBody
from trireme.orchestrator.gateway.dialects.responses import read as read_responses
from trireme.orchestrator.gateway.dialects.turn import (
    STATUS,
    Body,
    ClientRequest,
    Dialect,
    Event,
    Rejected,
    decode_body,
    unread_fields,
)
from trireme.orchestrator.gateway.endpoint import LARGEST_BODY, Endpoint, encode_conversation
from trireme.orchestrator.session.wire import Reply
from trireme.transport.bearer import ClientDisconnected
from trireme.transport.bearer import read_body as receive_body

log = get_logger("gateway")
rate_limited = RateLimitedLog(log)

LARGEST_BODY_WITH_PICTURES = 32 << 20
BODIES_OF_ALL = 512 << 20


MOST_TRANSCRIPTS = 4  # largest number that one session is sent at once
PIECE = 64 << 10  # bytes of a transcript that are written at once
MOST_NAMED = 200  # fields that no dialect obeys, and that are named in the log


QUIET_S = 15.0  # a stream without a turn by then begins with comments, so that its client does not give up

EXPECTED_S = 600.0
"""Requests of a session that outlived the orchestrator wait this long for it, as long as SDKs wait for an answer."""


KEPT_KEYS = 10_000  # ended sessions whose keys are answered with the reason
RETRY_HEADER = "x-stainless-retry-count"  # the SDKs of OpenAI and Anthropic set it to the number of the retry
TRACE_HEADER = "x-session-id"  # verifiers sets it to the id of the agent run that asks


class Gateway:
    """All endpoints, by key, and the application that serves them."""

    def __init__(self, url: str = "", largest_body: int | None = None) -> None:
        self.url = url  # without a path
        self._largest_body = largest_body or LARGEST_BODY
        self._bodies = Inflow("all sessions", BODIES_OF_ALL, 8 * self._largest_body)
        self._named: set[str] = set()  # fields that were named in the log, as they are not obeyed
        self._open: dict[bytes, Endpoint] = {}  # keyed by the key's digest: a lookup takes as long for a wrong key
        self._ended: OrderedDict[bytes, str] = OrderedDict()
        self._expected: dict[bytes, asyncio.Event] = {}  # keys of sessions that will be opened again

        # the second prefix is for clients that cannot set a header: their key is in the path
        self.app = FastAPI(openapi_url=None)
        for prefix in ("", "/s/{key}"):
            self.app.add_api_route(f"{prefix}/", _greet, methods=["HEAD", "GET"])
            self.app.add_api_route(f"{prefix}/v1/models", self.serve(CHAT, self._models), methods=["GET"])
            self.app.add_api_route(f"{prefix}/transcript", self.serve(CHAT, self._transcript), methods=["GET"])
            count = self.serve(ANTHROPIC, self._count)
            self.app.add_api_route(f"{prefix}/v1/messages/count_tokens", count, methods=["POST"])
            for path, dialect in (("chat/completions", CHAT), ("responses", RESPONSES), ("messages", ANTHROPIC)):
                answer = self.serve(dialect, self._answer)
                self.app.add_api_route(f"{prefix}/v1/{path}", answer, methods=["POST"])

    def expect(self, key: str) -> None:
        """Let requests of a key wait, as its session outlived the orchestrator and is opened again."""
        self._expected[_digest(key.encode())] = asyncio.Event()

    def open(self, endpoint: Endpoint) -> None:
        """Answer the requests that come with an endpoint's key."""
        endpoint.bodies.rate = self._largest_body
        self._open[_digest(endpoint.key.encode())] = endpoint
        self._settle(endpoint.key)

    def _settle(self, key: str) -> None:
        if (expected := self._expected.pop(_digest(key.encode()), None)) is not None:
            expected.set()

    def close(self, key: str, why: str) -> None:
        """End the session of a key. The key is refused from now on, with the reason."""
        endpoint = self._open.pop(_digest(key.encode()), None)
        if endpoint is not None:
            endpoint.end(why)
            self._ended[_digest(key.encode())] = why
            while len(self._ended) > KEPT_KEYS:
                self._ended.popitem(last=False)
        self._settle(key)

    def serve(
        self, dialect: Dialect, answer: Callable[[Request, Endpoint, Dialect], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler that finds the endpoint of a request and refuses in its dialect."""

        async def handle(request: Request) -> Response:
            try:
                return await answer(request, await self.find(request), dialect)
            except Rejected as refused:
                return refusal(refused, dialect)
            except ClientDisconnected:
                return Response(status_code=400)  # the client has left
            except Exception as error:
                return refusal(_log_failure(error), dialect)

        return handle

    async def find(self, request: Request) -> Endpoint:
        """Return the endpoint of a request's key, once it is open again. Raises: Rejected."""
        for digest in _keys_of(request):
            # a session that outlived the orchestrator is opened again soon, so its program waits and does not fail
            if digest in self._expected:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._expected[digest].wait(), EXPECTED_S)
            if digest in self._open:
                return self._open[digest]
            if digest in self._ended:
                raise Rejected("ended", f"The session of this API key has ended: {self._ended[digest]}.")
        raise Rejected(
            "unauthorized",
            "No open session has this API key - expected the one of a rollout, as `Authorization: Bearer KEY`, as "
            "`x-api-key: KEY`, or as the path /s/KEY/v1/... A key ends with its rollout, and when the orchestrator is "
            "restarted. A client of your own opens a session again then.",
        )

    async def receive(self, request: Request, endpoint: Endpoint | None, most_bytes: int | None = None) -> bytes:
        """Receive the body of a request, within the budgets of its session and of all. Raises: Rejected."""
        most_bytes = most_bytes or self._largest_body
        budgets = [self._bodies] if endpoint is None else [endpoint.bodies, self._bodies]
        # the wait comes first, while the request takes no memory but its head
        for budget in budgets:
            await budget.wait_for_turn()

        # bytes that each budget has counted: one may refuse after the other has counted them
        taken = [0] * len(budgets)

        def take(num_bytes: int) -> None:
            for place, budget in enumerate(budgets):
                budget.take(num_bytes)
                taken[place] += num_bytes

        try:
            # an announced size is refused before the body is read; a wrong one is found while it comes
            if (announced := int(request.headers.get("content-length", 0))) > most_bytes:
                raise ValueError(f"{announced} bytes")
            return await receive_body(request.receive, most_bytes, take)
        except ValueError as error:
            words = f"The request is too large ({error}), expected at most {most_bytes / (1 << 20):g} MiB."
            raise Rejected("invalid", words) from error
        finally:
            for budget, num_bytes in zip(budgets, taken, strict=True):
                budget.settle(num_bytes)

    async def _read(self, request: Request, endpoint: Endpoint, dialect: Dialect) -> tuple[Body, ClientRequest]:
        """Read a request for a turn. Raises: Rejected."""
        data = await self.receive(request, endpoint)
        body = decode_body(data, dialect.body)
        if isinstance(body, ResponsesBody):
            earlier = endpoint.responses.find(body.previous_response_id)
            if earlier:  # costs as much as if the client had sent it
                endpoint.bodies.charge(endpoint.responses.size(body.previous_response_id))
            asked = read_responses(body, earlier)
        else:
            asked = dialect.read(body)
        self._name_unread(unread_fields(data, dialect), endpoint)
        return body, asked

    def _name_unread(self, fields: list[str], endpoint: Endpoint) -> None:
        """Name fields that a request sets and that are not obeyed, each once: the sessions of a program are alike."""
        new = [name for field in fields if (name := repr(field)[:60]) not in self._named]
        # names come from programs, so a limit bounds the log
        new = new[: MOST_NAMED - len(self._named)]
        if new:
            self._named.update(new)
            log.warning(
                "The program of rollout %s sets %s, which is not, or not wholly, obeyed: sampling comes from the run, "
                "and variables of the chat template from `chat_template_kwargs`. Each field is named once.",
                endpoint.task.task,
                ", ".join(new),
            )

    async def _answer(self, request: Request, endpoint: Endpoint, dialect: Dialect) -> Response:
        endpoint.admit()
        try:
            body, asked = await self._read(request, endpoint, dialect)
            if endpoint.has_traces:
                asked.trace = request.headers.get(TRACE_HEADER, "")
            # one encoding gives both the size and the digest by which a retry is recognised
            encoded = encode_conversation(asked)
            num_bytes = len(encoded)
            endpoint.hidden.check(num_bytes, 2 * self._largest_body)
            digest = hashlib.sha256(encoded).hexdigest()
            task = endpoint.begin(asked, digest, is_retry=request.headers.get(RETRY_HEADER, "0") != "0")
        except BaseException:
            # otherwise the request is open until `_TurnResponse` has sent the answer
            endpoint.num_open -= 1
            raise

        # callbacks of the task, as the client may leave before there is an answer
        task.add_done_callback(partial(endpoint.hidden.count, asked, num_bytes))
        if isinstance(body, ResponsesBody) and body.store is not False:
            messages = asked.messages[bool(body.instructions) :]  # each request brings its own instructions
            task.add_done_callback(partial(self._keep_response, endpoint, messages))
        return _TurnResponse(endpoint, dialect, asked, digest, task)

    def _keep_response(self, endpoint: Endpoint, messages: list[Message], task: asyncio.Future[Reply]) -> None:
        """Keep the conversation that a task has answered, unless it failed, for `previous_response_id`."""
        if endpoint.ended or task.cancelled() or task.exception() is not None:
            return
        reply = task.result()
        with suppress(UnicodeEncodeError):  # the client gets an error in its place
            endpoint.responses.add(f"resp_{reply.call}", [*messages, reply.to_message()])

        # above the limit of all sessions, the session that keeps most gives up its oldest
        kept = [each.responses for each in self._open.values()]
        while sum(each.num_bytes for each in kept) > LARGEST_KEPT_BY_ALL:
            max(kept, key=lambda each: each.num_bytes).drop_oldest()

    async def _count(self, request: Request, endpoint: Endpoint, dialect: Dialect) -> Response:
        endpoint.admit()
        try:
            _, asked = await self._read(request, endpoint, dialect)
            return as_json({"input_tokens": await endpoint.count(asked)})
        finally:
            endpoint.num_open -= 1

    async def _transcript(self, request: Request, endpoint: Endpoint, dialect: Dialect) -> Response:
        if endpoint.num_transcripts >= MOST_TRANSCRIPTS:
            raise Rejected("busy", f"{MOST_TRANSCRIPTS} transcripts are being sent.", retry_after_s=2)
        return _Transcript(endpoint)

    async def _models(self, request: Request, endpoint: Endpoint, dialect: Dialect) -> Response:
        model: dict[str, Any] = {"id": "policy", "object": "model", "created": 0, "owned_by": "trireme"}
        model |= {"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}  # for Anthropic's
        return as_json(
            {"object": "list", "data": [model], "has_more": False, "first_id": "policy", "last_id": "policy"}
        )


@asynccontextmanager
async def open_gateway(listener: socket.socket, host: str, *, shows_pictures: bool = False) -> AsyncIterator[Gateway]:
    """Serve sessions at a socket that listens, on the running event loop. Agents reach it by the name `host`."""
    largest_body = LARGEST_BODY_WITH_PICTURES if shows_pictures else LARGEST_BODY
    gateway = Gateway(f"http://{host}:{listener.getsockname()[1]}", largest_body)
    config = uvicorn.Config(
        gateway.app,
        http=partial(Connection, Idle()),  # type: ignore[arg-type]
        log_level="error",  # a warning would be logged for each malformed request that a client sends
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield gateway
    finally:
        server.should_exit = server.force_exit = True
        await serving
        listener.close()


class _Server(uvicorn.Server):
    """A server that leaves the signals of the process to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _TurnResponse(Response):
    """Waits for a turn and sends it: whole, or as a stream of events. Then the session's request is no longer open."""

    def __init__(
        self, endpoint: Endpoint, dialect: Dialect, request: ClientRequest, digest: str, task: asyncio.Future[Reply]
    ) -> None:
        super().__init__()
        self._asked = endpoint, dialect, request, digest, task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, dialect, request, digest, task = self._asked
        is_delivered = has_begun = False

        async def stream(data: bytes, *, is_last: bool = False) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})

        # the body is read, so all that can still come from the client is its end
        gone = asyncio.create_task(wait_for_disconnect(receive))
        try:
            # comments keep a stream alive; once one is sent, the status is 200 and an error can only be an event
            while not task.done():
                either: set[asyncio.Future[Any]] = {task, gone}
                await asyncio.wait(either, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not task.done() and request.streams:
                    await stream(b": the policy is answering\n\n")

            # the whole answer is encoded before it is sent, so a turn that cannot be encoded becomes an error
            refused: Rejected | None = None
            try:
                reply = await task
                if request.streams:
                    events = b"".join(map(_encode_event, dialect.events(reply, request)))
                else:
                    answer = as_json(dialect.answer(reply, request))
            except Rejected as error:
                refused = error
            except asyncio.CancelledError:
                refused = Rejected("ended", f"The session has ended: {endpoint.ended}.")
            except Exception as error:
                refused = _log_failure(error)

            if refused is None:
                await (stream(events, is_last=True) if request.streams else answer(scope, receive, send))
            elif has_begun:
                await stream(_encode_event(dialect.error_event(refused)), is_last=True)
            else:
                await refusal(refused, dialect)(scope, receive, send)
            # a client that left meanwhile may not have it all: the turn is kept for its retry
            is_delivered = not gone.done()
        finally:
            gone.cancel()
            endpoint.num_open -= 1
            endpoint.settle(digest, task, is_delivered=is_delivered)


class _Transcript(Response):
    """Sends the messages of a session's longest conversation piece by piece, no faster than the client reads."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(msgspec.json.encode({"messages": endpoint.transcript}), media_type="application/json")
        self._endpoint = endpoint
        endpoint.num_transcripts += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # each `send` waits for the client, so a slow one holds no more than a piece in buffers
            for at in range(0, len(self.body), PIECE):
                await send({"type": "http.response.body", "body": self.body[at : at + PIECE], "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._endpoint.num_transcripts -= 1


def _log_failure(error: Exception) -> Rejected:
    rate_limited.warning(f"could not answer a request: {type(error).__name__}", exc_info=error)
    return Rejected("failed", f"The gateway failed: {type(error).__name__}: {error}")


async def _greet() -> Response:
    return Response(status_code=200)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encode_event(event: Event) -> bytes:
    name, data = event
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + (data.encode() if isinstance(data, str) else msgspec.json.encode(data)) + b"\n\n"


def _keys_of(request: Request) -> list[bytes]:
    """Return the digests of the keys that a request gives."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    given = (request.path_params.get("key"), bearer if scheme.lower() == "bearer" else None)
    return [_digest(key.strip().encode()) for key in (*given, request.headers.get("x-api-key")) if key]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def as_json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def refusal(refused: Rejected, dialect: Dialect) -> Response:
    response = as_json(dialect.error(refused), STATUS[refused.problem])
    if refused.retry_after_s is not None:
        response.headers["retry-after"] = str(refused.retry_after_s)
    return response
