"""A policy that needs no model: answers that make no sense, so that an environment shows how it takes them.

What it says depends on the rollout's name and the turn alone. Each group meets all kinds of answers: nothing at all,
a few words, the question again, a number, broken markup, a long text, and calls of tools with right, wrong and
unreadable arguments.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Reply, ToolCall
from trireme.orchestrator.rollout.driver import RolloutSpec
from trireme.orchestrator.rollout.runner import Finished

MOST_TURNS = 32
"""Then the conversation "no longer fits", as it would in a model's context: an environment may have no limit."""

Answer = Callable[[Ask, random.Random], Reply]


class ScriptedPolicy:
    """Answers with nothing sensible."""

    name = "scripted answers that make no sense"
    is_policy = False

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Finished:
        num_turns = 0

        async def ask(question: Ask) -> Reply:
            nonlocal num_turns
            num_turns += 1
            return answer(question, spec, turn=num_turns)

        return Finished.from_environment(await environment.run(spec.task(environment), ask))


def answer(question: Ask, spec: RolloutSpec, *, turn: int) -> Reply:
    """The same for the same rollout and turn."""
    if turn > MOST_TURNS:
        return Reply(error=f"The script takes {MOST_TURNS} turns.", error_kind="overlong_prompt")
    kinds = [*_TEXTS, *(_CALLS if question.tools else ())]
    kind = kinds[(spec.example + spec.rollout + turn - 1) % len(kinds)]
    return kind(question, random.Random(f"{spec.name}/{turn}"))


def _says(text: str, *, finish_reason: Any = "stop") -> Reply:
    return Reply(content=text, finish_reason=finish_reason)


def _few_words(question: Ask, rng: random.Random) -> Reply:
    return _says(" ".join(rng.choice(("sea", "oar", "wind", "Ruder", "é", "漕", "42")) for _ in range(5)))


def _question_again(question: Ask, rng: random.Random) -> Reply:
    content = question.messages[-1].get("content") if question.messages else ""
    return _says(content if isinstance(content, str) else "")


def _number(question: Ask, rng: random.Random) -> Reply:
    return _says(str(rng.randrange(-100, 1000)))


def _broken_markup(question: Ask, rng: random.Random) -> Reply:
    return _says('<answer><think>{"guess": [</answer> \\boxed{')


def _long_text(question: Ask, rng: random.Random) -> Reply:
    return _says("on and on " * 400, finish_reason="length")


def _nothing(question: Ask, rng: random.Random) -> Reply:
    return _says("")


def _call(question: Ask, rng: random.Random) -> Reply:
    """A tool that exists, with arguments of the right types."""
    function = rng.choice(question.tools or [{}]).get("function", {})
    arguments = json.dumps(_arguments(function.get("parameters") or {}, rng))
    return _calls(ToolCall(id="call-1", name=str(function.get("name", "")), arguments=arguments))


def _call_without_arguments(question: Ask, rng: random.Random) -> Reply:
    name = (question.tools or [{}])[0].get("function", {}).get("name", "")
    return _calls(ToolCall(id="call-1", name=str(name), arguments="{}"))


def _unreadable_call(question: Ask, rng: random.Random) -> Reply:
    name = (question.tools or [{}])[-1].get("function", {}).get("name", "")
    return _calls(ToolCall(id="call-1", name=str(name), arguments='{"unfinished": '))


def _two_calls(question: Ask, rng: random.Random) -> Reply:
    """At once; one of a tool that does not exist."""
    first = _call(question, rng).tool_calls or []
    return _calls(*first, ToolCall(id="call-2", name="no_such_tool", arguments="{}"))


def _calls(*calls: ToolCall) -> Reply:
    return Reply(content=None, tool_calls=list(calls), finish_reason="tool_calls")


_TEXTS: tuple[Answer, ...] = (_few_words, _question_again, _number, _broken_markup, _long_text, _nothing)
_CALLS: tuple[Answer, ...] = (_call, _call_without_arguments, _unreadable_call, _two_calls)


def _arguments(schema: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    properties = schema.get("properties")
    return {name: _value(each, rng) for name, each in properties.items()} if isinstance(properties, dict) else {}


def _value(schema: Any, rng: random.Random) -> Any:
    schema = schema if isinstance(schema, dict) else {}
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    kinds: dict[str, Any] = {"integer": rng.randrange(10), "number": rng.random(), "boolean": True, "array": []}
    return kinds.get(str(schema.get("type")), {} if schema.get("type") == "object" else "sea")
