"""OpenAI's Responses: `POST /v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from trireme.orchestrator.gateway.dialects.chat import error
from trireme.orchestrator.gateway.dialects.turn import (
    Dialect,
    Event,
    Message,
    Refused,
    Tool,
    ToolCall,
    Turn,
    TurnRequest,
    as_messages,
    as_objects,
    choose_sampling,
    custom_function,
    custom_input,
    function,
    nested_call,
    read_content,
    read_text,
)

SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
ROLES = {"developer": "system"}
ITEM_TOOLS = {"function_call": "arguments", "custom_tool_call": "input"}
OUTPUTS = ("function_call_output", "custom_tool_call_output")
SEPARATOR = "__"  # between a namespace and the name of a tool in it, in the name that the model sees


def read(body: dict[str, Any]) -> TurnRequest:
    """Read a request whose input is whole: the server puts what `previous_response_id` names before it.

    Raises: Refused.
    """
    messages: list[Message] = []
    instructions = body.get("instructions")
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    functions, declared = read_tools(body.get("tools") or [])
    messages += read_items(as_items(body.get("input")), declared)
    return TurnRequest(
        messages,
        functions or None,
        choose_sampling(body, SAMPLING),
        streams=bool(body.get("stream")),
        calls_tools=body.get("tool_choice") != "none",
        declared=declared,
    )


def as_items(given: Any) -> list[dict[str, Any]]:
    """Return the input as a list of items. Raises: Refused."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else as_messages(given, where="input")


def read_tools(tools: Any) -> tuple[list[dict[str, Any]], dict[str, Tool]]:
    """Return the tools as functions, and how each was declared; without those that OpenAI's servers would run."""
    functions: list[dict[str, Any]] = []
    declared: dict[str, Tool] = {}

    def add(tool: dict[str, Any], namespace: str | None) -> None:
        kind, name = tool.get("type"), tool.get("name")
        if kind not in ("function", "custom"):
            return
        if not isinstance(name, str):
            raise Refused("invalid", f"tools: {tool!r:.80}, expected a name")
        seen = f"{namespace}{SEPARATOR}{name}" if namespace else name
        if kind == "custom":
            functions.append(custom_function(seen, tool.get("description"), tool.get("format")))
        else:
            functions.append(function(seen, tool.get("description"), tool.get("parameters")))
        declared[seen] = Tool(name, kind == "custom", namespace)

    for tool in as_objects(tools, where="tools"):
        if tool.get("type") == "namespace" and isinstance(tool.get("name"), str):
            for inner in as_objects(tool.get("tools") or [], where="tools"):
                add(inner, tool["name"])
        else:
            add(tool, None)
    return functions, declared


def read_items(items: list[dict[str, Any]], declared: dict[str, Tool]) -> list[Message]:
    """Read input items. What one turn of the model wrote (reasoning, text, calls) becomes one message again.

    Raises: Refused.
    """
    seen: dict[tuple[Any, Any], str] = {(tool.namespace, tool.name): name for name, tool in declared.items()}
    messages: list[Message] = []
    turn: Message | None = None  # of the model, while its items come

    def model_turn() -> Message:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        return turn

    for place, item in enumerate(items):
        where, kind = f"input[{place}]", item.get("type") or "message"
        if kind == "reasoning":
            if turn is not None and (turn["content"] or turn.get("tool_calls")):
                turn = None  # the model thinks before it writes: this is another turn
            thought = item.get("content") or item.get("summary")
            if text := read_text(thought, kinds=TEXT_PARTS, where=where):
                read = model_turn()
                read["reasoning_content"] = read.get("reasoning_content", "") + text
        elif kind == "message" and item.get("role") == "assistant":
            read = model_turn()
            read["content"] += read_text(item.get("content"), kinds=TEXT_PARTS, where=where)
        elif kind in ITEM_TOOLS:
            name = seen.get((item.get("namespace"), item.get("name")), item.get("name"))
            written = item.get(ITEM_TOOLS[kind])
            arguments = {"input": written} if kind == "custom_tool_call" else written
            call = nested_call(item.get("call_id"), name, arguments, where=where)
            model_turn().setdefault("tool_calls", []).append(call)
        else:
            turn = None
            messages.append(_read_given(item, kind, where))
    return messages


def _read_given(item: dict[str, Any], kind: str, where: str) -> Message:
    """Read an item that the agent wrote."""
    if kind in OUTPUTS and isinstance(item.get("call_id"), str):
        output = read_content(item.get("output"), kinds=TEXT_PARTS, where=where)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": output}
    role = item.get("role")
    if kind != "message" or not isinstance(role, str):
        raise Refused("invalid", f"{where}: an item of the kind {kind!r} - this policy does not read it. Remove it.")
    return {"role": ROLES.get(role, role), "content": read_content(item.get("content"), kinds=TEXT_PARTS, where=where)}


def answer(turn: Turn, request: TurnRequest) -> dict[str, Any]:
    """Write a turn as a response."""
    cut = turn.finish == "length"
    return _response(turn, "incomplete" if cut else "completed", output_items(turn, request)) | {
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": turn.num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": turn.num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.num_prompt + turn.num_sampled,
        },
    }


def output_items(turn: Turn, request: TurnRequest) -> list[dict[str, Any]]:
    """Return what the turn adds to the conversation, as items."""
    items: list[dict[str, Any]] = []
    if turn.reasoning:
        thought = [{"type": "reasoning_text", "text": turn.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{turn.id}", "summary": [], "content": thought})
    if turn.content or not turn.calls:
        status = "incomplete" if turn.finish == "length" else "completed"
        text = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{turn.id}", "role": "assistant", "status": status}
        items.append(head | {"content": [text]})
    for place, call in enumerate(turn.calls):
        items.append(_write_call(call, f"fc_{turn.id}_{place}", request))
    return items


def _write_call(call: ToolCall, item_id: str, request: TurnRequest) -> dict[str, Any]:
    tool = request.declared.get(call.name, Tool(call.name))
    head = {"id": item_id, "call_id": call.id, "name": tool.name, "status": "completed"}
    if tool.namespace is not None:
        head["namespace"] = tool.namespace
    if tool.is_custom:
        return {"type": "custom_tool_call", **head, "input": custom_input(call.arguments)}
    return {"type": "function_call", **head, "arguments": call.arguments}


def events(turn: Turn, request: TurnRequest) -> Iterator[Event]:
    """Write a turn as a stream: it was sampled whole, so each of its texts is one delta."""
    last = answer(turn, request)
    started = _response(turn, "in_progress", [])
    plain: list[dict[str, Any]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(last["output"]):
        plain += _item_events(item, index)
    plain.append({"type": f"response.{last['status']}", "response": last})
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


def _response(turn: Turn, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"resp_{turn.id}",
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


def error_event(refused: Refused) -> Event:
    """Write an error into a stream that has begun."""
    about = error(refused)["error"]
    failed = {"code": about["code"] or "server_error", "message": about["message"]}
    response = {"id": "resp_failed", "object": "response", "status": "failed", "error": failed, "output": []}
    return "response.failed", {"type": "response.failed", "sequence_number": 0, "response": response}


RESPONSES = Dialect(read, answer, events, error, error_event)
