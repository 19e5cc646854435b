"""The model's side of a rollout: what was said, how it ended, and that exactly what was sampled is kept."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from support.models.tiny_tokenizer import CHATML, END, LLAMA_3, QWEN_3, SPECIAL, write_tokenizer
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment
from trireme.config.run import RunConfig
from trireme.config.sampling import Sampling
from trireme.journal.model_turn import Message, Turn, assistant_message
from trireme.journal.records import Rollout
from trireme.messages import Tokens
from trireme.orchestrator.engines.pool import PromptTooLong
from trireme.orchestrator.engines.responses import Called, CalledFunction, ParsedMessage
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.runner import RolloutRunner, RolloutSpec
from trireme.orchestrator.rollout.turn_reader import split_tool_calls
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import Ask, Done, Reply

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tokenizer(tmp_path_factory.mktemp("model"), CHATML))


def spans_of(mask: np.ndarray) -> list[list[int]]:
    return np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()


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

    async def run(self, session: Session) -> Done:
        rng = self.rng
        messages: list[dict] = [{"role": "user", "content": rng.choice(["2 + 2?", "ä?", "the  question "])}]
        if rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        for _ in range(rng.randrange(1, 6)):
            reply = await self._ask(session.answer, messages)
            if reply is None:
                break
            said = assistant_message(reply.content, reply.reasoning, reply.tool_calls or ())
            if rng.random() < 0.05:
                said = {"role": "assistant", "content": "something else"}
                self.is_plain = False
            calls = said.get("tool_calls", [])
            answers = [{"role": "tool", "content": f"{place} ä", "tool_call_id": "c"} for place, _ in enumerate(calls)]
            more = {"role": "user", "content": rng.choice(["sure?", "er  ", "“why”\n"])}
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
        if strategy == "interleaved":
            check_echo(sample, policy.tokenizer, is_plain=conversation.is_plain)
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


ECHO = {"user": 0.25, "tool": 0.5}


def check_echo(sample: Tokens, tokenizer: ChatTokenizer, *, is_plain: bool) -> None:
    """What was said since the first turn has its role's weight, without what the template writes around it."""
    weights = np.zeros(sample.length, np.float32) if sample.ce_weights is None else sample.ce_weights
    said = [
        (tokenizer.decode(sample.ids[begin:end].tolist()), *sorted(set(weights[begin:end].tolist())))
        for begin, end in spans_of((weights > 0).astype(np.uint8))
    ]
    assert {text.strip() for text, _ in said} <= {"sure?", "er", "“why”", "0 ä", "1 ä", "2 ä"}
    assert all(weight == ECHO["tool" if text[0].isdigit() else "user"] for text, weight in said)
    turns = spans_of(sample.loss_mask)
    assert not (is_plain and weights[: turns[0][1]].any())
    assert all(weights[end:begin].any() for (_, end), (begin, _) in pairwise(turns))
    assert not weights[sample.loss_mask == 1].any()


def roll_out(play: Any, generate: Any, tokenizer: ChatTokenizer, count: int = 1, **how: Any) -> list[Rollout]:
    """Roll out so many examples, which `play` plays as an environment and `generate` answers as an engine."""
    environment: Any = SimpleNamespace(config=how.pop("config", Environment(id="x")), name="x", run=play)
    environment.uses_gateway = environment.config.agent is not None
    policy: Any = SimpleNamespace(generate=generate, vocab_size=0)
    runner = RolloutRunner(RunConfig(), policy, tokenizer, journal=how.pop("journal", None), waits=Waits("test"))
    specs = [RolloutSpec("train", number, 0, name=f"{number}") for number in range(count)]
    return [asyncio.run(runner.run(environment, spec, sampling=Sampling(**how))) for spec in specs]


def test_retried_rollout_never_gives_two_tool_calls_one_id(tmp_path, tokenizer):
    sampled, ids = tokenizer.encode(f"{CALL}<|im_end|>"), []

    async def generate(*_: Any, **__: Any) -> Turn:
        return Turn(sampled, [-0.1] * len(sampled), [0] * len(sampled), "stop")

    async def play(session: Session) -> Done:
        async def said(number: int, *messages: dict) -> dict:
            question = Ask(task="t", call=f"{number}", messages=list(messages), tools=TOOLS, sampling={})
            reply = await session.answer(question)
            return assistant_message("", None, reply.tool_calls)

        title, question = {"role": "user", "content": "a title"}, {"role": "user", "content": "2 + 2?"}
        await said(1, title)
        first = await said(2, question)
        session.restart()
        assert await said(1, question) == first
        second = await said(2, question, first, {"role": "tool", "content": "4", "tool_call_id": "c"})
        ids.extend(call["id"] for said in (first, second) for call in said["tool_calls"])
        return Done(task="t", reward=1.0)

    config = Environment(id="x", agent={"command": ["x"]})
    roll_out(play, generate, tokenizer, config=config, journal=tmp_path)
    assert ids == ["call00200", "call00300"]


def talk_twice(folder: Path, answers: list[str], template: str = QWEN_3) -> list[Rollout]:
    """Roll out one conversation of two turns per answer, each of another example. The second turns are empty."""
    tokenizer = ChatTokenizer(write_tokenizer(folder, template))

    async def play(session: Session) -> Done:
        question = [{"role": "user", "content": "2 + 2?"}]
        reply = await session.answer(Ask(task="t", call="1", messages=question, sampling={}))
        more = [*question, assistant_message(reply.content, None, ()), {"role": "user", "content": "sure?"}]
        await session.answer(Ask(task="t", call="2", messages=more, sampling={}))
        return Done(task="t", reward=1.0)

    async def generate(*_: Any, **__: Any) -> Turn:
        ids = tokenizer.encode(f"{texts.pop(0)}<|im_end|>")
        return Turn(ids, [-0.1] * len(ids), [0] * len(ids), "stop")

    texts = [text for answer in answers for text in (answer, "")]
    return roll_out(play, generate, tokenizer, len(answers))


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

    async def play(session: Session) -> Done:
        await session.answer(Ask(task="t", call="1", messages=[{"role": "user", "content": "a"}], sampling=asked))
        return Done(task="t", reward=1.0)

    async def generate(ids: list[int], *_: Any, **__: Any) -> Turn:
        prompts.append(tokenizer.decode(ids))
        return Turn([END], [-0.1], [0], "stop")

    config = Environment(id="x", chat_template_kwargs={"quiet": "table"})
    roll_out(play, generate, tokenizer, 2, config=config, chat_template_kwargs={"quiet": "run"})
    assert prompts == [f"user\na\nassistant\n{shown}"] * 2
    named = [record.getMessage() for record in caplog.records if "asks for" in record.getMessage()]
    assert len(named) == (shown == "turn" or bool(asked))  # once


@cache
def config_of(strategy: str, parsed: bool) -> RunConfig:
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"} if parsed else {}
    sections = {"inference": {"model": parsers}, "orchestrator": {"trajectory_strategy": strategy, "echo": ECHO}}
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
