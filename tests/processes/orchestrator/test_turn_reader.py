"""What is read out of one turn: text, thinking and tool calls."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from support.models.tiny_tokenizer import CHATML, END, write_tokenizer
from trireme.base.waiting import Waits
from trireme.config.inference import InferenceModel
from trireme.journal.model_turn import Message, ToolCall, Turn, assistant_message, is_same
from trireme.orchestrator.engines.pool import open_inference_pool
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.turn_reader import TurnReader

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tokenizer(tmp_path_factory.mktemp("model"), CHATML))


def read(
    tokenizer: ChatTokenizer,
    text: str,
    *,
    model: InferenceModel | None = None,
    tools: list | None = None,
    answers: Any = None,
    stop: Any = None,
    **how: Any,
) -> tuple[Message, list[dict]]:
    """What is said in a turn, and what the engine was asked for it; `answers` is its answer, a status or a message."""
    asked: list[dict] = []

    async def derender(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if isinstance(answers, int):
            return web.json_response({"error": "no"}, status=answers)
        return web.json_response({"choices": [{"message": answers, "finish_reason": "stop"}]})

    async def main() -> Message:
        app = web.Application()
        app.router.add_post("/v1/chat/completions/derender", derender)
        limits = {"waits": Waits("test"), "max_model_len": 99, "timeout_s": 5, "max_concurrent": 4}
        async with TestServer(app) as server, open_inference_pool([str(server.make_url("/"))[:-1]], **limits) as pool:
            pool.go_live(pool.engines[0], 0)
            ids = tokenizer.encode(text) + ([END] if stop is None else [])
            turn = Turn(ids, [-1.0] * len(ids), [0] * len(ids), "stop", stop_reason=stop)
            reader = TurnReader(model or InferenceModel(), tokenizer, pool)
            return await reader.read([7, 8], turn, tools, number=3, **how)

    return asyncio.run(main()), asked


READS_CALLS = InferenceModel(tool_call_parser="hermes")
READS_THINKING = InferenceModel(reasoning_parser="qwen3")
READS_BOTH = InferenceModel(reasoning_parser="qwen3", tool_call_parser="hermes")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = ToolCall(id="call00300", name="add", arguments='{"a": 1}')
CALLED = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
SURROGATE = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'  # JSON can write half of one, and no wire


@pytest.mark.parametrize(
    ("text", "how", "said"),
    [
        (f"<think>hm</think>So {CALL}", {}, assistant_message(f"<think>hm</think>So {CALL}")),
        (f"<think>hm</think>So {CALL}", {"tools": TOOLS}, assistant_message("<think>hm</think>So", None, (ADD,))),
        (SURROGATE, {"tools": TOOLS}, assistant_message(SURROGATE)),
        ("hi", {"model": READS_CALLS}, assistant_message("hi")),
        ("hi", {"model": READS_CALLS, "tools": TOOLS, "answers": {"content": "ho"}}, assistant_message("ho")),
        (
            "hi",
            {"model": READS_THINKING, "tools": TOOLS, "answers": {"content": f"So {CALL}", "reasoning": "hm"}},
            assistant_message("So", "hm", (ADD,)),
        ),
        (
            "hi",
            {"model": READS_BOTH, "tools": TOOLS, "answers": {"content": None, "tool_calls": CALLED}},
            assistant_message("", None, (ADD,)),
        ),
        # it is not asked again: the answer would be the same
        ("<tool_call>{", {"model": READS_BOTH, "tools": TOOLS, "answers": 400}, assistant_message("<tool_call>{")),
        ("yes</a>", {"stop": "</a>"}, assistant_message("yes")),
        ("yes</a>", {"stop": "</a>", "keeps_stop": True}, assistant_message("yes</a>")),
        (
            "hi",
            {"stop": "</a>", "model": READS_BOTH, "answers": {"content": None, "reasoning": "so</a>"}},
            assistant_message("", "so"),
        ),
    ],
)
def test_turn_is_read_by_engine_parsers_or_stays_text(tokenizer, text, how, said):
    found, asked = read(tokenizer, text, **how)
    assert (found, len(asked)) == (said, int("answers" in how))
    for body in asked:  # without the token that ended the turn
        (choice,) = body["generate_response"]["choices"]
        assert (choice["token_ids"], body["generate_response"]["prompt_token_ids"]) == (tokenizer.encode(text), [7, 8])
        assert body["chat_request"].get("tools") == how.get("tools")


def test_half_a_surrogate_pair_is_no_text(tokenizer):
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")


def test_a_message_is_the_turn_only_if_nothing_in_it_was_changed():
    calls = [{"id": "other", "function": {"name": "add", "arguments": '{"a":1}'}}]
    same = {"role": "assistant", "content": "So", "tool_calls": calls}
    said = assistant_message("So", "hm", (ADD,))
    assert is_same(said, same | {"reasoning_content": "hm"})
    assert is_same(said, same | {"reasoning": "hm"})
    for changed in ({"reasoning": ""}, {"content": "so"}, {"role": "user"}, {"tool_calls": []}):
        assert not is_same(said, same | {"reasoning": "hm"} | changed)
