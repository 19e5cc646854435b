"""Anthropic's Messages: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from trireme.orchestrator.gateway.dialects.turn import (
    ERROR_TYPES,
    STATUS,
    Dialect,
    Event,
    Message,
    Refused,
    Turn,
    TurnRequest,
    as_messages,
    as_objects,
    choose_sampling,
    function,
    nested_call,
    read_content,
    read_picture,
    read_text,
    whole_json,
)

SAMPLING = {name: name for name in ("max_tokens", "temperature", "top_p", "top_k")} | {"stop_sequences": "stop"}
UNPARSED = "__unparsedToolInput"  # the key under which Claude Code returns arguments that were no JSON

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: dict[str, Any]) -> TurnRequest:
    """Read a request. Raises: Refused."""
    messages: list[Message] = []
    if system := read_text(body.get("system"), kinds=("text",), where="system"):
        messages.append({"role": "system", "content": system})
    for place, message in enumerate(as_messages(body.get("messages"), where="messages")):
        messages += _read_message(message, f"messages[{place}]")
    functions = []
    for place, tool in enumerate(as_objects(body.get("tools") or [], where="tools")):
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str):
            raise Refused("invalid", f"tools[{place}]: {tool!r:.80}, expected a name")
        if isinstance(schema, dict):  # unlike web_search, which Anthropic's servers run
            functions.append(function(name, tool.get("description"), schema))
    choice = body.get("tool_choice")
    return TurnRequest(
        messages,
        functions or None,
        choose_sampling(body, SAMPLING),
        streams=bool(body.get("stream")),
        calls_tools=not (isinstance(choice, dict) and choice.get("type") == "none"),
    )


def _read_message(message: dict[str, Any], where: str) -> list[Message]:
    """Read one message, as several where it has the results of tools."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refused("invalid", f"{where}: the role is {role!r}, expected 'user', 'assistant' or 'system'")
    if not isinstance(content, list):
        return [{"role": role, "content": read_text(content, kinds=(), where=where)}]
    results, shown, texts, calls, thoughts = [], [], [], [], []
    for block in as_objects(content, where=where):
        kind = block.get("type")
        if kind == "tool_result":
            results.append(_read_result(block, where))
        elif kind == "tool_use":
            arguments = block.get("input")
            if isinstance(arguments, dict) and list(arguments) == [UNPARSED]:
                arguments = arguments[UNPARSED]
            calls.append(nested_call(block.get("id"), block.get("name"), arguments, where=where))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif role == "user" and (picture := read_picture(block, where)) is not None:
            shown.append(picture)
        elif kind != "redacted_thinking":
            texts.append(read_text([block], kinds=("text",), where=where))
            shown.append({"type": "text", "text": texts[-1]})
    if not shown and results:
        return results
    read: Message = {"role": role, "content": "".join(texts) if role == "assistant" else "\n\n".join(texts)}
    if len(shown) > len(texts):
        read["content"] = shown
    if any(thoughts):
        read["reasoning_content"] = "".join(thoughts)
    if calls:
        read["tool_calls"] = calls
    return [*results, read]


def _read_result(block: dict[str, Any], where: str) -> Message:
    call = block.get("tool_use_id")
    if not isinstance(call, str):
        raise Refused("invalid", f"{where}: a tool result without `tool_use_id`, expected the id of its call")
    return {
        "role": "tool",
        "tool_call_id": call,
        "content": read_content(block.get("content"), kinds=("text",), where=where),
    }


def answer(turn: Turn, request: TurnRequest) -> dict[str, Any]:
    """Write a turn as a message."""
    blocks = [block for block, _ in _blocks(turn)]
    return _head(turn) | {"content": blocks, **_end(turn), "usage": _usage(turn)}


def _blocks(turn: Turn) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield each content block, and the deltas that make it from an empty one."""
    if turn.reasoning:
        signature = base64.b64encode(turn.id.encode()).decode()  # clients return it; nothing reads it
        yield (
            {"type": "thinking", "thinking": turn.reasoning, "signature": signature},
            [
                {"type": "thinking_delta", "thinking": turn.reasoning},
                {"type": "signature_delta", "signature": signature},
            ],
        )
    if turn.content or not turn.calls:
        yield {"type": "text", "text": turn.content}, [{"type": "text_delta", "text": turn.content}]
    for call in turn.calls:
        written = whole_json(call.arguments)
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(written)}
        yield block, [{"type": "input_json_delta", "partial_json": written}]


def _arguments(written: str) -> dict[str, Any]:
    """Return arguments as the object that this API wants, even where the model wrote none."""
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {UNPARSED: written}


def events(turn: Turn, request: TurnRequest) -> Iterator[Event]:
    """Write a turn as a stream: it was sampled whole, so each of its blocks is one delta."""
    start = _head(turn) | {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = _usage(turn)
    yield _event("message_start", message=start | {"usage": usage | {"output_tokens": 0}})
    empty: dict[str, dict[str, Any]] = {
        "thinking": {"thinking": "", "signature": ""},
        "text": {"text": ""},
        "tool_use": {"input": {}},
    }
    for index, (block, deltas) in enumerate(_blocks(turn)):
        yield _event("content_block_start", index=index, content_block=block | empty[block["type"]])
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(turn), usage=usage)
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}


def _head(turn: Turn) -> dict[str, Any]:
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": "policy"}


def _end(turn: Turn) -> dict[str, Any]:
    return {"stop_reason": STOP_REASONS[turn.finish], "stop_sequence": None}


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "input_tokens": turn.num_prompt,
        "output_tokens": turn.num_sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def error(refused: Refused) -> dict[str, Any]:
    """Write an error as this API does. Claude Code recognises an overlong prompt by these words."""
    words = f"prompt is too long: {refused}" if refused.problem == "overlong" else str(refused)
    return {"type": "error", "error": {"type": ERROR_TYPES[STATUS[refused.problem]], "message": words}}


ANTHROPIC = Dialect(read, answer, events, error, lambda refused: ("error", error(refused)))
