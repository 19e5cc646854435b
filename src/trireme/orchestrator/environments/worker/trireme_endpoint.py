"""The policy as an OpenAI endpoint on the loopback interface, for environments that want one (verifiers from 0.4).

A request carries the name of its session in a header; who that is, and so which rollout asks the orchestrator, is said
with `open_session`. Answers are text: the orchestrator keeps the tokens, as for every other environment.
"""

import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from trireme_rollout import Ask, OverlongPrompt, TurnCancelled, chat_message, flat_sampling, nested_call

SESSION_HEADER = "X-Session-ID"
LARGEST_REQUEST = 64 << 20
NO_SAMPLING = {"messages", "tools", "model", "stream", "stream_options", "tool_choice", "parallel_tool_calls"}


@dataclass
class Session:
    """The state of one rollout: how to ask for turns, and how the last request ended."""

    ask: Ask
    sampling: dict
    error: BaseException | None = None  # there was no answer
    is_full: bool = False  # the conversation no longer fits into the model's context
    names: set[str] = field(default_factory=set)


class PolicyEndpoint:
    """`POST /v1/chat/completions`. The key keeps out other users of the machine."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(16)
        self.url = ""
        self._sessions: dict[str, Session] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
            self.url = f"{site.name.rpartition(':')[0]}:{runner.addresses[0][1]}/v1"
            yield
        finally:
            await runner.cleanup()

    def open_session(self, name: str, session: Session) -> None:
        session.names.add(name)
        self._sessions[name] = session

    def close(self, session: Session) -> None:
        for name in session.names:
            del self._sessions[name]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return _refusal(401, "this endpoint is for the environment that it was opened for")
        session = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            return _refusal(404, f"no rollout under way has the {SESSION_HEADER} of this request")
        try:
            return await self._ask(request, session)
        except OverlongPrompt as error:
            session.is_full = True
            return _refusal(400, str(error), code="context_length_exceeded")
        except (Exception, TurnCancelled) as error:
            session.error = error
            return _refusal(400, str(error))  # 4xx, so that no client tries again

    async def _ask(self, request: web.Request, session: Session) -> web.StreamResponse:
        body = await request.json()
        # normalised, so that a turn is recognised in the conversation that continues it
        messages = [chat_message(message, number) for number, message in enumerate(body["messages"])]
        sampling = flat_sampling({name: value for name, value in body.items() if name not in NO_SAMPLING})
        reply = await session.ask(messages, tools=body.get("tools"), sampling=sampling)
        completion = to_completion(reply)
        return await _stream(request, completion) if body.get("stream") else web.json_response(completion)


def to_completion(reply: dict) -> dict:
    """A `reply` message as an OpenAI chat completion."""
    message = {"role": "assistant", "content": reply.get("content")}
    if reply.get("reasoning"):
        message["reasoning_content"] = reply["reasoning"]
    if calls := reply.get("tool_calls"):
        message["tool_calls"] = list(map(nested_call, calls))
    elif message["content"] is None:
        message["content"] = ""
    num_prompt, num_completion = len(reply.get("prompt_ids") or []), len(reply.get("completion_ids") or [])
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_completion}
    return {
        "id": f"chatcmpl-{reply['call']}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": reply.get("finish_reason") or "stop"}],
        "usage": {**usage, "total_tokens": num_prompt + num_completion},
    }


async def _stream(request: web.Request, completion: dict) -> web.StreamResponse:
    """The whole answer as one chunk: it was generated whole."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    chunk = {**completion, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
    end = {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in (json.dumps(chunk), json.dumps(end), "[DONE]"):
        await response.write(f"data: {event}\n\n".encode())
    await response.write_eof()
    return response


def _refusal(status: int, words: str, *, code: str | None = None) -> web.Response:
    return web.json_response({"error": {"message": words, "type": "invalid_request", "code": code}}, status=status)
