"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from msgspec import Raw

from trireme.journal.model_turn import Message
from trireme.orchestrator.gateway.dialects import turn
from trireme.orchestrator.session.wire import Reply

TEXT_PARTS = ("text", "refusal")
SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "max_tokens")} | {
    name: name for name in ("presence_penalty", "frequency_penalty", "reasoning_effort")
}
ROLES = {"developer": "system", "function": "tool"}
CODES = {"overlong": "context_length_exceeded", "unauthorized": "invalid_api_key", "busy": "rate_limit_exceeded"}

ANY = ()
HARMLESS: dict[str, tuple[bytes, ...]] = {
    "model": ANY, "user": ANY, "metadata": ANY, "store": ANY, "service_tier": ANY, "safety_identifier": ANY,
    "prompt_cache_key": ANY, "prompt_cache_retention": ANY, "parallel_tool_calls": (b"true",),
    "response_format": (b'{"type":"text"}',), "modalities": (b'["text"]',), "tool_choice": (b'"auto"', b'"none"'),
}  # fmt: skip


class FunctionCall(turn.Shape):
    name: str | None = None
    arguments: Raw = Raw()


class Call(turn.Shape):
    id: str | None = None
    function: FunctionCall | None = None


class ChatMessage(turn.Shape):
    role: str
    content: turn.Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class Function(turn.Shape):
    name: str
    description: str | None = None
    parameters: Raw = Raw()


class ChatTool(turn.Shape):
    function: Function


class StreamOptions(turn.Shape):
    include_usage: bool | None = None


class ChatBody(turn.Body):
    messages: list[ChatMessage] | None = None
    tools: list[ChatTool] | None = None
    tool_choice: str | turn.ToolChoice | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: turn.Count = None
    max_completion_tokens: turn.Count = None
    top_k: turn.TopK = None
    min_p: turn.NotNegative = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    reasoning_effort: str | None = None


def read(body: ChatBody) -> turn.ClientRequest:
    """Read a request. Raises: Rejected."""
    if body.n not in (None, 1):
        raise turn.Rejected("invalid", f"n={body.n!r:.80} - a session samples one answer per request. Remove `n`.")
    # `max_completion_tokens` is the newer name of the same limit
    body.max_tokens = body.max_completion_tokens or body.max_tokens

    limits = turn.Limits()
    limits.count(body.stop)
    tools = read_tools(body.tools or [], limits)

    messages = turn.as_messages(body.messages, where="messages")
    limits.count(messages)

    return turn.ClientRequest(
        messages=[read_message(message, f"messages[{place}]", limits) for place, message in enumerate(messages)],
        tools=tools or None,
        sampling=turn.choose_sampling(body, SAMPLING),
        streams=bool(body.stream),
        calls_tools=body.tool_choice != "none",
        with_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
    )


def read_message(message: ChatMessage, where: str, limits: turn.Limits) -> Message:
    """Read one message. Drops fields that clients add, so that a turn is recognised when it comes back."""
    if not message.role:
        raise turn.Rejected("invalid", f"{where}: the role is empty, expected text such as 'user'")
    limits.count(message.content)
    read: Message = {"role": ROLES.get(message.role, message.role)}

    # the model writes text alone; users and tools may show pictures
    read_parts = turn.read_text if message.role == "assistant" else turn.read_content
    read["content"] = read_parts(message.content, kinds=TEXT_PARTS, where=where)
    if reasoning := message.reasoning_content or message.reasoning:
        read["reasoning_content"] = reasoning
    if message.tool_calls:
        limits.count(message.tool_calls)
        read["tool_calls"] = [_read_call(call, where, limits) for call in message.tool_calls]
    if message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    return read


def _read_call(call: Call, where: str, limits: turn.Limits) -> dict[str, Any]:
    if call.function is None:
        raise turn.Rejected("invalid", f"{where}: a tool call without `function`, expected an object there")
    arguments = limits.decode(call.function.arguments, where)
    return turn.nested_call(call.id, call.function.name, arguments, where=where)


def read_tools(tools: list[ChatTool], limits: turn.Limits) -> list[dict[str, Any]]:
    """Return the tools as chat templates expect them."""
    limits.count(tools)
    functions = []
    for place, tool in enumerate(tools):
        parameters = limits.decode(tool.function.parameters, f"tools[{place}]")
        functions.append(turn.function(tool.function.name, tool.function.description, parameters))
    return functions


def answer(reply: Reply, request: turn.ClientRequest) -> dict[str, Any]:
    """Write a turn as a completion."""
    # as OpenAI does, null instead of an empty text in a turn that is nothing but calls
    message = reply.to_message() | {"content": reply.text if reply.text or not reply.calls else None}
    choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
    return _head(reply, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def events(reply: Reply, request: turn.ClientRequest) -> Iterator[turn.Event]:
    """Write a turn as chunks: it was sampled whole, so each of its parts is one chunk."""
    head = _head(reply, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> turn.Event:
        return None, head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk({"role": "assistant", "content": ""})
    if reply.reasoning:
        yield chunk({"reasoning_content": reply.reasoning})
    if reply.text:
        yield chunk({"content": reply.text})
    for place, call in enumerate(reply.calls):
        yield chunk({"tool_calls": [{"index": place} | call.to_chat()]})

    yield chunk({}, reply.finish)
    if request.with_usage:
        yield None, head | {"choices": [], "usage": _usage(reply)}
    yield None, "[DONE]"


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.call}", "object": kind, "created": int(time.time()), "model": "policy"}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.num_prompt,
        "completion_tokens": reply.num_sampled,
        "total_tokens": reply.num_prompt + reply.num_sampled,
    }


def error(refused: turn.Rejected) -> dict[str, Any]:
    """Write an error as the OpenAI APIs do."""
    kind, code = turn.ERROR_TYPES[turn.STATUS[refused.problem]], CODES.get(refused.problem)
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": code}}


CHAT = turn.Dialect(ChatBody, HARMLESS, read, answer, events, error, lambda refused: (None, error(refused)))
