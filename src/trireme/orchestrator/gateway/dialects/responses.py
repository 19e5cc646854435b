"""OpenAI's Responses: `POST /v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Raw

from trireme.journal.model_turn import Message, ToolCall
from trireme.orchestrator.gateway.dialects import turn
from trireme.orchestrator.gateway.dialects.chat import error
from trireme.orchestrator.session.wire import Reply

SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
ROLES = {"developer": "system"}
ITEM_TOOLS = {"function_call": "arguments", "custom_tool_call": "input"}
OUTPUTS = ("function_call_output", "custom_tool_call_output")
SEPARATOR = "__"  # between a namespace and the name of a tool in it, in the name that the model sees


ANY = ()
HARMLESS: dict[str, tuple[bytes, ...]] = {
    "model": ANY, "user": ANY, "metadata": ANY, "service_tier": ANY, "safety_identifier": ANY, "include": ANY,
    "prompt_cache_key": ANY, "prompt_cache_retention": ANY, "client_metadata": ANY, "stream_options": ANY,
    "parallel_tool_calls": (b"true",), "truncation": (b'"disabled"',), "background": (b"false",),
    "text": (b'{"format":{"type":"text"}}',), "tool_choice": (b'"auto"', b'"none"'),
}  # fmt: skip


class Item(turn.Shape):
    """An item of the input, of any kind."""

    type: str | None = None
    role: str | None = None
    content: turn.Content = None
    summary: turn.Content = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Raw = Raw()
    input: str | None = None
    output: turn.Content = None


class Grammar(turn.Shape):
    definition: str | None = None


class ResponsesTool(turn.Shape):
    """A tool, or a namespace of tools."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: Raw = Raw()
    format: Grammar | None = None
    tools: list[ResponsesTool] | None = None


class Reasoning(turn.Shape):
    effort: str | None = None


class ResponsesBody(turn.Body):
    input: str | list[Item] | None = None
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | turn.ToolChoice | None = None
    max_output_tokens: turn.Count = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None


def read(body: ResponsesBody, earlier: Sequence[Message] = ()) -> turn.ClientRequest:
    """Read a request.

    Args:
        earlier: the conversation that `previous_response_id` names.

    Raises: Rejected.
    """
    effort = body.reasoning.effort if body.reasoning is not None else None
    limits = turn.Limits()
    limits.count([*earlier])

    # instructions are not kept with the earlier conversation, as each request brings its own
    messages: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    functions, declared = read_tools(body.tools or [], limits)

    given = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages += [*earlier, *read_items(turn.as_messages(given, where="input"), declared, limits)]

    return turn.ClientRequest(
        messages=messages,
        tools=functions or None,
        sampling=turn.choose_sampling(body, SAMPLING, effort=effort),
        streams=bool(body.stream),
        calls_tools=body.tool_choice != "none",
        declared=declared,
    )


def read_tools(tools: list[ResponsesTool], limits: turn.Limits) -> tuple[list[dict[str, Any]], dict[str, turn.Tool]]:
    """Return the tools as functions, and how each was declared; without those that OpenAI's servers would run."""
    functions: list[dict[str, Any]] = []
    declared: dict[str, turn.Tool] = {}

    def add(tool: ResponsesTool, namespace: str | None, where: str) -> None:
        if tool.type not in ("function", "custom"):
            return
        if tool.name is None:
            raise turn.Rejected("invalid", f"{where}: a tool of the kind {tool.type!r}, expected a name")
        seen = f"{namespace}{SEPARATOR}{tool.name}" if namespace else tool.name
        if tool.type == "custom":
            grammar = tool.format.definition if tool.format is not None else None
            functions.append(turn.custom_function(seen, tool.description, grammar))
        else:
            functions.append(turn.function(seen, tool.description, limits.decode(tool.parameters, where)))
        declared[seen] = turn.Tool(tool.name, tool.type == "custom", namespace)

    # tools of a namespace are shown to the model one by one, with the namespace in their names
    limits.count(tools)
    for place, tool in enumerate(tools):
        if tool.type == "namespace" and tool.name is not None:
            limits.count(tool.tools)
            for inner in tool.tools or ():
                add(inner, tool.name, f"tools[{place}]")
        else:
            add(tool, None, f"tools[{place}]")
    return functions, declared


def read_items(items: list[Item], declared: dict[str, turn.Tool], limits: turn.Limits) -> list[Message]:
    """Read input items. What one turn of the model wrote (reasoning, text, calls) becomes one message again.

    Raises: Rejected.
    """
    seen: dict[tuple[str | None, str | None], str]
    seen = {(tool.namespace, tool.name): name for name, tool in declared.items()}
    messages: list[Message] = []
    current: Message | None = None  # the model's turn whose items are being read
    turns: list[Message] = []  # all of the model's; their texts are joined at the end, as adding them up is quadratic

    def model_turn() -> Message:
        nonlocal current
        if current is None:
            current = {"role": "assistant", "content": []}
            messages.append(current)
            turns.append(current)
        return current

    limits.count(items)
    for place, item in enumerate(items):
        where, kind = f"input[{place}]", item.type or "message"
        # parts of an item count as well: one item may hold most of a request
        for content in (item.content, item.summary, item.output):
            if isinstance(content, list):
                limits.count(content)

        if kind == "reasoning":
            if current is not None and (any(current["content"]) or current.get("tool_calls")):
                current = None  # the model thinks before it writes: this is another turn
            if text := turn.read_text(item.content or item.summary, kinds=TEXT_PARTS, where=where):
                model_turn().setdefault("reasoning_content", []).append(text)
        elif kind == "message" and item.role == "assistant":
            model_turn()["content"].append(turn.read_text(item.content, kinds=TEXT_PARTS, where=where))
        elif kind in ITEM_TOOLS:
            name = seen.get((item.namespace, item.name), item.name)
            arguments = {"input": item.input} if kind == "custom_tool_call" else limits.decode(item.arguments, where)
            call = turn.nested_call(item.call_id, name, arguments, where=where)
            model_turn().setdefault("tool_calls", []).append(call)
        else:
            current = None
            messages.append(_read_given(item, kind, where))

    for each in turns:
        each |= {name: "".join(each[name]) for name in ("content", "reasoning_content") if name in each}
    return messages


def _read_given(item: Item, kind: str, where: str) -> Message:
    """Read an item that the agent wrote."""
    if kind in OUTPUTS and item.call_id is not None:
        output = turn.read_content(item.output, kinds=TEXT_PARTS, where=where)
        return {"role": "tool", "tool_call_id": item.call_id, "content": output}
    if kind != "message" or item.role is None:
        raise turn.Rejected(
            "invalid", f"{where}: an item of the kind {kind!r:.80} - this policy does not read it. Remove it."
        )
    content = turn.read_content(item.content, kinds=TEXT_PARTS, where=where)
    return {"role": ROLES.get(item.role, item.role), "content": content}


def answer(reply: Reply, request: turn.ClientRequest) -> dict[str, Any]:
    """Write a turn as a response."""
    cut = reply.finish == "length"
    return _response(reply, "incomplete" if cut else "completed", output_items(reply, request)) | {
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": reply.num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.num_prompt + reply.num_sampled,
        },
    }


def output_items(reply: Reply, request: turn.ClientRequest) -> list[dict[str, Any]]:
    """Return what the turn adds to the conversation, as items."""
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        thought = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{reply.call}", "summary": [], "content": thought})
    if reply.text or not reply.calls:
        status = "incomplete" if reply.finish == "length" else "completed"
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{reply.call}", "role": "assistant", "status": status}
        items.append(head | {"content": [text]})
    for place, call in enumerate(reply.calls):
        items.append(_write_call(call, f"fc_{reply.call}_{place}", request))
    return items


def _write_call(call: ToolCall, item_id: str, request: turn.ClientRequest) -> dict[str, Any]:
    tool = request.declared.get(call.name, turn.Tool(call.name))
    head = {"id": item_id, "call_id": call.id, "name": tool.name, "status": "completed"}
    if tool.namespace is not None:
        head["namespace"] = tool.namespace
    if tool.is_custom:
        return {"type": "custom_tool_call", **head, "input": turn.custom_input(call.arguments)}
    return {"type": "function_call", **head, "arguments": call.arguments}


def events(reply: Reply, request: turn.ClientRequest) -> Iterator[turn.Event]:
    """Write a turn as a stream: it was sampled whole, so each of its texts is one delta."""
    last = answer(reply, request)
    started = _response(reply, "in_progress", [])
    plain: list[dict[str, Any]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(last["output"]):
        plain += _item_events(item, index)
    plain.append({"type": f"response.{last['status']}", "response": last})

    # clients order events by this number, which counts over the whole stream
    for number, event in enumerate(plain):
        yield event["type"], event | {"sequence_number": number}


def _item_events(item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """Yield the events of one output item."""
    here = {"output_index": index, "item_id": item["id"]}
    begun = item | {"status": "in_progress"}
    if item["type"] in ITEM_TOOLS:
        name = ITEM_TOOLS[item["type"]]
        kind = "function_call_arguments" if name == "arguments" else "custom_tool_call_input"
        yield {"type": "response.output_item.added", "output_index": index, "item": begun | {name: ""}}
        yield {"type": f"response.{kind}.delta", **here, "delta": item[name]}
        yield {"type": f"response.{kind}.done", **here, name: item[name], "name": item["name"]}
    else:
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        more: dict[str, Any] = {} if kind == "reasoning_text" else {"logprobs": []}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun | {"content": []}}
        for place, part in enumerate(item["content"]):
            part_here = here | {"content_index": place}
            yield {"type": "response.content_part.added", **part_here, "part": part | {"text": ""}}
            yield {"type": f"response.{kind}.delta", **part_here, "delta": part["text"], **more}
            yield {"type": f"response.{kind}.done", **part_here, "text": part["text"], **more}
            yield {"type": "response.content_part.done", **part_here, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _response(reply: Reply, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.call}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": "policy",
        "output": output,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def error_event(refused: turn.Rejected) -> turn.Event:
    """Write an error into a stream that has begun."""
    about = error(refused)["error"]
    failed = {"code": about["code"] or "server_error", "message": about["message"]}
    response = {"id": "resp_failed", "object": "response", "status": "failed", "error": failed, "output": []}
    return "response.failed", {"type": "response.failed", "sequence_number": 0, "response": response}


RESPONSES = turn.Dialect(ResponsesBody, HARMLESS, read, answer, events, error, error_event)
