"""The gateway answers the SDKs of OpenAI and Anthropic, and knows its turns when they return."""

import asyncio
import json
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.fake_chat import served
from support.processes.stage import until
from support.runs.toy_environments import says
from trireme.journal.model_turn import ToolCall
from trireme.orchestrator.environments.programs import listen
from trireme.orchestrator.gateway import budgets, connections, endpoint, server
from trireme.orchestrator.gateway.dialects import chat, responses
from trireme.orchestrator.gateway.dialects import turn as turn_dialect
from trireme.orchestrator.gateway.dialects.anthropic import ANTHROPIC
from trireme.orchestrator.gateway.dialects.turn import ClientRequest, Rejected, decode_body
from trireme.orchestrator.gateway.endpoint import Endpoint
from trireme.orchestrator.gateway.server import Gateway
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import Reply, RunTask

KEY = "key-of-the-first-session"
CALLS = (ToolCall("call00100", "bash", '{"cmd":  "ls"}'), ToolCall("call00101", "add", '{"a": 1, "b": [2]}'))


def calling(*calls: ToolCall, **more: Any) -> Reply:
    return Reply(**{"call": "t1", "content": "", "tool_calls": calls, "finish_reason": "tool_calls"} | more)


TURNS = {
    "thought": Reply(call="t1", content="3", reasoning=" 1 + 2\n", num_prompt=7, num_sampled=9),
    "calls": calling(*CALLS, num_prompt=7, num_sampled=9),
    "all": calling(*CALLS, content="I look.", reasoning="Hm.", num_prompt=7, num_sampled=20),
    "text": Reply(call="t1", content="It is  3.\n", finish_reason="length", num_prompt=7, num_sampled=2),
}
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("bash", "add")]
RESPONSES_TOOLS = [{"type": "function", "name": it, "parameters": SCHEMA, "strict": False} for it in ("bash", "add")]
ANTHROPIC_TOOLS = [{"name": name, "input_schema": SCHEMA} for name in ("bash", "add")]


class Policy(Endpoint):
    def __init__(self, *turns: Reply | Exception, pause_s: float = 0.0) -> None:
        super().__init__(None, Session(RunTask(task="rollout", index=0)), key=KEY)
        self.turns, self.pause_s = list(turns), pause_s
        self.requests: list[ClientRequest] = []
        self.retries: list[bool] = []

    async def answer(self, request: ClientRequest, digest: str, *, is_retry: bool = False, **_: Any) -> Reply:
        self.requests.append(request)
        self.retries.append(is_retry)
        turn = self.turns[min(len(self.requests), len(self.turns)) - 1]
        await asyncio.sleep(self.pause_s)
        if isinstance(turn, Exception):
            raise turn
        return turn

    async def count(self, request: ClientRequest) -> int:
        await asyncio.sleep(self.pause_s)
        return len(request.messages)


@contextmanager
def serving(policy: Policy) -> Iterator[tuple[Gateway, str]]:
    with served(lambda: server.open_gateway(listen("127.0.0.1", 0), "127.0.0.1")) as gateway:
        gateway.open(policy)
        yield gateway, gateway.url


def asks(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def ask_chat(url: str, messages: list, *, streams: bool) -> tuple[list, dict]:
    """Return what the SDK sends back in a conversation, and what it read."""
    client = openai_client(url)
    asked = {"model": "policy", "messages": messages, "tools": CHAT_TOOLS}
    if not streams:
        completion = client.chat.completions.create(**asked)
    else:
        with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            try:
                completion = stream.get_final_completion()
            except openai.LengthFinishReasonError as cut:
                completion = cut.completion
    choice = completion.choices[0]
    message = choice.message
    dumped = message.model_dump(exclude_none=True, exclude={"parsed": True})
    for call in dumped.get("tool_calls", []):
        call["function"].pop("parsed_arguments", None)
    return [dumped], {
        "content": message.content or "", "reasoning": getattr(message, "reasoning_content", None) or "",
        "calls": [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []],
        "finish": choice.finish_reason, "usage": (completion.usage.prompt_tokens, completion.usage.completion_tokens),
    }  # fmt: skip


def ask_responses(url: str, items: list, *, streams: bool) -> tuple[list, dict]:
    client = openai_client(url)
    asked = {"model": "policy", "input": items, "tools": RESPONSES_TOOLS, "store": False}
    if not streams:
        response = client.responses.create(**asked)
    else:
        with client.responses.stream(**asked) as stream:
            events = list(stream)
        response = events[-1].response
        assert [event.sequence_number for event in events] == list(range(len(events)))
    calls = [item for item in response.output if item.type == "function_call"]
    thoughts = [item for item in response.output if item.type == "reasoning"]
    finish = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}[response.status]
    returned = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
    return returned, {
        "content": response.output_text, "reasoning": "".join(part.text for item in thoughts for part in item.content),
        "calls": [(call.call_id, call.name, call.arguments) for call in calls], "finish": finish,
        "usage": (response.usage.input_tokens, response.usage.output_tokens),
    }  # fmt: skip


def ask_anthropic(url: str, messages: list, *, streams: bool) -> tuple[list, dict]:
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    asked = {"model": "policy", "messages": messages, "tools": ANTHROPIC_TOOLS, "max_tokens": 100}
    if not streams:
        message = client.messages.create(**asked)
    else:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    texts = {"text": "", "thinking": ""}
    calls = []
    for block in message.content:
        if block.type == "tool_use":
            calls.append((block.id, block.name, json.dumps(block.input)))
        else:
            texts[block.type] += getattr(block, block.type)
    content = [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in message.content]
    finish = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}[message.stop_reason]
    return [{"role": "assistant", "content": content}], {
        "content": texts["text"], "reasoning": texts["thinking"], "calls": calls, "finish": finish,
        "usage": (message.usage.input_tokens, message.usage.output_tokens),
    }  # fmt: skip


ASKS = {"chat": ask_chat, "responses": ask_responses, "anthropic": ask_anthropic}
DIALECTS = {"chat": chat.CHAT, "responses": responses.RESPONSES, "anthropic": ANTHROPIC}


def read_as(dialect: str, body: dict) -> ClientRequest:
    return DIALECTS[dialect].read(decode_body(json.dumps(body).encode(), DIALECTS[dialect].body))


@pytest.mark.parametrize("dialect", ASKS)
@pytest.mark.parametrize("kind", TURNS)
def test_sdk_reads_the_same_turn_streamed_or_whole(kind, dialect):
    turn, policy = TURNS[kind], Policy(TURNS[kind])
    user = {"role": "user", "content": "What is 1 + 2?"}
    with serving(policy) as (_, url):
        returned, read = ASKS[dialect](url, [user], streams=False)
        streamed, same = ASKS[dialect](url, [user, *returned, user], streams=True)
        ASKS[dialect](url, [user, *streamed, user], streams=False)
    assert read == same
    expected = [(call.id, call.name, json.loads(call.arguments)) for call in turn.calls]
    assert [(*rest, json.loads(arguments)) for *rest, arguments in read.pop("calls")] == expected
    usage = (turn.num_prompt, turn.num_sampled)
    assert read == {"content": turn.content, "reasoning": turn.reasoning or "", "finish": turn.finish, "usage": usage}
    first, *others = policy.requests
    assert [tool["function"]["name"] for tool in first.tools] == ["bash", "add"]
    for other in others:
        begin, again, end = other.messages
        assert begin == end == user == first.messages[0]
        calls = again.get("tool_calls", [])
        assert [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == expected
        assert (again["content"], again.get("reasoning_content", "")) == (turn.content, turn.reasoning or "")


def test_tool_results_read_the_same_in_every_dialect():
    result = "a\nb"
    calls = [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}]
    expected = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
    assert read_as("chat", {"messages": [{**expected[0], "role": "developer"}, *expected[1:]]}).messages == expected
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "List."}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"cmd": "ls"}'},
        {"type": "function_call_output", "call_id": "c1", "output": result},
    ]
    assert read_as("responses", {"instructions": "Be brief.", "input": items}).messages == expected
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "List.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "bash", "input": {"cmd": "ls"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": result}]},
    ]
    assert read_as("anthropic", {"system": "Be brief.", "messages": blocks}).messages == expected


def test_custom_tools_reach_the_model_as_functions():
    tools = [
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
        {"type": "namespace", "name": "crm", "description": "", "tools": [{"type": "function", "name": "find"}]},
        {"type": "web_search"},
    ]
    request = read_as("responses", {"input": "Go.", "tools": tools})
    assert [tool["function"]["name"] for tool in request.tools] == ["patch", "crm__find"]
    assert "start: X" in request.tools[0]["function"]["description"]
    turn = calling(ToolCall("c1", "patch", '{"input": "*** Begin"}'), ToolCall("c2", "crm__find", "{}"))
    items = responses.answer(turn, request)["output"]
    assert [(i["type"], i["name"], i.get("namespace"), i.get("input")) for i in items] == [
        ("custom_tool_call", "patch", None, "*** Begin"),
        ("function_call", "find", "crm", None),
    ]
    again = read_as("responses", {"input": [{"role": "user", "content": "Go."}, *items], "tools": tools}).messages[1]
    assert [call["function"]["name"] for call in again["tool_calls"]] == ["patch", "crm__find"]


def test_arguments_that_are_no_json_come_back_as_the_model_wrote_them():
    request = read_as("anthropic", {"messages": [{"role": "user", "content": "Go."}]})
    content = ANTHROPIC.answer(calling(ToolCall("c1", "bash", '{"cmd": ')), request)["content"]
    again = read_as("anthropic", {"messages": [{"role": "assistant", "content": content}]}).messages[0]
    assert again["tool_calls"][0]["function"]["arguments"] == '{"cmd": '


def test_half_a_surrogate_pair_is_replaced_on_its_way_out_and_in():
    policy = Policy(calling(ToolCall("c1", "bash", '{"input": "a\\ud83d"}')))
    custom = {"input": "Go.", "tools": [{"type": "custom", "name": "bash"}]}
    with serving(policy) as (_, url):
        for streams in (False, True):
            _, read = ask_anthropic(url, asks("Go.")["messages"], streams=streams)
            assert json.loads(read["calls"][0][2]) == {"input": "a\ufffd"}
            answer = httpx.post(f"{url}/s/{KEY}/v1/responses", json=custom | {"stream": streams})
            assert '"input":"a\ufffd"' in answer.text
        httpx.post(f"{url}/s/{KEY}/v1/chat/completions", content=json.dumps(asks("a\ud83d")))
    assert policy.requests[-1].messages[0]["content"] == "a\ufffd"


def test_a_response_may_be_continued_by_its_id():
    policy = Policy(TURNS["calls"], TURNS["text"])
    with serving(policy) as (_, url):
        client = openai_client(url)
        first = client.responses.create(model="policy", input="List.", tools=RESPONSES_TOOLS)
        output = [{"type": "function_call_output", "call_id": "call00100", "output": "a"}]
        client.responses.create(model="policy", input=output, tools=RESPONSES_TOOLS, previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="policy", input="x", previous_response_id="resp_of_another")
    assert [message["role"] for message in policy.requests[1].messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("refused", "openai_error", "anthropic_error", "code", "words"),
    [
        (Rejected("overlong", "9 tokens, 8 fit"), openai.BadRequestError, anthropic.BadRequestError,
         "context_length_exceeded", "prompt is too long"),
        (Rejected("busy", "loading", retry_after_s=3), openai.RateLimitError, anthropic.RateLimitError,
         "rate_limit_exceeded", "loading"),
        (Rejected("failed", "no"), openai.BadRequestError, anthropic.BadRequestError, None, "no"),
        (Reply(content="\ud83d"), openai.BadRequestError, anthropic.BadRequestError, None, "The gateway failed"),
        (OverflowError("ours"), openai.BadRequestError, anthropic.BadRequestError, None, "The gateway failed"),
    ],
)  # fmt: skip
def test_a_refusal_is_the_error_that_each_sdk_knows(refused, openai_error, anthropic_error, code, words):
    with serving(Policy(refused)) as (_, url):
        with pytest.raises(openai_error) as caught:
            openai_client(url).chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
        assert caught.value.code == code
        with pytest.raises(openai_error) as caught:
            openai_client(url).responses.create(model="policy", input="a")
        assert caught.value.code == code
        with pytest.raises(anthropic_error, match=words) as told:
            ask_anthropic(url, [{"role": "user", "content": "a"}], streams=True)
        assert told.value.response.headers.get("retry-after") == ("3" if code == "rate_limit_exceeded" else None)


def test_session_key_is_accepted_as_bearer_header_or_path():
    question, policy = asks("a"), Policy(TURNS["text"])
    with serving(policy) as (gateway, url):

        def status(headers: dict, path: str = "/v1/messages") -> int:
            return httpx.post(url + path, json=question, headers=headers).status_code

        assert status({"authorization": f"Bearer {KEY}"}) == 200
        assert status({"x-api-key": KEY, "x-stainless-retry-count": "0"}) == 200
        assert status({"x-api-key": "placeholder", "x-stainless-retry-count": "1"}, f"/s/{KEY}/v1/messages") == 200
        assert policy.retries == [False, False, True]  # it may have answered the last one before
        assert status({}) == status({"x-api-key": KEY + "x"}) == status({"authorization": f"Basic {KEY}"}) == 401
        assert httpx.head(url).status_code == 200
        assert openai_client(url).models.list().data[0].id == "policy"
        counted = anthropic.Anthropic(base_url=url, api_key=KEY).messages.count_tokens(model="p", **question)
        assert counted.input_tokens == 1
        gateway.close(KEY, "its rollout is over")
        assert status({"x-api-key": KEY}) == 403


def test_client_that_retries_a_lost_answer_gets_the_same_turn():
    policy = Policy(TURNS["text"], TURNS["thought"], pause_s=0.4)
    question = asks("a")
    with serving(policy) as (_, url):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/s/{KEY}/v1/messages", json=question, timeout=0.2)
        again = httpx.post(f"{url}/s/{KEY}/v1/messages", json=question)
        other = httpx.post(f"{url}/s/{KEY}/v1/messages", json=question)
    assert again.json()["content"][0]["text"] == TURNS["text"].content
    assert other.json()["content"][0]["type"] == "thinking"  # the same question once more is a turn of its own
    assert len(policy.requests) == 2


def test_request_completed_after_its_session_ended_gets_no_turn():
    policy = Policy(TURNS["text"])

    def body() -> Iterator[bytes]:
        yield b'{"messages": [{"role": "user", '
        until(lambda: policy.num_open)
        gateway.close(KEY, "its rollout was begun again")
        yield b'"content": "a"}]}'

    with serving(policy) as (gateway, url):
        assert httpx.post(f"{url}/s/{KEY}/v1/messages", content=body()).status_code == 403
    assert policy.requests == []


def test_session_that_begins_again_is_open_under_another_key_alone():
    with serving(Policy()) as (gateway, url):
        first = Endpoint(gateway, Session(RunTask(task="r", index=0), says("x"))).open()
        again = first.restart()
        posts = [httpx.post(f"{url}/s/{each.key}/v1/messages", json=asks("a")) for each in (first, again)]
    assert [post.status_code for post in posts] == [403, 200]
    assert "begun again" in posts[0].text
    assert (first.num_turns, again.num_turns, again.task.api_key) == (0, 1, again.key)


def test_a_long_wait_shows_signs_of_life_and_its_error_comes_in_the_stream(monkeypatch):
    monkeypatch.setattr(server, "QUIET_S", 0.05)
    policy = Policy(TURNS["text"], Rejected("failed", "no engine"), pause_s=0.3)
    user = [{"role": "user", "content": "a"}]
    with serving(policy) as (_, url):
        assert ask_anthropic(url, user, streams=True)[1]["content"] == TURNS["text"].content
        with pytest.raises(anthropic.APIStatusError, match="no engine"):
            ask_anthropic(url, user, streams=True)
        with pytest.raises(openai.APIError, match="no engine"):
            ask_chat(url, user, streams=True)


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
def test_a_flood_costs_its_session_a_pause_and_a_giant_is_refused(monkeypatch, path):
    """A client that breaks off its requests has no more turns under way than one that waits."""
    monkeypatch.setattr(endpoint, "MOST_AT_ONCE", 3)
    monkeypatch.setattr(server, "LARGEST_BODY", 1000)

    async def flood(url: str) -> list[int]:
        async with httpx.AsyncClient() as client:
            posts = [client.post(f"{url}/s/{KEY}/v1/{path}", json=asks(f"{number}")) for number in range(8)]
            return sorted(answer.status_code for answer in await asyncio.gather(*posts))

    with serving(policy := Policy(TURNS["text"], pause_s=1.5)) as (_, url):
        assert asyncio.run(flood(url)) == [200] * 3 + [429] * 5
        assert httpx.post(f"{url}/s/{KEY}/v1/{path}", json=asks("a" * 2000)).status_code == 400
        assert httpx.post(f"{url}/s/{KEY}/v1/messages", content=b"[" * 900).status_code == 400
        policy.pause_s = 60
        for number in range(3):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/s/{KEY}/v1/messages", json=asks(f"{number}"), timeout=0.2)
        assert httpx.post(f"{url}/s/{KEY}/v1/messages", json=asks("another")).status_code == 429


def test_gateway_bounds_connections_and_headers_of_unknown_clients(monkeypatch):
    monkeypatch.setattr(connections, "LARGEST_HEAD", 1000)
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
    with serving(Policy(TURNS["text"])) as (_, url), ExitStack() as stack:

        def connect() -> socket.socket:
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            return stack.enter_context(socket.create_connection(address, timeout=5))

        oldest, second, newest = connect(), connect(), connect()
        assert oldest.recv(1) == b""
        for kept in (second, newest):
            kept.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert kept.recv(12) == b"HTTP/1.1 200"
        monkeypatch.setattr(connections, "MOST_CONNECTIONS", 9)
        with pytest.raises(ConnectionError):
            connect().sendall(b"GET / HTTP/1.1\r\n" + b"X-A: a\r\n" * 1_000_000)
        assert httpx.post(f"{url}/s/{KEY}/v1/messages", json=asks("a" * 1_000_000)).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "POST /v1/messages HTTP/1.1\r\nHo",
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n|\r\n",  # an answered request, and then what is none
        "POST /s/{key}/v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{{",
        "POST /v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{{",
    ],
)
def test_a_connection_whose_request_does_not_come_in_time_is_closed(monkeypatch, sent):
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    monkeypatch.setattr(connections, "BODY_S", 0.1)
    with (
        serving(Policy(TURNS["text"])) as (_, url),
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as connection,
    ):
        first, _, then = sent.format(key=KEY).encode().partition(b"|")
        connection.sendall(first)
        if then and connection.recv(1 << 16):
            connection.sendall(then)
        with suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                pass


def test_a_client_is_not_slow_while_the_gateway_does_not_read(monkeypatch):
    # a thread of a loaded machine may stand still for a second, which is slow indeed
    monkeypatch.setattr(connections, "BODY_S", 2.0)
    with serving(policy := Policy(TURNS["text"])) as (_, url):
        policy.bodies.settle(policy.bodies.most_bytes)
        policy.bodies._paid_until += 3.0
        assert httpx.post(f"{url}/s/{KEY}/v1/messages", json=asks("a" * 1_000_000)).status_code == 200


def test_bodies_under_way_are_bounded(monkeypatch):
    monkeypatch.setattr(server, "BODIES_OF_ALL", 2000)

    def body() -> Iterator[bytes]:
        yield b" " * 1500
        until(lambda: policy.bodies.num_bytes)
        assert httpx.post(url, json=asks("a" * 1000)).status_code == 429
        yield json.dumps(asks("a")).encode()

    with serving(policy := Policy(TURNS["text"])) as (_, url):
        url = f"{url}/s/{KEY}/v1/messages"
        assert httpx.post(url, content=body()).status_code == 200
        assert httpx.post(url, json=asks("a" * 1000)).status_code == 200


def test_what_no_prompt_shows_is_bounded_for_a_session(monkeypatch):
    monkeypatch.setattr(budgets, "FREE", 1000)
    monkeypatch.setattr(budgets, "LARGEST_HIDDEN", 1000)
    thought = {"role": "assistant", "content": "", "reasoning_content": "a" * 5000}
    with serving(Policy(TURNS["text"])) as (_, url):
        posts = [httpx.post(f"{url}/s/{KEY}/v1/chat/completions", json={"messages": [thought]}) for _ in range(2)]
        small = httpx.post(f"{url}/s/{KEY}/v1/chat/completions", json=asks("a"))
    assert [post.status_code for post in (*posts, small)] == [200, 400, 200]


def test_a_failure_that_repeats_is_logged_once(caplog):
    class NotLoggedYet(Exception):
        pass

    with serving(Policy(NotLoggedYet("ours"))) as (_, url):
        for _ in range(5):
            httpx.post(f"{url}/s/{KEY}/v1/messages", json=asks("a"))
    assert caplog.text.count("could not answer a request") == 1


def test_fields_that_are_not_obeyed_are_named_in_the_log(caplog):
    asked = asks("a") | {"user": "me", "logprobs": False, "seed": 5, "temprature": 0.5}
    with serving(Policy(TURNS["text"])) as (_, url):
        for _ in range(2):
            httpx.post(f"{url}/s/{KEY}/v1/chat/completions", json=asked | {"tool_choice": "required"})
    (line,) = [record.getMessage() for record in caplog.records if "not wholly, obeyed" in record.getMessage()]
    assert "'seed', 'temprature', 'tool_choice'" in line


URL = "data:image/png;base64,AAAA"
SHOWN = {"type": "image_url", "image_url": {"url": URL}}
BYTES = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
INPUT = {"type": "input_image", "image_url": URL, "detail": "auto"}
AT = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png", "detail": "low"}}
AT_SOURCE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
FILE = {"type": "input_image", "file_id": "file-1"}


@pytest.mark.parametrize(
    ("dialect", "field", "kind", "picture", "elsewhere"),
    [
        ("chat", "messages", "text", SHOWN, AT),
        ("responses", "input", "input_text", INPUT, FILE),
        ("anthropic", "messages", "text", BYTES, AT_SOURCE),
    ],
)
def test_pictures_of_all_dialects_are_the_same_parts_and_none_is_fetched(dialect, field, kind, picture, elsewhere):
    text = {"type": kind, "text": "what?"}
    (message,) = read_as(dialect, {field: [{"role": "user", "content": [picture, text]}]}).messages
    assert message == {"role": "user", "content": [SHOWN, {"type": "text", "text": "what?"}]}
    for wrong in (elsewhere, picture | {"type": "audio"}):
        with pytest.raises(Rejected):
            read_as(dialect, {field: [{"role": "user", "content": [wrong]}]})


def test_results_of_tools_may_show_pictures():
    result = {"type": "tool_result", "tool_use_id": "c", "content": [BYTES]}
    (read,) = read_as("anthropic", {"messages": [{"role": "user", "content": [result]}]}).messages
    output = {"type": "function_call_output", "call_id": "c", "output": [INPUT]}
    (other,) = read_as("responses", {"input": [output]}).messages
    assert read == other == {"role": "tool", "tool_call_id": "c", "content": [SHOWN]}


def test_gateway_reads_chat_template_kwargs_but_refuses_reserved_ones():
    asked = asks("a") | {"chat_template_kwargs": {"enable_thinking": False}}
    assert read_as("chat", asked).sampling == {"chat_template_kwargs": {"enable_thinking": False}}
    assert read_as("chat", asks("a") | {"chat_template_kwargs": None}).sampling == {}
    for wrong in ([], "no", {"messages": []}, {"add_generation_prompt": False}, {"a": "b" * 5000}):
        with pytest.raises(Rejected, match="chat_template_kwargs"):
            read_as("chat", asks("a") | {"chat_template_kwargs": wrong})


WORDS = st.sampled_from(["", "user", "assistant", "text", "custom"])
KEYS = ["role", "content", "type", "text", "image_url", "source"]
KEYS += ["tool_calls", "function", "name", "input", "id", "call_id"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ("messages", "input", "tools", "system", "instructions", "tool_choice", "stream_options", "text", "n")


@pytest.mark.parametrize("dialect", DIALECTS)
@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_json_is_read_or_refused(dialect, body):
    try:
        request = read_as(dialect, body)
    except Rejected:
        return
    assert all(isinstance(message["role"], str) for message in request.messages)
    assert all(isinstance(message["content"], str | list) for message in request.messages)


@pytest.mark.parametrize(
    ("dialect", "asked", "sampling", "template_kwargs"),
    [
        ("chat", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, {}),
        ("responses", {"reasoning": {"effort": "none", "summary": "auto"}}, {"reasoning_effort": "none"}, {}),
        ("anthropic", {"thinking": {"type": "disabled"}}, {}, {"enable_thinking": False}),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 9}}, {}, {"enable_thinking": True}),
        ("anthropic", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
         {"reasoning_effort": "max"}, {}),
    ],
)  # fmt: skip
def test_how_much_a_program_wants_the_model_to_think_is_read(dialect, asked, sampling, template_kwargs):
    request = read_as(dialect, {"messages": [USER], "input": [USER]} | asked)
    assert request.sampling == sampling | ({"chat_template_kwargs": template_kwargs} if template_kwargs else {})


USER = {"role": "user", "content": "a"}
BLOCK = {"type": "tool_use", "id": "", "name": "f"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("chat", {"messages": [USER | {"junk": ...}]}),
        ("chat", {"messages": [USER | {"content": [{"type": "text", "text": "a", "junk": ...}]}]}),
        ("chat", {"messages": [USER], "tools": [{"function": {"name": "f", "junk": ...}}]}),
        ("responses", {"input": [CALL | {"encrypted_content": ...}, USER]}),
        ("responses", {"input": [USER], "metadata": ...}),
        ("anthropic", {"messages": [USER], "metadata": ...}),
        ("anthropic", {"messages": [USER | {"content": [{"type": "redacted_thinking", "data": ...}]}]}),
    ],
)
def test_what_no_dialect_reads_is_never_built(dialect, body):
    junk = json.dumps([[[0], {}]] * 50_000)
    data = json.dumps(body, default=lambda _: "JUNK").replace('"JUNK"', junk).encode()
    tracemalloc.start()
    DIALECTS[dialect].read(decode_body(data, DIALECTS[dialect].body))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000 < len(data)


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("chat", {"messages": [{"role": "a"}] * 21}),
        ("chat", {"messages": [USER | {"content": [{"type": "text", "text": ""}] * 3}] * 7}),
        ("chat", {"messages": [USER], "stop": ["a"] * 21}),
        ("chat", {"messages": [USER], "tools": [{"function": {"name": "f", "parameters": {"a": [0] * 40}}}]}),
        ("responses", {"input": [CALL] * 21}),
        ("responses", {"input": [CALL | {"arguments": {"a": [0] * 20}}] * 2}),
        ("anthropic", {"messages": [USER], "tools": [{"name": "f"}] * 21}),
        ("anthropic", {"messages": [USER | {"content": [BLOCK | {"input": [[]] * 40}]}]}),
    ],
)  # fmt: skip
def test_a_request_of_very_many_values_is_refused(monkeypatch, dialect, body):
    assert read_as(dialect, body).messages
    monkeypatch.setattr(turn_dialect, "MOST_ITEMS", 20)
    monkeypatch.setattr(turn_dialect, "MOST_VALUES", 30)
    with pytest.raises(Rejected, match="Send fewer"):
        read_as(dialect, body)


@pytest.mark.parametrize(
    ("dialect", "wrong"),
    [
        *(("responses", {"previous_response_id": value}) for value in ([1], {}, 5, True)),
        ("responses", {"store": []}), ("responses", {"instructions": [1]}), ("responses", {"tool_choice": 5}),
        ("chat", {"temperature": "hot"}), ("chat", {"temperature": -1}), ("chat", {"max_tokens": 0}),
        ("chat", {"stop": {}}), ("chat", {"stream": "yes"}), ("chat", {"n": [1]}), ("chat", {"top_k": 10**30}),
        ("anthropic", {"max_tokens": "a"}), ("anthropic", {"tool_choice": []}), ("anthropic", {"system": 5}),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_type_is_refused_by_its_name(dialect, wrong):
    body = {"messages": [USER], "input": [USER]}
    assert read_as(dialect, body | dict.fromkeys(wrong)).messages
    with pytest.raises(Rejected, match=next(iter(wrong))):
        read_as(dialect, body | wrong)
