"""A chat endpoint as a policy: requests, retries, and which answers are the model's."""

import asyncio
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from support.engines.fake_chat import FakeChat, completion
from trireme.base.errors import ConfigError, DeadlineExceeded
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment, OrchestratorConfig
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.orchestrator.session.session import RolloutFailed, Session
from trireme.orchestrator.session.wire import Ask, Done, Reply
from trireme.tools.policies.chat_endpoint import look_at, open_chat_endpoint


def reply_of(chat: FakeChat, timeout_s: float = 20, **question: Any) -> Reply:
    """The answer of an endpoint to the one question of an environment."""
    replies, waits = [], Waits("the check")

    async def run(session: Session) -> Any:
        messages = [{"role": "user", "content": "q"}]
        replies.append(await session.answer(Ask(task="t", call="c", messages=messages, **{"sampling": {}} | question)))
        return Done(task="t", reward=0.0, metrics={}, prompt=[], completion=[], example_id=0)

    async def main() -> None:
        environment = SimpleNamespace(name="toy", config=Environment(id="toy"), run=run)
        config = OrchestratorConfig(engine_timeout_s=timeout_s)
        async with open_chat_endpoint(await look_at(chat.url), None, None, config, waits) as endpoint:
            endpoint.pause_s = 0.01
            await endpoint.rollout(environment, RolloutSpec("train", 0, 0, name="0-0"))  # type: ignore[arg-type]

    with chat.running():
        asyncio.run(main())
    return replies[0]


def test_tool_calls_and_thinking_of_an_endpoint_reach_the_environment():
    chat = FakeChat()
    call = {"id": "x7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat.answers = lambda number: (200, completion(None, tool_calls=[call], reasoning_content="hm"))
    sampling = {"max_tokens": 5, "top_k": 2, "chat_template_kwargs": {"enable_thinking": False}}
    of_the_command = {"n": 3, "stream": True}
    reply = reply_of(chat, tools=[{"type": "function"}], sampling=sampling | of_the_command)
    assert [(call.id, call.name, call.arguments) for call in reply.tool_calls or []] == [("x7", "add", '{"a": 1}')]
    assert (reply.content, reply.reasoning, reply.finish_reason) == (None, "hm", "tool_calls")
    [asked] = chat.requests
    expected = sampling | {"model": "grand-model", "temperature": 1.0, "tools": [{"type": "function"}]}
    assert {name: asked[name] for name in asked if name != "messages"} == expected


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([(429, {}), (503, {}), (200, completion("", reason="length"))], ("", "length", None)),
        ([(400, {"error": "This model's maximum context length is 8 tokens"})], (None, None, "overlong_prompt")),
        ([(200, {"choices": None, "error": {"code": 429}}), (200, completion("a"))], ("a", "stop", None)),
        ([(200, completion("a") | {"error": "Rate limit exceeded"}), (200, completion("b"))], ("b", "stop", None)),
        ([(200, {"choices": [{"error": {"code": "502"}}]}), (200, completion("b"))], ("b", "stop", None)),
        ([(200, completion([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))], ("ab", "stop", None)),
        ([(200, completion([{"type": "thinking", "thinking": "hm"}, {"text": "b"}]))], ("b", "stop", None)),
    ],
)
def test_chat_endpoint_that_is_busy_is_asked_again(answers, outcome):
    chat = FakeChat()
    chat.answers = lambda number: answers[number]
    reply = reply_of(chat)
    assert (reply.content, reply.finish_reason, reply.error_kind) == outcome
    assert len(chat.requests) == len(answers)


@pytest.mark.parametrize(
    ("status", "answer", "is_final"),
    [
        (400, {"error": {"message": "Unsupported parameter: 'max_tokens'"}}, True),
        (422, {"detail": "no"}, True),
        (200, {"choices": None, "error": {"code": 400, "message": "no"}}, True),
        (200, {"choices": []}, False),
        (200, completion("half", reason="error"), False),
        (200, completion("half", reason="content_filter"), False),
        (200, {"choices": [{"message": {"content": "half"}, "finish_reason": None}]}, False),
        (200, completion("half") | {"error": {"message": "Provider returned error"}}, False),
        (200, completion(""), False),
        (200, completion([]), False),
    ],
)
def test_an_answer_that_is_not_the_models_is_never_scored(status, answer, is_final):
    chat = FakeChat()
    chat.answers = lambda number: (status, answer)
    with pytest.raises(RolloutFailed, match="endpoint") as caught:
        reply_of(chat)
    assert (caught.value.is_final, len(chat.requests)) == (is_final, 1)


@pytest.mark.parametrize(
    ("status", "timeout_s", "error", "words"),
    [
        (401, 20, ConfigError, "answered 401 .*the key was refused.*what is wrong.*--api-key-var"),
        (503, 3, DeadlineExceeded, "waits .* for an answer from http.*503 .*what is wrong"),
        (None, 0.3, DeadlineExceeded, r"waits .* for an answer from http.*the last try: \w"),
    ],
)
def test_chat_endpoint_that_refuses_a_key_or_is_silent_ends_all(status, timeout_s, error, words):
    chat = FakeChat()
    chat.answers = lambda number: time.sleep(1) or (200, {}) if status is None else (status, {"error": "what is wrong"})
    with pytest.raises(error, match=re.compile(words)):
        reply_of(chat, timeout_s=timeout_s)
