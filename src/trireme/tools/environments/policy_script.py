"""A policy that needs no model: answers that make no sense, to show how an environment handles them.

An answer depends on the rollout's name and the turn alone. Each group meets all kinds of answers: nothing at all, a few
words, the question again, a number, broken markup, a long text, and calls of tools with right, wrong and unreadable
arguments.
"""

from __future__ import annotations

import json
import random
from typing import Any

from trireme.journal.records import Rollout
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Reply
from trireme.orchestrator.gateway.dialects.turn import ToolCall
from trireme.orchestrator.rollout.driver import build_rollout
from trireme.orchestrator.rollout.runner import RolloutSpec

MAX_TURNS = 32
"""The conversation then no longer fits, as it would in a model's context: an environment may have no limit."""

TEXTS = ("few words", "question again", "number", "broken markup", "long text", "nothing")
CALLS = ("call", "call without arguments", "unreadable call", "two calls")


class ScriptedPolicy:
    name = "scripted answers that make no sense"
    is_policy = False

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Rollout:
        num_turns = 0

        async def ask(question: Ask) -> Reply:
            nonlocal num_turns
            if question.only_counts:
                return estimated_prompt(question)
            num_turns += 1
            return answer(question, spec, turn=num_turns)

        return build_rollout(await environment.run(spec.task(environment), ask), environment, spec)


def estimated_prompt(question: Ask) -> Reply:
    """Answer a request for the number of a prompt's tokens where nothing counts them: four letters are one."""
    return Reply(prompt_ids=[0] * (len(json.dumps([question.messages, question.tools])) // 4))


def answer(question: Ask, spec: RolloutSpec, *, turn: int) -> Reply:
    """Return the same answer for the same rollout and turn."""
    if turn > MAX_TURNS:
        return Reply(error=f"The script takes {MAX_TURNS} turns.", error_kind="overlong_prompt")
    kinds = (*TEXTS, *(CALLS if question.tools else ()))
    kind = kinds[(spec.example + spec.rollout + turn - 1) % len(kinds)]
    rng = random.Random(f"{spec.name}/{turn}")
    if kind in TEXTS:
        reason: Any = "length" if kind == "long text" else "stop"
        return Reply(content=_text(kind, question, rng), finish_reason=reason)
    functions = [tool.get("function", {}) for tool in question.tools or []]
    if kind == "call without arguments":
        calls = [(functions[0], "{}")]
    elif kind == "unreadable call":
        calls = [(functions[-1], '{"unfinished": ')]
    else:  # a tool that exists, with arguments of the right types; then perhaps one that does not exist
        function = rng.choice(functions)
        calls = [(function, json.dumps(_arguments(function.get("parameters") or {}, rng)))]
        calls += [({"name": "no_such_tool"}, "{}")] if kind == "two calls" else []
    tool_calls = [
        ToolCall(id=f"call-{number}", name=str(function.get("name", "")), arguments=arguments)
        for number, (function, arguments) in enumerate(calls, 1)
    ]
    return Reply(content=None, tool_calls=tool_calls, finish_reason="tool_calls")


def _text(kind: str, question: Ask, rng: random.Random) -> str:
    if kind == "few words":
        return " ".join(rng.choice(("sea", "oar", "wind", "Ruder", "é", "漕", "42")) for _ in range(5))
    if kind == "question again":
        content = question.messages[-1].get("content") if question.messages else ""
        return content if isinstance(content, str) else ""
    if kind == "number":
        return str(rng.randrange(-100, 1000))
    return {"broken markup": '<answer><think>{"guess": [</answer> \\boxed{', "long text": "on and on " * 400}.get(
        kind, ""
    )


def _arguments(schema: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a value of the right type for each property of a JSON schema."""
    properties = schema.get("properties")
    values: dict[str, Any] = {}
    for name, each in properties.items() if isinstance(properties, dict) else ():
        each = each if isinstance(each, dict) else {}
        kinds = {"integer": rng.randrange(10), "number": rng.random(), "boolean": True, "array": [], "object": {}}
        values[name] = rng.choice(each["enum"]) if each.get("enum") else kinds.get(str(each.get("type")), "sea")
    return values
