"""A rollout between a worker and an engine: what was said, how it ended, and that exactly what was sampled is kept."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tiny_pictures import picture_file
from tiny_tokenizer import CHATML, END, LLAMA_3, QWEN_3, SPECIAL, write_seeing_model, write_tokenizer
from trireme.algo.pictures import PictureRules
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.inference import InferenceModel
from trireme.config.orchestrator import Environment, Sampling
from trireme.config.run import RunConfig
from trireme.journal.message_text import PREFIX
from trireme.journal.model_turn import Message, ToolCall, Turn, assistant_message, is_same
from trireme.journal.pictures import PictureFiles, pictures_folder, rules_of_model
from trireme.journal.records import Rollout
from trireme.messages import Picture, Tokens
from trireme.orchestrator.engines.pool import PromptTooLong, open_inference_pool
from trireme.orchestrator.engines.responses import Called, CalledFunction, ParsedMessage
from trireme.orchestrator.environments.wire import Ask, Done, Reply
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.runner import RolloutRunner, RolloutSpec
from trireme.orchestrator.rollout.turn_reader import TurnReader, split_tool_calls
from whole_run import WholeRun, build_config, run

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def spans_of(mask: np.ndarray) -> list[list[int]]:
    return np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()


# in a whole run

LOOK = """
    def part(number):
        return {"type": "image_url", "image_url": {"url": f"{number}.png"}}

    def dataset(size=40):
        content = [[part(number % 8), {"type": "text", "text": "what?"}] for number in range(size)]
        return [{"prompt": [{"role": "user", "content": each}]} for each in content]

    def respond(messages, example):
        return [{"role": "user", "content": [part(8)]}] if len(messages) < 3 else None

    def reward(completion):
        return {"reward": len(str(completion)) % 10 / 10, "turn_rewards": [0.25, 0.5]}
"""


def seeing_run(folder: Path) -> tuple[RunConfig, PictureRules]:
    """A run whose environment shows files of its own folder, a second one after the model's first turn."""
    model = write_seeing_model(folder / "seeing")
    for shade in range(9):
        (folder / f"{shade}.png").write_bytes(picture_file(16, 8, shade))
    config = build_config(folder, LOOK, model={"name": str(model), "vlm": {}}, trainer={"model": {"vlm": {}}})
    return config, rules_of_model(str(model))


def prompt_of(sample: Tokens, pictures: list[Picture]) -> tuple[Any, ...]:
    end = int(np.flatnonzero(sample.loss_mask[pictures[-1].place :])[0]) + pictures[-1].place
    return (*sample.ids[:end].tolist(), *(each.digest for each in pictures))


def test_pictures_reach_engine_journal_and_trainer_despite_a_crash(tmp_path):
    config, rules = seeing_run(tmp_path)

    async def kill(whole: WholeRun) -> None:
        await whole.until(lambda: whole.trainer.version == 1, "a batch")
        await whole.kill_orchestrator()
        whole.config = whole.config.model_copy(update={"resume": True})
        whole.start_orchestrator()

    outcome = run(config, engine={"rules": rules}, meanwhile=kill)
    assert outcome.error is None
    asked = {(*request.ids, *(each.digest for each in request.pictures)) for request in outcome.engine.requests}
    files = PictureFiles(pictures_folder(outcome.config.paths.journal))
    for record, batch in zip(outcome.records, outcome.trainer.batches, strict=True):
        samples = [sample for rollout in record.rollouts for sample in rollout.samples]
        for sample in samples:
            first, second = sample.pictures
            assert prompt_of(sample, [first]) in asked
            assert prompt_of(sample, [first, second]) in asked
        shown = {each.digest for sample in samples for each in sample.pictures}
        assert {digest: files.read(digest) for digest in shown} == batch.pictures
        assert sum(len(row.tokens.pictures) for row in batch.micro_batches) == 2 * len(samples)
        for rollout in record.rollouts:
            text, (rewards,) = str(rollout.prompt + rollout.completion), rollout.token_rewards
            assert text.count(PREFIX) == 2
            assert "data:" not in text
            assert rewards[~np.isnan(rewards)].tolist() == [0.25, 0.5]


def test_picture_token_mismatch_is_an_error_with_both_counts(tmp_path):
    config, rules = seeing_run(tmp_path)
    other = PictureRules(rules.token, rules.block // 2, rules.min_pixels, rules.max_pixels)
    outcome = run(config, engine={"rules": other})
    assert "The engine made 34 tokens of a prompt with pictures, and the orchestrator 28" in str(outcome.error)


def test_journal_keeps_the_tokens_that_a_cut_sampler_chose_from(tmp_path):
    def with_candidates(response: dict) -> dict:
        (choice,) = response["choices"]
        if int(response["request_id"]) % 5 == 0:
            choice["token_ids"][0] = 200
        for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            logprobs = {token: float(np.log(0.75)), token + 1: float(np.log(0.25)), 9: -9999.0}
            entry |= {"token_id": token, "logprob": logprobs[token]}
            entry["top_logprobs"] = [{"token_id": one, "logprob": logprob} for one, logprob in logprobs.items()]
        return response

    config = build_config(tmp_path, max_steps=1, orchestrator={"sampling": {"max_tokens": 3, "top_p": 0.9}})
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 200}))
    answers = {"answer": lambda asked: [20] * (1 + 4 * (asked.number % 2)) + [asked.end]}
    outcome = run(config, engine=answers | {"mangle": with_candidates})
    assert outcome.error is None
    dropped = [drop.reason for drop in outcome.records[0].dropped]
    assert any("The engine gave token 200 - ids from 0 to 199" in reason for reason in dropped)
    assert {asked.sampling["logprobs"] for asked in outcome.engine.requests} == {88}
    ends = {(rollout.truncated, rollout.stop) for rollout in outcome.records[0].rollouts}
    assert ends == {(True, "max_tokens"), (False, "stop")}
    for rollout in outcome.records[0].rollouts:
        (sample,) = rollout.samples
        sampled = sample.ids[sample.loss_mask == 1]
        assert sample.kept.counts.tolist() == (sample.loss_mask * 2).tolist()
        assert sample.kept.ids.reshape(-1, 2).tolist() == [[token, token + 1] for token in sampled]


# what is read out of one turn


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tokenizer(tmp_path_factory.mktemp("model"), CHATML))


def read(
    tokenizer: ChatTokenizer,
    text: str,
    *,
    model: InferenceModel,
    tools: list | None,
    answers: Any,
    stop: Any,
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
            return await TurnReader(model, tokenizer, pool).read([7, 8], turn, tools, number=3, **how)

    return asyncio.run(main()), asked


READS_CALLS = InferenceModel(tool_call_parser="hermes")
READS_THINKING = InferenceModel(reasoning_parser="qwen3")
READS_BOTH = InferenceModel(reasoning_parser="qwen3", tool_call_parser="hermes")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = ToolCall(id="call00300", name="add", arguments='{"a": 1}')
CALLED = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
SURROGATE = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'  # JSON can write half of one, and no wire
PLAIN = {"model": InferenceModel(), "tools": None, "answers": None, "stop": None}


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
    found, asked = read(tokenizer, text, **PLAIN | how)
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


# many random rollouts of several turns

NUM_ROLLOUTS = 400
SPEC = RolloutSpec("train", 0, 0, name="0-0")
BEYOND = 7  # ids that the model may sample and that the tokenizer does not know

# As LLAMA_3 and QWEN_3 are, but with all thinking kept; tool calls as hermes writes them.
KEEPS_THINKING = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama-3": LLAMA_3, "qwen-3": QWEN_3, "keeps thinking": KEEPS_THINKING}


def write_byte_tokenizer(folder: Path, template: str) -> Path:
    """Byte-level BPE: one letter may be several tokens, one token several letters, and tokens may be half a letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("e", "r"), ("Ġ", "a"), ("1", "2"), ("Ã", "¤"), ("<", "/")]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    write_tokenizer(folder, template)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class RandomPolicy:
    """Samples anything: text, tool calls, thinking, half a letter, no end of turn. Remembers what it gave."""

    tokenizer: ChatTokenizer
    rng: random.Random
    thinks: bool
    calls: bool
    given: list[tuple[list[int], Turn]] = field(default_factory=list)
    vocab_size: int = 0

    async def generate(self, ids: list[int], sampling: dict[str, Any], *, routes_from: int | None = None) -> Turn:
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)  # answers to questions that are open at once come in any order
        if self.given and self.rng.random() < 0.04:
            raise PromptTooLong("The prompt has 99 tokens, the model takes 64.")
        sampled = self._sample()
        is_cut = self.rng.random() < 0.25
        if is_cut:
            sampled = sampled[: self.rng.randrange(1, len(sampled) + 1)]
        else:
            sampled = [*sampled, self.tokenizer.encode("<|eot|>" if self.rng.random() < 0.2 else "<|im_end|>")[0]]
        first = len(self.given) * 1000
        turn = Turn(
            ids=sampled, logprobs=[-(first + place) / 1e6 for place in range(len(sampled))],
            versions=sorted(self.rng.randrange(9) for _ in sampled), finish_reason="length" if is_cut else "stop",
            cut="max_tokens" if is_cut else None,
        )  # fmt: skip
        self.given.append((ids, turn))
        return turn

    def _sample(self) -> list[int]:
        rng = self.rng
        text = rng.choice(["", "4", "the hello  ", "ä12\n", "“quoted” there", "\n\n so", "half </tool_call>"])
        if self.thinks and rng.random() < 0.7:
            text = rng.choice(["<think>\nhm ä\n</think>\n\n", "<think>hm</think>", "<think>\n\n</think>\n\n"]) + text
        if self.calls and rng.random() < 0.5:
            text += "".join(self._call() for _ in range(rng.randrange(1, 4)))
        ids = self.tokenizer.encode(text)
        if rng.random() < 0.6:  # what no text would be tokenised to
            noise = [rng.randrange(self.tokenizer.num_tokens + BEYOND) for _ in range(rng.randrange(1, 6))]
            at = rng.randrange(len(ids) + 1)
            ids = ids[:at] + [token for token in noise if not self.tokenizer.is_special(token)] + ids[at:]
        return ids or self.tokenizer.encode("4")

    def _call(self) -> str:
        arguments = self.rng.choice([{}, {"a": 1, "b": [2.5, None]}, {"text": 'ä\n"x"'}])
        separators = self.rng.choice([None, (",", ":")])
        call = json.dumps({"name": "add", "arguments": arguments}, separators=separators)
        blank = self.rng.choice(["", "\n"])
        return self.rng.choice([f"<tool_call>{blank}{call}{blank}</tool_call>", f"<tool_call>{call[1:]}</tool_call>\n"])

    async def parse(self, body: dict[str, Any]) -> Message:
        """As an engine with a parser of thinking and hermes calls does."""
        (choice,) = body["generate_response"]["choices"]
        text = self.tokenizer.decode(choice["token_ids"])
        begin, _, rest = text.partition("<think>")
        thinking, end, content = rest.partition("</think>")
        reasoning, content = (thinking, begin + content) if end else (None, text)
        content, calls = split_tool_calls(content, 0) if "tools" in body["chat_request"] else (content, [])
        called = [Called(CalledFunction(call.name, call.arguments)) for call in calls]
        return ParsedMessage(content or None, reasoning, called)


@dataclass
class RandomConversation:
    """An environment that goes on for a few turns, in its own way. `is_plain` while it has only added to what was."""

    rng: random.Random
    tools: list[dict] | None
    is_plain: bool = True
    num_refused: int = 0
    num_asked: int = 0
    given_up: dict[str, float] = field(default_factory=dict)  # calls, with their first logprobs

    config = Environment(id="random")
    uses_gateway = False
    name = "random"

    async def run(self, task: Any, ask: Any, *, on_retry: Any, **_: Any) -> Done:
        rng = self.rng
        messages: list[dict] = [{"role": "user", "content": rng.choice(["2 + 2?", "ä?", "the  question "])}]
        if rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        for _ in range(rng.randrange(1, 6)):
            reply = await self._ask(ask, messages)
            if reply is None:
                break
            said = assistant_message(reply.content, reply.reasoning, reply.tool_calls or ())
            if rng.random() < 0.05:
                said = {"role": "assistant", "content": "something else"}
                self.is_plain = False
            calls = said.get("tool_calls", [])
            answers = [{"role": "tool", "content": f"{place} ä", "tool_call_id": "c"} for place, _ in enumerate(calls)]
            more = {"role": "user", "content": rng.choice(["sure?", "ok  ", "“why”\n"])}
            messages = [*messages, said, *(answers or [more])]
        return Done(task="t", reward=1.0, given_up=list(self.given_up))

    async def _ask(self, ask: Any, messages: list[dict]) -> Reply | None:
        if self.rng.random() >= 0.05:
            return await self._one(ask, messages)
        self.is_plain = False  # somebody else is asked too, beside it or with a conversation of their own
        other = self.rng.choice([messages, [*messages[:1], {"role": "user", "content": "aside"}]])
        reply, aside = await asyncio.gather(self._one(ask, messages), self._one(ask, other))
        if reply and aside and other is not messages and self.rng.random() < 0.5:
            self.given_up[aside.call] = aside.logprobs[0]
        return self.rng.choice([reply, aside or reply]) if other is messages else reply

    async def _one(self, ask: Any, messages: list[dict]) -> Reply | None:
        self.num_asked += 1
        question = Ask(task="t", call=str(self.num_asked), messages=messages, tools=self.tools, sampling={})
        reply = await ask(question)
        reply.call = question.call
        if reply.error is None:
            return reply
        assert reply.error_kind == "overlong_prompt", reply
        self.num_refused += 1
        return None


def check(conversation: RandomConversation, policy: RandomPolicy, finished: Rollout, *, strategy: str) -> None:
    """Each turn that was sampled, and not given up, is masked in once, whole, after exactly what the engine got."""
    given = {turn.logprobs[0]: (prompt, turn) for prompt, turn in policy.given}  # all different
    for first in conversation.given_up.values():
        del given[first]
    seen = []
    for sample in finished.samples:
        begins = []
        for begin, end in spans_of(sample.loss_mask):
            place = min(given, key=lambda first: abs(first - float(sample.logprobs[begin])))
            prompt, turn = given[place]
            assert sample.ids[:begin].tolist() == prompt
            assert sample.ids[begin:end].tolist() == turn.ids
            assert sample.logprobs[begin:end].tolist() == np.float32(turn.logprobs).tolist()
            assert sample.versions[begin:end].tolist() == turn.versions
            begins.append(-place)
        assert begins == sorted(begins)
        seen += begins
        not_sampled = sample.loss_mask == 0
        assert (sample.versions[not_sampled] == -1).all()
        assert (sample.logprobs[not_sampled] == 0).all()
        assert sample.loss_mask[-1] == 1
    assert sorted(seen) == sorted(-place for place in given)
    assert finished.num_turns == len(given)
    if strategy == "branching":
        assert len(finished.samples) == len(given)
    elif conversation.is_plain:
        assert len(finished.samples) == 1 + finished.rewritten
    if conversation.is_plain:
        ended = "prompt_too_long" if conversation.num_refused else policy.given[-1][1].cut
        assert (finished.truncated, finished.stop) == (ended is not None, ended)


def test_retried_rollout_never_gives_two_tool_calls_one_id(tmp_path, tokenizer):
    sampled, ids = tokenizer.encode(f"{CALL}<|im_end|>"), []

    async def generate(*_: Any, **__: Any) -> Turn:
        return Turn(sampled, [-0.1] * len(sampled), [0] * len(sampled), "stop")

    async def play(task: Any, ask: Any, *, on_retry: Any, **_: Any) -> Done:
        async def said(number: int, *messages: dict) -> dict:
            reply = await ask(Ask(task="t", call=f"{number}", messages=list(messages), tools=TOOLS, sampling={}))
            return assistant_message("", None, reply.tool_calls)

        title, question = {"role": "user", "content": "a title"}, {"role": "user", "content": "2 + 2?"}
        await said(1, title)
        first = await said(2, question)
        on_retry()
        assert await said(1, question) == first
        second = await said(2, question, first, {"role": "tool", "content": "4", "tool_call_id": "c"})
        ids.extend(call["id"] for said in (first, second) for call in said["tool_calls"])
        return Done(task="t", reward=1.0)

    config = Environment(id="x", agent={"command": ["x"]})
    environment: Any = SimpleNamespace(config=config, uses_gateway=True, name="x", run=play)
    policy: Any = SimpleNamespace(generate=generate, vocab_size=0)
    runner = RolloutRunner(RunConfig(), policy, tokenizer, journal=tmp_path, waits=Waits("test"))
    asyncio.run(runner.run(environment, SPEC, sampling=Sampling()))
    assert ids == ["call00200", "call00300"]


def talk_twice(folder: Path, answers: list[str], template: str = QWEN_3) -> list[Rollout]:
    """Roll out one conversation of two turns per answer, each of another example. The second turns are empty."""
    tokenizer = ChatTokenizer(write_tokenizer(folder, template))

    async def play(task: Any, ask: Any, **_: Any) -> Done:
        question = [{"role": "user", "content": "2 + 2?"}]
        reply = await ask(Ask(task="t", call="1", messages=question, sampling={}))
        more = [*question, assistant_message(reply.content, None, ()), {"role": "user", "content": "sure?"}]
        await ask(Ask(task="t", call="2", messages=more, sampling={}))
        return Done(task="t", reward=1.0)

    async def generate(*_: Any, **__: Any) -> Turn:
        ids = tokenizer.encode(f"{texts.pop(0)}<|im_end|>")
        return Turn(ids, [-0.1] * len(ids), [0] * len(ids), "stop")

    texts = [text for answer in answers for text in (answer, "")]
    environment: Any = SimpleNamespace(config=Environment(id="x"), uses_gateway=False, name="x", run=play)
    policy: Any = SimpleNamespace(generate=generate, vocab_size=0)
    runner = RolloutRunner(RunConfig(), policy, tokenizer, waits=Waits("test"))
    specs = [RolloutSpec("train", number, 0, name=f"{number}") for number in range(len(answers))]
    return [asyncio.run(runner.run(environment, spec, sampling=Sampling())) for spec in specs]


THOUGHT = "<think>\nhm\n</think>\n\n4"


def test_conversation_rewritten_by_its_template_becomes_two_samples(tmp_path, caplog):
    found = talk_twice(tmp_path, [THOUGHT, "4", *[THOUGHT] * 9])
    assert [(len(each.samples), each.rewritten) for each in found] == [(2, 1), (1, 0), *[(2, 1)] * 9]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "hm" in warning


@pytest.mark.parametrize(
    ("template", "answers"),
    [(QWEN_3, [THOUGHT] * 9), (CHATML.replace("content']", "content'][:2]"), ["four"])],
    ids=["those that think", "all"],
)
def test_a_template_that_rewrites_every_conversation_ends_the_run(tmp_path, template, answers):
    with pytest.raises(ConfigError, match='Set `trajectory_strategy = "branching"`'):
        talk_twice(tmp_path, answers, template)


QUIET = CHATML.replace("assistant\n' }}", "assistant\n' ~ quiet }}")


@pytest.mark.parametrize(
    ("asked", "shown"),
    [({}, "table"), ({"chat_template_kwargs": {"quiet": "turn", "other": 1}}, "turn"), ({"temperature": 0.5}, "table")],
)
def test_a_prompt_is_rendered_with_the_most_specific_template_variables(tmp_path, caplog, asked, shown):
    tokenizer, prompts = ChatTokenizer(write_tokenizer(tmp_path, QUIET)), []

    async def play(task: Any, ask: Any, **_: Any) -> Done:
        await ask(Ask(task="t", call="1", messages=[{"role": "user", "content": "a"}], sampling=asked))
        return Done(task="t", reward=1.0)

    async def generate(ids: list[int], *_: Any, **__: Any) -> Turn:
        prompts.append(tokenizer.decode(ids))
        return Turn([END], [-0.1], [0], "stop")

    environment: Any = SimpleNamespace(
        config=Environment(id="x", chat_template_kwargs={"quiet": "table"}), uses_gateway=False, name="x", run=play
    )
    policy: Any = SimpleNamespace(generate=generate, vocab_size=0)
    runner = RolloutRunner(RunConfig(), policy, tokenizer, waits=Waits("test"))
    for _ in range(2):
        asyncio.run(runner.run(environment, SPEC, sampling=Sampling(chat_template_kwargs={"quiet": "run"})))
    assert prompts == [f"user\na\nassistant\n{shown}"] * 2
    named = [record.getMessage() for record in caplog.records if "asks for" in record.getMessage()]
    assert len(named) == (shown == "turn" or bool(asked))  # once


@cache
def config_of(strategy: str, parsed: bool) -> RunConfig:
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"} if parsed else {}
    sections = {"inference": {"model": parsers}, "orchestrator": {"trajectory_strategy": strategy}}
    return RunConfig.model_validate(sections)


def test_random_rollouts_train_on_exactly_the_sampled_tokens(tmp_path):
    folders = {name: write_byte_tokenizer(tmp_path / name, template) for name, template in TEMPLATES.items()}
    tokenizers = {name: ChatTokenizer(folder) for name, folder in folders.items()}
    num_rewritten: Counter[tuple[str, str]] = Counter()  # by strategy and template
    rng, loop = random.Random(0), asyncio.new_event_loop()  # `asyncio.run` formats what it returns, which takes long
    for _ in range(NUM_ROLLOUTS):
        name = rng.choice(sorted(tokenizers))
        strategy = rng.choice(["interleaved", "branching"])
        parsed, tools = rng.random() < 0.5, rng.random() < 0.5 and name != "llama-3"
        policy = RandomPolicy(tokenizers[name], rng, thinks=parsed or rng.random() < 0.3, calls=tools)
        conversation = RandomConversation(rng, TOOLS if tools else None)
        runner = RolloutRunner(config_of(strategy, parsed), policy, tokenizers[name], waits=Waits("test"))  # type: ignore
        finished = loop.run_until_complete(runner.run(conversation, SPEC, sampling=Sampling()))  # type: ignore[arg-type]
        check(conversation, policy, finished, strategy=strategy)
        num_rewritten[strategy, name] += finished.rewritten > 0
    loop.close()
    assert {key for key, count in num_rewritten.items() if count} <= {
        ("interleaved", name) for name in ("chatml", "llama-3", "qwen-3")
    }
    assert num_rewritten["interleaved", "qwen-3"] > 10
