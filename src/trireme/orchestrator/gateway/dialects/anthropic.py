"""Anthropic's Messages: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from msgspec import Raw

from trireme.journal.model_turn import Message
from trireme.orchestrator.gateway.dialects import turn
from trireme.orchestrator.session.wire import Reply

SAMPLING = {name: name for name in ("max_tokens", "temperature", "top_p", "top_k")} | {"stop_sequences": "stop"}
UNPARSED = "__unparsedToolInput"  # the key under which Claude Code returns arguments that were no JSON

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

HARMLESS: dict[str, tuple[bytes, ...]] = dict.fromkeys(
    ("model", "metadata", "service_tier", "cache_control", "betas", "inference_geo"), ()
) | {
    "tool_choice": (b'{"type":"auto"}', b'{"type":"none"}'),
    "thinking": (b'{"type":"adaptive"}', b'{"type":"enabled"}', b'{"type":"disabled"}'),
    "output_config": tuple(b'{"effort":"%s"}' % effort for effort in (b"low", b"medium", b"high", b"xhigh", b"max")),
}

THINKS = {"enabled": True, "disabled": False}  # values of `enable_thinking`; the model decides if "adaptive"


class Block(turn.Part):
    """A block of a message's content."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = Raw()
    tool_use_id: str | None = None
    content: turn.Content = None


class AnthropicMessage(turn.Shape):
    role: str
    content: str | list[Block] | None = None


class AnthropicTool(turn.Shape):
    name: str
    description: str | None = None
    input_schema: Raw = Raw()


class Thinking(turn.Shape):
    type: str | None = None


class OutputConfig(turn.Shape):
    effort: str | None = None


class AnthropicBody(turn.Body):
    messages: list[AnthropicMessage] | None = None
    system: turn.Content = None
    tools: list[AnthropicTool] | None = None
    tool_choice: turn.ToolChoice | None = None
    max_tokens: turn.Count = None
    top_k: turn.TopK = None
    stop_sequences: list[str] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


def read(body: AnthropicBody) -> turn.ClientRequest:
    """Read a request. Raises: Rejected."""
    limits = turn.Limits()
    limits.count(body.stop_sequences)
    limits.count(body.system)

    messages: list[Message] = []
    if system := turn.read_text(body.system, kinds=("text",), where="system"):
        messages.append({"role": "system", "content": system})
    given = turn.as_messages(body.messages, where="messages")
    limits.count(given)
    for place, message in enumerate(given):
        messages += _read_message(message, f"messages[{place}]", limits)

    functions = []
    limits.count(body.tools)
    for place, tool in enumerate(body.tools or ()):
        schema = limits.decode(tool.input_schema, f"tools[{place}]")
        if isinstance(schema, dict):  # unlike web_search, which Anthropic's servers run
            functions.append(turn.function(tool.name, tool.description, schema))

    # whether and how much to think
    effort = body.output_config.effort if body.output_config is not None else None
    thinks = THINKS.get(body.thinking.type or "") if body.thinking is not None else None

    return turn.ClientRequest(
        messages=messages,
        tools=functions or None,
        sampling=turn.choose_sampling(body, SAMPLING, effort=effort, thinks=thinks),
        streams=bool(body.stream),
        calls_tools=body.tool_choice is None or body.tool_choice.type != "none",
    )


def _read_message(message: AnthropicMessage, where: str, limits: turn.Limits) -> list[Message]:
    """Read one message, as several if it has the results of tools."""
    role, content = message.role, message.content
    if role not in ("user", "assistant", "system"):
        raise turn.Rejected("invalid", f"{where}: the role is {role!r:.80}, expected 'user', 'assistant' or 'system'")
    if not isinstance(content, list):
        return [{"role": role, "content": content or ""}]

    # each block by its kind
    limits.count(content)
    results, shown, texts, calls, thoughts = [], [], [], [], []
    for block in content:
        if block.type == "tool_result":
            limits.count(block.content)
            results.append(_read_result(block, where))
        elif block.type == "tool_use":
            arguments = limits.decode(block.input, where)
            # back to the text that the model wrote, so that its turn is recognised
            if isinstance(arguments, dict) and list(arguments) == [UNPARSED]:
                arguments = arguments[UNPARSED]
            calls.append(turn.nested_call(block.id, block.name, arguments, where=where))
        elif block.type == "thinking" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif role == "user" and (picture := turn.read_picture(block, where)) is not None:
            shown.append(picture)
        elif block.type != "redacted_thinking":
            texts.append(turn.read_text([block], kinds=("text",), where=where))
            shown.append({"type": "text", "text": texts[-1]})

    # results are messages of their own in chat; what is left is one more, if there is anything
    if not shown and results:
        return results
    read: Message = {"role": role, "content": "".join(texts) if role == "assistant" else "\n\n".join(texts)}
    # parts keep the order of texts and pictures, which one text would lose
    if len(shown) > len(texts):
        read["content"] = shown
    if any(thoughts):
        read["reasoning_content"] = "".join(thoughts)
    if calls:
        read["tool_calls"] = calls
    return [*results, read]


def _read_result(block: Block, where: str) -> Message:
    if block.tool_use_id is None:
        raise turn.Rejected("invalid", f"{where}: a tool result without `tool_use_id`, expected the id of its call")
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": turn.read_content(block.content, kinds=("text",), where=where),
    }


def answer(reply: Reply, request: turn.ClientRequest) -> dict[str, Any]:
    """Write a turn as a message."""
    blocks = [block for block, _ in _blocks(reply)]
    return _head(reply) | {"content": blocks, **_end(reply), "usage": _usage(reply)}


def _blocks(reply: Reply) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield each content block, and the deltas that make it from an empty one."""
    if reply.reasoning:
        signature = base64.b64encode(reply.call.encode()).decode()  # clients return it; nothing reads it
        yield (
            {"type": "thinking", "thinking": reply.reasoning, "signature": signature},
            [
                {"type": "thinking_delta", "thinking": reply.reasoning},
                {"type": "signature_delta", "signature": signature},
            ],
        )
    if reply.text or not reply.calls:
        yield {"type": "text", "text": reply.text}, [{"type": "text_delta", "text": reply.text}]
    for call in reply.calls:
        written = turn.whole_json(call.arguments)
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(written)}
        yield block, [{"type": "input_json_delta", "partial_json": written}]


def _arguments(written: str) -> dict[str, Any]:
    """Return arguments as the object that this API wants, even if the model wrote none."""
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {UNPARSED: written}


def events(reply: Reply, request: turn.ClientRequest) -> Iterator[turn.Event]:
    """Write a turn as a stream: it was sampled whole, so each of its blocks is one delta."""
    start = _head(reply) | {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = _usage(reply)
    yield _event("message_start", message=start | {"usage": usage | {"output_tokens": 0}})

    # a block begins empty, and its deltas fill these fields
    empty: dict[str, dict[str, Any]] = {
        "thinking": {"thinking": "", "signature": ""},
        "text": {"text": ""},
        "tool_use": {"input": {}},
    }

    for index, (block, deltas) in enumerate(_blocks(reply)):
        yield _event("content_block_start", index=index, content_block=block | empty[block["type"]])
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)

    yield _event("message_delta", delta=_end(reply), usage=usage)
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> turn.Event:
    return kind, {"type": kind, **fields}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.call}", "type": "message", "role": "assistant", "model": "policy"}


def _end(reply: Reply) -> dict[str, Any]:
    return {"stop_reason": STOP_REASONS[reply.finish], "stop_sequence": None}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_prompt,
        "output_tokens": reply.num_sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def error(refused: turn.Rejected) -> dict[str, Any]:
    """Write an error as this API does. Claude Code recognises an overlong prompt by these words."""
    words = f"prompt is too long: {refused}" if refused.problem == "overlong" else str(refused)
    return {"type": "error", "error": {"type": turn.ERROR_TYPES[turn.STATUS[refused.problem]], "message": words}}


ANTHROPIC = turn.Dialect(
    AnthropicBody, HARMLESS, read, answer, events, error, lambda refused: ("error", error(refused))
)
