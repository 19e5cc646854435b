"""A policy that needs no model: answers that make no sense, to show how an environment handles them.

An answer depends on the rollout's name and the turn alone. Each group meets all kinds of answers: nothing at all, a few
words, the question again, a number, broken markup, a long text, and calls of tools with right, wrong and unreadable
arguments.
"""

from __future__ import annotations

import json
import random

from trireme.journal.model_turn import ToolCall
from trireme.journal.records import Rollout
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.driver import build_rollout
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import Ask, Reply

MAX_TURNS = 32
"""The conversation then no longer fits, as it would in a model's context: an environment may have no limit."""

BROKEN = '<answer><think>{"guess": [</answer> \\boxed{'
LONG = "on and on " * 400
VALUES = {"integer": 7, "number": 0.5, "boolean": True, "array": [], "object": {}}  # an argument of each JSON type


class ScriptedPolicy:
    name = "scripted answers that make no sense"

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Rollout:
        num_turns = 0

        async def ask(question: Ask) -> Reply:
            nonlocal num_turns
            if question.only_counts:
                return estimated_prompt(question)
            num_turns += 1
            return answer(question, spec, turn=num_turns)

        done = await environment.run(Session(spec.task(environment), ask))
        return build_rollout(done, environment, spec)


def estimated_prompt(question: Ask) -> Reply:
    """Answer a request for the number of a prompt's tokens if nothing counts them: four letters are one."""
    return Reply(prompt_ids=[0] * (len(json.dumps([question.messages, question.tools])) // 4))


def answer(question: Ask, spec: RolloutSpec, *, turn: int) -> Reply:
    """Return the same answer for the same rollout and turn."""
    if turn > MAX_TURNS:
        return Reply(error=f"The script takes {MAX_TURNS} turns.", error_kind="overlong_prompt")
    # the answer depends on rollout and turn alone, so a check repeats
    rng = random.Random(f"{spec.name}/{turn}")
    words = " ".join(rng.choice(("sea", "oar", "wind", "Ruder", "é", "漕", "42")) for _ in range(5))
    last = question.messages[-1].get("content") if question.messages else ""
    texts = [words, last if isinstance(last, str) else "", str(rng.randrange(-100, 1000)), BROKEN, LONG, ""]
    calls: list[list[tuple[str, str]]] = []  # name and arguments of each call of a tool
    # right arguments, none, broken ones, and one call of a tool that does not exist
    if question.tools:
        function = rng.choice(question.tools).get("function", {})
        name, properties = str(function.get("name", "")), (function.get("parameters") or {}).get("properties") or {}
        types = {key: str(each.get("type")) if isinstance(each, dict) else "" for key, each in properties.items()}
        right = json.dumps({key: VALUES.get(type, "sea") for key, type in types.items()})
        calls = [[(name, right)], [(name, "{}")], [(name, '{"unfinished": ')], [(name, right), ("no_such_tool", "{}")]]
    # neighbouring rollouts and turns get different kinds, so that a group meets all of them
    kind = (spec.example + spec.rollout + turn - 1) % (len(texts) + len(calls))
    if kind < len(texts):
        return Reply(content=texts[kind], finish_reason="length" if texts[kind] == LONG else "stop")

    made = [
        ToolCall(id=f"call-{number}", name=name, arguments=arguments)
        for number, (name, arguments) in enumerate(calls[kind - len(texts)], 1)
    ]
    return Reply(content=None, tool_calls=made, finish_reason="tool_calls")
