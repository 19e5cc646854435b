"""A rollout between a worker and an engine: what was said, how it ended, what is kept of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from fake_engine import Asked
from tiny_tokenizer import CHATML, END, QWEN_3, write_tokenizer
from trireme.base.waiting import Waits
from trireme.config.inference import InferenceModel
from trireme.orchestrator.chat import ChatTokenizer
from trireme.orchestrator.environments.wire import ToolCall
from trireme.orchestrator.inference_pool import Generation, InferencePool, open_inference_pool
from trireme.orchestrator.turns import Said, TurnReader
from whole_run import Outcome, build_config, run

TALK = """
    def dataset(size=40):
        return [{"prompt": f"say {i}"} for i in range(size)]

    def respond(completion, messages, example):
        return f"and {len(messages)}?" if len(messages) < 7 else None

    def reward(messages):
        turns = [message for message in messages if message["role"] == "assistant"]
        reward = len(messages[-1]["content"]) % 5 / 5
        return {"reward": reward, "turn_rewards": [place / 8 for place in range(len(turns))]}
"""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


# in a whole run


def turns_of(outcome: Outcome) -> dict[tuple[int, ...], Asked]:
    """What the engine was asked, by prompt."""
    return {tuple(asked.ids): asked for asked in outcome.engine.requests}


@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
def test_of_several_turns_in_real_workers_exactly_what_was_sampled_is_trained_on(tmp_path, strategy):
    outcome = run(build_config(tmp_path, TALK, max_steps=2, orchestrator={"trajectory_strategy": strategy}))
    assert outcome.error is None
    prompts = turns_of(outcome)
    rollouts = [rollout for record in outcome.records for rollout in record.rollouts]
    assert len(rollouts) == 16
    for rollout in rollouts:
        turns = 0
        for sample in rollout.samples:
            edges = np.flatnonzero(np.diff(sample.loss_mask.astype(int), prepend=0, append=0))
            for begin in edges[::2]:
                assert tuple(sample.ids[:begin].tolist()) in prompts
                turns += 1
        assert rollout.num_turns == turns
        assert len(rollout.samples) == (1 if strategy == "interleaved" else turns)
        rewards = np.concatenate(rollout.token_rewards)
        assert rewards[~np.isnan(rewards)].tolist() == [place / 8 for place in range(turns)]
        assert {len(column) for column in rollout.token_rewards} == {sample.length for sample in rollout.samples}
    assert max(rollout.num_turns for rollout in rollouts) == 4


def test_a_conversation_that_outgrows_the_context_ends_and_is_trained_on(tmp_path):
    outcome = run(build_config(tmp_path, TALK, max_steps=1, seq_len=64))
    assert outcome.error is None
    (record,) = outcome.records
    assert not record.dropped
    ends = {(rollout.truncated, rollout.stop) for rollout in record.rollouts}
    assert ends <= {(True, "prompt_too_long"), (True, "context_full")}
    assert all(sample.length <= 64 for rollout in record.rollouts for sample in rollout.samples)


@pytest.mark.parametrize(("max_tokens", "end"), [(3, (True, "max_tokens")), (8, (False, "stop"))])
def test_how_a_rollout_ended_is_known(tmp_path, max_tokens, end):
    sampling = {"max_tokens": max_tokens}
    outcome = run(
        build_config(tmp_path, max_steps=1, orchestrator={"sampling": sampling}),
        engine={"answer": lambda asked: [20, 21, 22, 23, asked.end]},
    )
    (record,) = outcome.records
    assert {(rollout.truncated, rollout.stop) for rollout in record.rollouts} == {end}


def test_a_prompt_that_is_too_long_from_the_start_says_so(tmp_path):
    long = "def dataset():\n    return [{'prompt': 'x' * 300}]\n\ndef reward(completion):\n    return 1.0\n"
    outcome = run(build_config(tmp_path, long, max_steps=1))
    assert outcome.error is not None
    assert "the model takes 256" in str(outcome.error)


def test_a_template_that_drops_thinking_ends_the_run_with_advice_that_works(tmp_path):
    def answer(tokenizer: ChatTokenizer) -> Any:
        thinking = tokenizer.encode("<think>\nm\n</think>\n\nyes")
        return lambda asked: [*thinking, asked.end]

    def attempt(**orchestrator: Any) -> Outcome:
        config = build_config(tmp_path, TALK, max_steps=1, orchestrator={"sampling": {"max_tokens": 40}} | orchestrator)
        write_tokenizer(tmp_path / "model", QWEN_3)
        return run(config, engine={"answer": answer(ChatTokenizer(tmp_path / "model"))})

    refused = attempt()
    assert refused.error is not None
    assert refused.error.exit_code == 2  # not tried again
    assert 'Set `trajectory_strategy = "branching"`' in str(refused.error)
    trained = attempt(trajectory_strategy="branching")
    assert trained.error is None
    assert {len(rollout.samples) for record in trained.records for rollout in record.rollouts} == {4}


def test_a_template_that_drops_thinking_is_no_matter_in_a_single_turn(tmp_path):
    config = build_config(tmp_path, max_steps=1)
    write_tokenizer(tmp_path / "model", QWEN_3)
    assert run(config).error is None


def test_what_a_cut_sampler_chose_from_reaches_the_journal(tmp_path):
    def with_candidates(response: dict) -> dict:
        for choice in response["choices"]:
            for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
                entry |= {"token_id": token, "logprob": float(np.log(0.75))}
                other = {"token_id": token + 1, "logprob": float(np.log(0.25))}
                out = {"token_id": 3, "logprob": -9999.0}
                entry["top_logprobs"] = [{"token_id": token, "logprob": entry["logprob"]}, other, out]
        return response

    config = build_config(tmp_path, max_steps=1, orchestrator={"sampling": {"max_tokens": 8, "top_p": 0.9}})
    outcome = run(config, engine={"mangle": with_candidates})
    assert outcome.error is None
    assert {asked.sampling["logprobs"] for asked in outcome.engine.requests} == {88}
    for rollout in outcome.records[0].rollouts:
        (sample,) = rollout.samples
        sampled = sample.ids[sample.loss_mask == 1]
        assert sample.kept.counts.tolist() == (sample.loss_mask * 2).tolist()
        assert sample.kept.ids.reshape(-1, 2).tolist() == [[token, token + 1] for token in sampled]


def test_a_token_beyond_the_models_vocabulary_is_not_believed(tmp_path):
    config = build_config(tmp_path, max_steps=1)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 200}))
    beyond = {"calls": 0}

    def mangle(response: dict) -> dict:
        beyond["calls"] += 1
        if beyond["calls"] % 5 == 0:
            response["choices"][0]["token_ids"][0] = 200
        return response

    outcome = run(config, engine={"mangle": mangle})
    (record,) = outcome.records
    assert all((sample.ids < 200).all() for rollout in record.rollouts for sample in rollout.samples)
    assert any("The engine gave token 200 - ids from 0 to 199" in drop.reason for drop in record.dropped)


# what is read out of one turn


@pytest.fixture
def tokenizer(tmp_path):
    return ChatTokenizer(write_tokenizer(tmp_path / "model", CHATML))


def read(
    tokenizer: ChatTokenizer,
    text: str,
    *,
    model: InferenceModel | None = None,
    tools: list | None = None,
    answers: Any = None,
    ended: bool = True,
    stop: str | None = None,
    keeps_stop: bool = False,
) -> tuple[Said, list[dict]]:
    """What is said in a turn, and what the engine was asked for it; `answers` is its answer, a status or a message."""
    asked: list[dict] = []

    async def derender(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if isinstance(answers, int):
            return web.json_response({"error": "no"}, status=answers)
        return web.json_response({"choices": [{"message": answers, "finish_reason": "stop"}]})

    async def main() -> Said:
        app = web.Application()
        app.router.add_post("/v1/chat/completions/derender", derender)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        opened = open_inference_pool([url], waits=Waits("test"), max_model_len=99, timeout_s=5, max_concurrent=4)
        async with opened as pool:
            pool.go_live(pool.engines[0], 0)
            said = await _read(pool)
        await runner.cleanup()
        return said

    async def _read(pool: InferencePool) -> Said:
        ids = tokenizer.encode(text) + ([END] if ended and stop is None else [])
        turn = Generation(ids, [-1.0] * len(ids), [0] * len(ids), "stop" if ended else "length", stop_reason=stop)
        reader = TurnReader(model or InferenceModel(), tokenizer, pool)
        return await reader.read([7, 8], turn, tools, number=3, keeps_stop=keeps_stop)

    return asyncio.run(main()), asked


PARSERS = InferenceModel(reasoning_parser="qwen3", tool_call_parser="hermes")


def test_without_parsers_the_text_is_the_content_and_hermes_calls_are_read(tokenizer):
    text = '<think>hm</think>So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert read(tokenizer, text) == (Said(text), [])
    call = ToolCall(id="call00300", name="add", arguments='{"a": 1}')
    assert read(tokenizer, text, tools=TOOLS) == (Said("<think>hm</think>So", None, (call,)), [])


def test_with_parsers_the_engine_reads_the_tokens_without_the_one_that_ended_them(tokenizer):
    function = {"name": "add", "arguments": '{"a": 1}'}
    message = {
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }
    said, (asked,) = read(tokenizer, "anything", model=PARSERS, tools=TOOLS, answers=message)
    assert said == Said("", "hm", (ToolCall(id="call00300", name="add", arguments='{"a": 1}'),))
    (choice,) = asked["generate_response"]["choices"]
    assert choice["token_ids"] == tokenizer.encode("anything")
    assert asked["generate_response"]["prompt_token_ids"] == [7, 8]
    assert asked["chat_request"]["tools"] == TOOLS


def test_a_tool_parser_alone_is_asked_only_where_there_are_tools(tokenizer):
    model = InferenceModel(tool_call_parser="hermes")
    assert read(tokenizer, "hi", model=model) == (Said("hi"), [])
    _, asked = read(tokenizer, "hi", model=model, tools=TOOLS, answers={"content": "hi"})
    assert len(asked) == 1


def test_with_a_parser_of_thinking_alone_calls_are_still_read_from_the_content(tokenizer):
    message = {"content": 'So <tool_call>{"name": "now"}</tool_call>', "reasoning": "hm"}
    said, _ = read(tokenizer, "x", model=InferenceModel(reasoning_parser="qwen3"), tools=TOOLS, answers=message)
    assert (said.content, said.reasoning, [call.name for call in said.tool_calls]) == ("So", "hm", ["now"])


@pytest.mark.parametrize("status", [400, 500])
def test_a_turn_that_the_parser_cannot_read_stays_text(tokenizer, status):
    said, asked = read(tokenizer, "<tool_call>{", model=PARSERS, tools=TOOLS, answers=status)
    assert said == Said("<tool_call>{")
    assert len(asked) == 1  # it is not asked again: the answer would be the same


def test_a_stop_string_is_no_part_of_what_was_said(tokenizer):
    assert read(tokenizer, "yes</a>", stop="</a>")[0] == Said("yes")
    assert read(tokenizer, "yes</a>", stop="</a>", keeps_stop=True)[0] == Said("yes</a>")
    parsed = {"content": None, "reasoning": "so</a>"}
    assert read(tokenizer, "so</a>", stop="</a>", model=PARSERS, answers=parsed)[0] == Said("", "so")


def test_half_a_surrogate_pair_in_a_tool_call_stays_text(tokenizer):
    """JSON can write it, and no wire can carry it."""
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert read(tokenizer, text, tools=TOOLS)[0] == Said(text)
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")


@pytest.mark.parametrize(
    ("message", "same"),
    [
        ({"content": "So", "reasoning_content": "hm"}, True),
        ({"content": "So", "reasoning": "hm"}, True),
        ({"content": "So"}, False),
        ({"content": "so", "reasoning_content": "hm"}, False),
        ({"content": "So", "reasoning_content": "hm", "role": "user"}, False),
    ],
)
def test_a_message_is_the_turn_only_if_nothing_in_it_was_changed(message, same):
    call = ToolCall(id="call00100", name="add", arguments='{"a":1}')
    given = {"id": "other", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = Said("So", "hm", (call,))
    assert said.is_in({"role": "assistant", "tool_calls": [given]} | message) is same
    assert not said.is_in({"role": "assistant"} | message)
