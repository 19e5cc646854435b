"""The tokens of a rollout are the engine's own, from the first turn to the last; and tool calls in them."""

import gc
import json
import re
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.models.tiny_tokenizer import CHATML, END, LLAMA_3, QWEN_3, write_tokenizer
from trireme.journal.message_text import for_template
from trireme.journal.model_turn import ToolCall, Turn, assistant_message
from trireme.journal.turns import prompt_digest
from trireme.orchestrator.engines.pool import PromptTooLong
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.continuation import rewrites_always
from trireme.orchestrator.rollout.trajectory import Trajectory
from trireme.orchestrator.rollout.turn_reader import split_tool_calls

ASK = {"role": "user", "content": "2 + 2?"}
MORE = {"role": "user", "content": "sure?"}
TOOL = {"role": "tool", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
THINKING = "<think>\nhm\n</think>\n\n4"
SURE = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
LLAMA_SURE = "<|header|>user<|header|>\n\nsure?<|eot|><|header|>assistant<|header|>\n\n"
TOLD = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


class Talk(Trajectory):
    def __init__(self, folder, mode="interleaved", template=CHATML) -> None:
        self.tokenizer = ChatTokenizer(write_tokenizer(folder, template, extra_words=("hello", "hel")))
        super().__init__(self.tokenizer, mode)

    def answer(self, messages, sampled: str | list[int]) -> list[int]:
        question = self.ask(messages, None)
        ids = self.tokenizer.encode(sampled) if isinstance(sampled, str) else sampled
        self.record(question, turn(ids, self.tokenizer.decode(ids)))
        return question.ids


def turn(ids: list[int], *said: object) -> Turn:
    logprobs = [-0.5 - place for place in range(len(ids))]
    return Turn(ids, logprobs, [0] * len(ids), "stop", message=assistant_message(*said))


def says(content: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": content} | more


def trained(talk: Talk) -> list[int]:
    return [int(sample.loss_mask.sum()) for sample in talk.samples()]


def test_a_released_trajectory_leaves_nothing_to_the_garbage_collector(tmp_path):
    talk = Talk(tmp_path)
    tokenizer = talk.tokenizer  # has cycles of its own
    talk.answer([ASK], "4")
    talk.answer([ASK, says("4"), MORE], "sure")
    gc.collect()
    talk.release()
    del talk
    assert gc.collect() == 0
    assert tokenizer.encode("4")


def test_prompt_far_too_long_for_the_context_is_refused(tmp_path):
    (talk := Talk(tmp_path)).max_model_len = 100
    far, little = ({"role": "user", "content": "a" * size} for size in (2000, 1000))
    with pytest.raises(PromptTooLong):
        talk.ask([far], None)
    talk.answer([ASK], "4<|im_end|>")
    for messages in ([far], [ASK, says("4"), far]):
        with pytest.raises(PromptTooLong):
            talk.prompt_ids(messages, None, "")
    assert len(talk.prompt_ids([ASK, says("4"), little], None, "")) > 1000
    assert talk.ask([ASK], None).number == 2


@pytest.mark.parametrize(
    ("template", "sampled", "said", "following", "glue"),
    [
        # cut by length: the template gives the end of the turn
        (CHATML, ["4 becau"], "4 becau", MORE, f"<|im_end|>{SURE}"),
        (LLAMA_3, ["4  "], "4  ", MORE, f"<|eot|>{LLAMA_SURE}"),
        (LLAMA_3, ["4  <|eot|>"], "4  ", MORE, LLAMA_SURE),  # the template would trim
        (CHATML, ["hel", "l", "o", "<|im_end|>"], "hello", MORE, SURE),  # the text would be encoded as one token
        (QWEN_3, [f"{THINKING}<|im_end|>"], THINKING, TOOL, TOLD),  # thinking is kept between tool calls
    ],
)
def test_a_later_turn_goes_on_from_the_ids_that_were_sampled(tmp_path, template, sampled, said, following, glue):
    talk = Talk(tmp_path, template=template)
    ids = [token for piece in sampled for token in talk.tokenizer.encode(piece)]
    prompt = talk.answer([ASK], ids)
    assert talk.answer([ASK, says(said), following], [END]) == prompt + ids + talk.tokenizer.encode(glue)
    assert len(talk.samples()) == 1


def test_each_token_has_the_oldest_version_that_its_turn_attended_to(tmp_path):
    talk = Talk(tmp_path)
    messages, asked = [ASK], []
    for oldest in (3, 2, None):
        prompt = talk.ask(messages, None)
        asked.append(prompt.since)
        ids = talk.tokenizer.encode("4<|im_end|>")
        talk.record(prompt, msgspec.structs.replace(turn(ids, "4"), versions=[4] * len(ids), oldest=oldest))
        messages = [*messages, says("4"), MORE]
    assert asked == [None, 3, 2]
    (sample,) = talk.samples()
    assert sample.oldest[sample.loss_mask > 0].tolist() == [3, 3, 2, 2, 4, 4]
    assert set(sample.oldest[sample.loss_mask == 0]) == {-1}

    # the last turn was never delivered
    talk.take_back(2)
    (sample,) = talk.samples()
    assert sample.oldest[sample.loss_mask > 0].tolist() == [3, 3, 2, 2]


CALL = ToolCall(id="call00100", name="add", arguments='{"a":  2}')
CALLED = {"id": CALL.id, "type": "function", "function": {"name": "add", "arguments": CALL.arguments}}


@pytest.mark.parametrize(
    ("said", "returned"),
    [
        ((" 4\n",), says("4")),  # the program strips whitespace
        (("4", "hm"), says("4")),  # it drops reasoning
        (("", None, (CALL,)), says("", tool_calls=[CALLED | {"function": {"name": "add"}}])),
        (("", None, (CALL,)), says("", tool_calls=[CALLED | {"id": "its own"}])),
    ],
)
@pytest.mark.parametrize("template", [CHATML, QWEN_3])
def test_a_turn_that_an_agent_program_changed_keeps_its_tokens(tmp_path, said, returned, template):
    talk = Talk(tmp_path, "tolerant", template)
    sampled = talk.tokenizer.encode("<think>\nhm\n</think>\n\n4<|im_end|>")
    first = talk.ask([ASK], TOOLS)
    talk.record(first, turn(sampled, *said))
    for num_later, after in ((1, SURE), (2, f"{SURE}yes<|im_end|>{SURE}")):  # it is known the second time, too
        messages = [ASK, returned, MORE, says("yes"), MORE][: 2 * num_later + 1]
        question = talk.ask(messages, TOOLS)
        assert question.ids == first.ids + sampled + talk.tokenizer.encode(after)
        talk.record(question, turn(talk.tokenizer.encode("yes<|im_end|>"), "yes"))
    assert trained(talk) == [len(sampled) + 2 * len(talk.tokenizer.encode("yes<|im_end|>"))]


def test_branching_conversation_begins_a_sample_with_shared_tokens(tmp_path):
    talk = Talk(tmp_path, "tolerant")
    first = talk.answer([ASK], "4<|im_end|>")
    longer = talk.answer([ASK, says("4"), MORE], "yes<|im_end|>")
    other = {"role": "user", "content": "why?"}
    prompt = talk.answer([ASK, says("4"), other], "hm<|im_end|>")  # as after a retry, or for a side question
    shared = first + talk.tokenizer.encode("4<|im_end|>")
    assert prompt[: len(shared)] == shared
    assert sorted(talk.prompts()[True]) == sorted(map(prompt_digest, (first, longer, prompt)))
    main, branch = talk.samples()
    assert trained(talk) == [6, 3]  # the first turn is trained once
    assert branch.ids[: len(shared)].tolist() == main.ids[: len(shared)].tolist() == shared
    talk.answer([ASK, says("4"), other, says("hm"), MORE], "no<|im_end|>")
    assert trained(talk) == [6, 6]


@pytest.mark.parametrize(
    ("messages", "tools", "why", "parent", "place"),
    [
        ([says("hi")], None, "new conversation", -1, 0),
        ([ASK, says("4"), MORE], TOOLS, "other tools", 0, 3),
        ([ASK], None, "same request again", 0, 1),
        ([ASK, says("4"), TOOL], None, "earlier turn continued", 0, 2),
        ([ASK, says("4"), TOOL, says("yes"), MORE], None, "history edited", 0, 2),
        ([ASK, says("5"), MORE], None, "turn edited", 0, 1),
        ([ASK, says("4", tool_calls=[CALLED]), MORE], None, "turn edited", 0, 1),
        ([ASK, {"role": "user", "content": "4"}, MORE], None, "turn dropped", 0, 1),
    ],
)
def test_a_branch_says_why_a_request_does_not_continue_what_was_before(tmp_path, messages, tools, why, parent, place):
    talk = Talk(tmp_path, "tolerant")
    talk.answer([ASK], "4<|im_end|>")
    talk.answer([ASK, says("4"), MORE], "yes<|im_end|>")
    talk.record(talk.ask(messages, tools), turn([END], "so"))
    talk.answer([ASK, says("4"), MORE, says("yes"), MORE], "no<|im_end|>")
    talk.keep("main", only_with_tools=False)
    main, branch = talk.branches()
    assert (main.why, main.num_turns, main.sample, main.messages) == ("first request", 3, 0, [])
    assert (branch.why, branch.parent, branch.place, branch.sample) == (why, parent, place, -1)
    assert branch.messages == [*messages[place:], says("so")]


@pytest.mark.parametrize(
    ("template", "mode", "sampled", "said", "sizes"),
    [
        (CHATML, "interleaved", "four", "five", [5, 1]),  # the environment changed what was said
        (CHATML, "branching", "4", "4", [2, 1]),
        (QWEN_3, "branching", THINKING, THINKING, [len(THINKING) + 1, 1]),  # the template drops earlier thinking
        (QWEN_3, "interleaved", THINKING, THINKING, [len(THINKING) + 1, 1]),
    ],
)
def test_a_turn_that_does_not_go_on_from_the_last_begins_a_sample(tmp_path, template, mode, sampled, said, sizes):
    talk = Talk(tmp_path, mode, template)
    talk.answer([ASK], f"{sampled}<|im_end|>")
    messages = [ASK, says(said), MORE]
    prompt = talk.answer(messages, [END])
    assert prompt == talk.tokenizer.encode(talk.tokenizer.render(messages, tools=None, generate=True))
    assert "think" not in talk.tokenizer.decode(prompt)
    assert talk.samples()[1].ids.tolist() == [*prompt, END]
    assert trained(talk) == sizes
    if mode == "interleaved" and template is QWEN_3:
        assert talk.num_rewritten == 1
        assert talk.answer([*messages, says(""), TOOL], [END])[: len(prompt)] == prompt
        assert trained(talk) == [sizes[0], 2]


def test_thinking_that_the_template_does_not_know_is_named_as_gone(tmp_path):
    talk = Talk(tmp_path)
    question = talk.ask([ASK], None)
    talk.record(question, turn(talk.tokenizer.encode("<think>hm</think>\n4<|im_end|>"), "\n4", "hm"))
    assert "'hm' is no longer there" in talk.ask([ASK, says("\n4", reasoning_content="hm"), MORE], None).rewritten


NO_THOUGHTS = CHATML.replace("assistant\n' }}", "assistant\n' ~ ('no thoughts' if quiet is true else '') }}")


@pytest.mark.parametrize(
    ("template", "kwargs", "expected"),
    [
        (CHATML, {}, False),
        (QWEN_3, {}, False),  # thinking alone
        (NO_THOUGHTS, {}, False),
        (NO_THOUGHTS, {"quiet": True}, True),
        (CHATML.replace("message['content']", "message['content'][:2]"), {}, True),
    ],
)
def test_a_template_that_rewrites_plain_turns_rewrites_always(tmp_path, template, kwargs, expected):
    assert rewrites_always(ChatTokenizer(write_tokenizer(tmp_path, template)), kwargs) is expected


def test_other_template_variables_begin_a_new_sample(tmp_path):
    talk = Talk(tmp_path, template=NO_THOUGHTS)
    plain = talk.answer([ASK], "4<|im_end|>")
    quiet = talk.ask([ASK, says("4"), MORE], None, template_kwargs={"quiet": True})
    assert quiet.turn is None
    assert talk.tokenizer.decode(quiet.ids, keep_special=True).endswith("assistant\nno thoughts")
    assert talk.prompt_ids([ASK, says("4"), MORE], None, "", {"quiet": True}) == quiet.ids
    assert talk.ask([ASK, says("4"), MORE], None).ids[: len(plain)] == plain


def test_turn_without_an_answer_leaves_no_sample(tmp_path):
    talk = Talk(tmp_path, template=QWEN_3)
    talk.answer([ASK], [])
    assert talk.samples() == []
    talk.answer([ASK], "4<|im_end|>")
    question = talk.ask([ASK, says("4"), MORE], TOOLS)
    assert question.turn is None
    assert "add" in talk.tokenizer.decode(question.ids)


def test_the_likeliest_tokens_lie_on_the_tokens_of_their_turns(tmp_path):
    talk, conversation = Talk(tmp_path), [ASK]
    for tops in ([{3: -0.5, 1: -1.0}, {2: -0.25}], None, [{7: -0.125}]):
        question = talk.ask(conversation, None)
        ids = talk.tokenizer.encode("4" if tops is None or len(tops) == 1 else "4<|im_end|>")
        said = turn(ids, "4")
        said.top_logprobs = tops
        talk.record(question, said)
        conversation = [*conversation, says("4"), MORE]

    (sample,) = talk.samples()
    assert sample.top_logprobs is not None
    sampled = np.flatnonzero(sample.loss_mask)
    expected = dict(zip(sampled.tolist(), [2, 1, 0, 1], strict=True))
    assert sample.top_logprobs.counts.tolist() == [expected.get(place, 0) for place in range(sample.length)]
    assert sample.top_logprobs.ids.tolist() == [3, 1, 2, 7]
    assert sample.top_logprobs.logprobs.tolist() == [-0.5, -1.0, -0.25, -0.125]
    talk.take_back(2)
    assert talk.samples()[0].top_logprobs.ids.tolist() == [3, 1, 2]


def test_turn_rewards_lie_on_the_tokens_of_their_turns(tmp_path):
    talk = Talk(tmp_path / "branching", "branching")
    first = talk.answer([ASK], [10, 11, END])
    talk.ask([ASK, says("x" * 900)], None)  # refused: it has no tokens
    second = talk.answer([ASK, says("no"), MORE], [12, END])
    one, two = talk.token_rewards([[0.5], [], [0.25, -1.0]])
    np.testing.assert_array_equal(one, [np.nan] * (len(first) + 2) + [0.5])
    np.testing.assert_array_equal(two, [np.nan] * len(second) + [0.25, -1.0])
    assert talk.token_rewards([[], []]) == []
    assert talk.num_turns == 2
    for rewards in ([[1.0, 2.0]], [[], [1.0]]):  # for tokens that there are not
        with pytest.raises(ValueError, match="expected one reward for the whole turn, or one per token"):
            talk.token_rewards(rewards)
    talk = Talk(tmp_path / "interleaved")
    prompt = talk.answer([ASK], "4<|im_end|>")
    longer = talk.answer([ASK, says("4"), MORE], [END])
    (column,) = talk.token_rewards([[1.0], [2.0]])
    assert {place: column[place] for place in np.flatnonzero(~np.isnan(column))} == {len(prompt) + 1: 1, len(longer): 2}


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NO_CALLS = [f"<tool_call>{what}</tool_call>" for what in ("{name: add}", "[1, 2]", "7", '{"arguments": {}}')]
PIECES = ["<tool_call>", "</tool_call>", '{"name": "f"}', " ", "\n", "so", CALL, *NO_CALLS]
PATTERN = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def by_pattern(text: str) -> tuple[str, list[str]]:
    """The same by a regular expression, which is shorter and backtracks."""
    names = []

    def take(match: re.Match[str]) -> str:
        with suppress(ValueError, TypeError, KeyError):
            names.append(json.loads(match.group(1))["name"])
            return ""
        return match.group(0)

    return PATTERN.sub(take, text).strip() if "<tool_call>" in text else text, names


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_calls_and_text_are_those_of_the_pattern(text):
    said, calls = split_tool_calls(text, 1)
    assert (said, [call.name for call in calls]) == by_pattern(text)


def test_tool_calls_keep_their_order_and_arguments():
    written = '<tool_call>{"name": "run", "arguments": "{\\"a\\": 1"}</tool_call>'
    found = split_tool_calls(f'Let me.\n{CALL}\n<tool_call>\n{{"name": "now"}}\n</tool_call>{written}', 2)
    calls = [("call00200", "add", '{"a": 1}'), ("call00201", "now", "{}"), ("call00202", "run", '{"a": 1')]
    assert found == ("Let me.", [ToolCall(id=id, name=name, arguments=arguments) for id, name, arguments in calls])


def test_a_tag_that_nothing_closes_is_text():
    """It takes hours, where it backtracks."""
    for text in ("<tool_call>" + "\n" * 100_000, "<tool_call>" * 20_000, CALL * 5 + "<tool_call>" + " " * 99_999):
        said, calls = split_tool_calls(text, 1)
        assert said.startswith("<tool_call>")
        assert len(calls) == text.count("</tool_call>")


def test_too_deep_tool_arguments_reach_the_template_as_written():
    deep = "[" * 5000
    said, (call,) = split_tool_calls(f'hm <tool_call>{{"name": "f", "arguments": "{deep}"}}</tool_call>', 1)
    message = for_template(assistant_message(said, None, (call,)))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": deep}
