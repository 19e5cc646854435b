"""The tokens of a rollout are the engine's own, from the first turn to the last."""

from __future__ import annotations

import numpy as np
import pytest

from tiny_tokenizer import CHATML, END, LLAMA_3, QWEN_3, write_tokenizer
from trireme.orchestrator.chat import ChatTokenizer
from trireme.orchestrator.continuation import Rewritten
from trireme.orchestrator.environments.wire import ToolCall
from trireme.orchestrator.inference_pool import Generation
from trireme.orchestrator.tool_calls import split_tool_calls
from trireme.orchestrator.trajectory import Trajectory
from trireme.orchestrator.turns import Said

ASK = {"role": "user", "content": "2 + 2?"}
MORE = {"role": "user", "content": "sure?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture
def tokenizer(tmp_path):
    return ChatTokenizer(write_tokenizer(tmp_path, CHATML, extra_words=("hello", "hel")))


def turn(ids: list[int], *, version: int = 0) -> Generation:
    return Generation(ids, [-0.5 - place for place in range(len(ids))], [version] * len(ids), "stop")


def says(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def answer(trajectory: Trajectory, tokenizer: ChatTokenizer, messages, ids, *, version: int = 0) -> list[int]:
    """One turn as the rollout runner takes it; returns the prompt."""
    question = trajectory.ask(messages, None)
    trajectory.record(question, turn(ids, version=version), Said(tokenizer.decode(ids)))
    return question.ids


def test_two_turns_are_one_sample_of_the_engines_own_ids(tokenizer):
    trajectory = Trajectory(tokenizer, "interleaved")
    first = [*tokenizer.encode("4"), END]
    second = [*tokenizer.encode("yes"), END]
    prompt = answer(trajectory, tokenizer, [ASK], first, version=3)
    longer = answer(trajectory, tokenizer, [ASK, says("4"), MORE], second, version=4)
    glue = tokenizer.encode("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt == tokenizer.encode("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert longer == prompt + first + glue
    (sample,) = trajectory.samples()
    assert sample.ids.tolist() == prompt + first + glue + second
    assert sample.loss_mask.tolist() == [0] * len(prompt) + [1] * 2 + [0] * len(glue) + [1] * 4
    assert sample.versions.tolist() == [-1] * len(prompt) + [3] * 2 + [-1] * len(glue) + [4] * 4
    assert sample.logprobs.tolist() == [0] * len(prompt) + [-0.5, -1.5] + [0] * len(glue) + [-0.5, -1.5, -2.5, -3.5]


def test_a_turn_that_was_cut_by_length_gets_its_end_of_turn_token_from_the_template(tokenizer):
    trajectory = Trajectory(tokenizer, "interleaved")
    cut = tokenizer.encode("4 becau")
    prompt = answer(trajectory, tokenizer, [ASK], cut)
    longer = answer(trajectory, tokenizer, [ASK, says("4 becau"), MORE], [END])
    glue = tokenizer.encode("<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")
    assert longer == prompt + cut + glue
    assert longer.count(END) == 3
    assert len(trajectory.samples()) == 1


def test_ids_that_the_text_would_be_tokenised_differently_from_are_kept(tokenizer):
    """The engine may spell "hello" in pieces; encoding the text again would give one token."""
    trajectory = Trajectory(tokenizer, "interleaved")
    pieces = [*tokenizer.encode("hel"), *tokenizer.encode("l"), *tokenizer.encode("o"), END]
    assert tokenizer.encode(tokenizer.decode(pieces)) != pieces[:-1]
    prompt = answer(trajectory, tokenizer, [ASK], pieces)
    longer = answer(trajectory, tokenizer, [ASK, says("hello"), MORE], [END])
    assert longer[: len(prompt) + 4] == prompt + pieces


def test_an_environment_that_changes_what_was_said_begins_a_second_sample(tokenizer):
    trajectory = Trajectory(tokenizer, "interleaved")
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode("four"), END])
    messages = [ASK, says("five"), MORE]
    prompt = answer(trajectory, tokenizer, messages, [END])
    assert prompt == tokenizer.encode(tokenizer.render(messages, tools=None, generate=True))
    assert [int(sample.loss_mask.sum()) for sample in trajectory.samples()] == [5, 1]


def test_with_branching_each_turn_is_a_sample_of_its_own(tokenizer):
    trajectory = Trajectory(tokenizer, "branching")
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode("4"), END])
    prompt = answer(trajectory, tokenizer, [ASK, says("4"), MORE], [END])
    one, two = trajectory.samples()
    assert two.ids.tolist() == [*prompt, END]
    assert one.length < two.length


THINKING = "<think>\nhm\n</think>\n\n4"


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, QWEN_3))
    trajectory = Trajectory(tokenizer, "interleaved")
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode(THINKING), END])
    with pytest.raises(Rewritten, match="hm"):
        trajectory.ask([ASK, says(THINKING), MORE], None)


def test_with_branching_a_template_may_rewrite_earlier_turns(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, QWEN_3))
    trajectory = Trajectory(tokenizer, "branching")
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode(THINKING), END])
    prompt = answer(trajectory, tokenizer, [ASK, says(THINKING), MORE], [*tokenizer.encode("yes"), END])
    assert "think" not in tokenizer.decode(prompt)
    assert [int(sample.loss_mask.sum()) for sample in trajectory.samples()] == [len(THINKING) + 1, 4]


def test_what_nobody_trains_on_goes_on_in_a_second_sample(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, QWEN_3))
    trajectory = Trajectory(tokenizer, "interleaved_or_new")
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode(THINKING), END])
    conversation = [ASK, says(THINKING), MORE]
    prompt = answer(trajectory, tokenizer, conversation, [*tokenizer.encode("yes"), END])
    assert "think" not in tokenizer.decode(prompt)
    tool = {"role": "tool", "content": "4"}
    longer = answer(trajectory, tokenizer, [*conversation, says("yes"), tool], [END])
    assert longer[: len(prompt)] == prompt
    assert [int(sample.loss_mask.sum()) for sample in trajectory.samples()] == [len(THINKING) + 1, 5]


def test_a_template_that_keeps_thinking_between_tool_calls_goes_on_in_the_same_sample(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, QWEN_3))
    trajectory = Trajectory(tokenizer, "interleaved")
    first = [*tokenizer.encode(THINKING), END]
    prompt = answer(trajectory, tokenizer, [ASK], first)
    longer = answer(trajectory, tokenizer, [ASK, says(THINKING), {"role": "tool", "content": "4"}], [END])
    assert longer[: len(prompt) + len(first)] == prompt + first
    assert len(trajectory.samples()) == 1


def test_a_template_that_trims_does_not_change_what_was_sampled(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, LLAMA_3))
    trajectory = Trajectory(tokenizer, "interleaved")
    sampled = tokenizer.encode("4  <|eot|>")
    prompt = answer(trajectory, tokenizer, [ASK], sampled)
    longer = answer(trajectory, tokenizer, [ASK, says("4  "), MORE], tokenizer.encode("yes<|eot|>"))
    glue = "<|header|>user<|header|>\n\nsure?<|eot|><|header|>assistant<|header|>\n\n"
    assert longer == prompt + sampled + tokenizer.encode(glue)
    assert len(trajectory.samples()) == 1


def test_a_turn_that_is_cut_where_a_template_trims_gets_the_templates_end_of_turn(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, LLAMA_3))
    trajectory = Trajectory(tokenizer, "interleaved")
    sampled = tokenizer.encode("4  ")
    prompt = answer(trajectory, tokenizer, [ASK], sampled)
    longer = answer(trajectory, tokenizer, [ASK, says("4  "), MORE], [END])
    glue = "<|eot|><|header|>user<|header|>\n\nsure?<|eot|><|header|>assistant<|header|>\n\n"
    assert longer == prompt + sampled + tokenizer.encode(glue)


def test_tool_calls_stay_as_the_model_wrote_them_however_the_template_would(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, QWEN_3))
    trajectory = Trajectory(tokenizer, "interleaved")
    written = 'So:<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>  <tool_call>{"name":"now"}</tool_call>'
    sampled = [*tokenizer.encode(written), END]
    question = trajectory.ask([ASK], TOOLS)
    content, calls = split_tool_calls(written, 1)
    trajectory.record(question, turn(sampled), Said(content, None, tuple(calls)))
    nested = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    said = {"role": "assistant", "content": content, "tool_calls": nested}
    results = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "noon"}]
    longer = trajectory.ask([ASK, said, *results], TOOLS).ids
    blocks = "".join(
        f"<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n" for text in ("3", "noon")
    )
    assert longer == question.ids + sampled + tokenizer.encode(f"\n{blocks}<|im_start|>assistant\n")


def test_a_conversation_with_other_tools_begins_a_sample_that_shows_them(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, QWEN_3))
    trajectory = Trajectory(tokenizer, "interleaved")
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode("4"), END])
    question = trajectory.ask([ASK, says("4"), MORE], TOOLS)
    assert question.sample is None
    assert "add" in tokenizer.decode(question.ids)


def test_thinking_that_was_read_apart_is_kept_in_the_sample(tmp_path):
    """The engine's parser took it out of the content; the template puts it back in its own way."""
    thinking = CHATML.replace("message['content']", "(message.reasoning_content or '') + message['content']")
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, thinking))
    trajectory = Trajectory(tokenizer, "interleaved")
    sampled = [*tokenizer.encode("<think>hm</think>\n4"), END]
    question = trajectory.ask([ASK], None)
    trajectory.record(question, turn(sampled), Said("\n4", "hm"))
    kept = {"role": "assistant", "content": "\n4", "reasoning_content": "hm"}
    longer = trajectory.ask([ASK, kept, MORE], None)
    assert longer.ids[: len(question.ids) + len(sampled)] == question.ids + sampled
    assert trajectory.ask([ASK, says("\n4"), MORE], None).sample is None  # the environment has dropped it itself


def test_a_template_that_knows_nothing_of_thinking_is_refused(tokenizer):
    trajectory = Trajectory(tokenizer, "interleaved")
    question = trajectory.ask([ASK], None)
    trajectory.record(question, turn([*tokenizer.encode("<think>hm</think>\n4"), END]), Said("\n4", "hm"))
    with pytest.raises(Rewritten, match="'hm' is no longer there"):
        trajectory.ask([ASK, {"role": "assistant", "content": "\n4", "reasoning_content": "hm"}, MORE], None)


def test_what_a_cut_sampler_chose_from_stays_with_its_tokens(tokenizer):
    trajectory = Trajectory(tokenizer, "interleaved")
    question = trajectory.ask([ASK], None)
    cut = Generation([10, END], [-0.1, -0.2], [0, 0], "stop", kept=[[9, 10, 11], [END]])
    trajectory.record(question, cut, Said(tokenizer.decode([10])))
    answer(trajectory, tokenizer, [ASK, says(tokenizer.decode([10])), MORE], [12])
    (sample,) = trajectory.samples()
    assert sample.kept.counts.tolist() == [0] * len(question.ids) + [3, 1] + [0] * (
        sample.length - len(question.ids) - 2
    )
    assert sample.kept.ids.tolist() == [9, 10, 11, END]


def test_rewards_of_turns_lie_on_the_tokens_of_those_turns(tokenizer):
    trajectory = Trajectory(tokenizer, "branching")
    first = answer(trajectory, tokenizer, [ASK], [10, 11, END])
    trajectory.ask([ASK, says("x" * 900)], None)  # refused: it has no tokens
    second = answer(trajectory, tokenizer, [ASK, says("no"), MORE], [12, END])
    one, two = trajectory.token_rewards([[0.5], [], [0.25, -1.0]])
    assert np.isnan(one[:-1]).all()
    assert one[-1] == 0.5
    assert len(one) == len(first) + 3
    assert two[len(second) :].tolist() == [0.25, -1.0]
    assert np.isnan(two[: len(second)]).all()
    assert trajectory.token_rewards([[], []]) == []
    assert trajectory.num_turns == 2


def test_rewards_of_turns_in_one_sample_lie_where_each_turn_ends(tokenizer):
    trajectory = Trajectory(tokenizer, "interleaved")
    first = [*tokenizer.encode("4"), END]
    prompt = answer(trajectory, tokenizer, [ASK], first)
    longer = answer(trajectory, tokenizer, [ASK, says("4"), MORE], [END])
    (column,) = trajectory.token_rewards([[1.0], [2.0]])
    assert {place: column[place] for place in np.flatnonzero(~np.isnan(column))} == {
        len(prompt) + len(first) - 1: 1.0,
        len(longer): 2.0,
    }


@pytest.mark.parametrize("rewards", [[[1.0, 2.0]], [[], [1.0]]])
def test_rewards_for_tokens_that_there_are_not_are_refused(tokenizer, rewards):
    trajectory = Trajectory(tokenizer, "interleaved")
    answer(trajectory, tokenizer, [ASK], [10, 11, END])
    with pytest.raises(ValueError, match="expected one reward for the whole turn, or one per token"):
        trajectory.token_rewards(rewards)


def test_turns_that_are_asked_for_at_once_do_not_mix(tokenizer):
    trajectory = Trajectory(tokenizer, "interleaved")
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode("4"), END])
    tails = [{"role": "user", "content": text} for text in ("left?", "right?", "else?")]
    questions = [trajectory.ask([ASK, says("4"), tail], None) for tail in tails[:2]]
    questions.append(trajectory.ask([tails[2]], None))
    for question, word in reversed(list(zip(questions, ("one", "two", "three"), strict=True))):
        trajectory.record(question, turn([*tokenizer.encode(word), END]), Said(word))
    begin = "user\n2 + 2?\nassistant\n4\nuser\n"
    texts = {
        tokenizer.decode(sample.ids.tolist()): tokenizer.decode(sample.ids[sample.loss_mask == 1].tolist())
        for sample in trajectory.samples()
    }
    assert texts == {
        begin + "left?\nassistant\none": "one",
        begin + "right?\nassistant\ntwo": "4two",
        "user\nelse?\nassistant\nthree": "three",
    }


def test_a_turn_that_got_no_answer_leaves_no_trace(tokenizer):
    """An overlong prompt must not make the sample longer than the model's context."""
    trajectory = Trajectory(tokenizer, "interleaved")
    prompt = answer(trajectory, tokenizer, [ASK], [*tokenizer.encode("4"), END])
    trajectory.ask([ASK, says("4"), {"role": "user", "content": "x" * 500}], None)
    (sample,) = trajectory.samples()
    assert sample.length == len(prompt) + 2


def test_a_rollout_without_a_sampled_token_has_no_sample(tokenizer):
    trajectory = Trajectory(tokenizer, "interleaved")
    trajectory.ask([ASK], None)
    assert trajectory.samples() == []
    answer(trajectory, tokenizer, [ASK], [])
    assert trajectory.samples() == []


def test_tool_calls_leave_the_text_and_keep_their_order():
    text = (
        'Let me.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call>'
    )
    assert split_tool_calls(text, 2) == (
        "Let me.",
        [
            ToolCall(id="call00200", name="add", arguments='{"a": 1}'),
            ToolCall(id="call00201", name="now", arguments="{}"),
        ],
    )


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{name: add}</tool_call>",
        "<tool_call>[1, 2]</tool_call>",
        "<tool_call>7</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add"',
    ],
)
def test_a_tool_call_that_is_none_stays_text(text):
    assert split_tool_calls(text, 1) == (text, [])


def test_arguments_that_are_text_already_stay_as_the_model_wrote_them():
    _, calls = split_tool_calls('<tool_call>{"name": "run", "arguments": "{\\"a\\": 1"}</tool_call>', 1)
    assert calls[0].arguments == '{"a": 1'


def test_text_without_tool_calls_keeps_its_blanks():
    assert split_tool_calls("  two lines\n", 1) == ("  two lines\n", [])
