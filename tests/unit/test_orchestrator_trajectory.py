"""The tokens of a rollout are the engine's own, from the first turn to the last."""

from __future__ import annotations

import pytest

from tiny_tokenizer import CHATML, END, LLAMA_3, QWEN_3, write_tokenizer
from trireme.orchestrator.chat import ChatTokenizer
from trireme.orchestrator.environments.wire import ToolCall
from trireme.orchestrator.inference_pool import Generation
from trireme.orchestrator.tool_calls import split_tool_calls
from trireme.orchestrator.trajectory import Trajectory

ASK = {"role": "user", "content": "2 + 2?"}
MORE = {"role": "user", "content": "sure?"}


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
    trajectory.record(question, turn(ids, version=version), tokenizer.decode(ids))
    return question.ids


def test_two_turns_are_one_sample_of_the_engines_own_ids(tokenizer):
    trajectory = Trajectory(tokenizer, branching=False)
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
    trajectory = Trajectory(tokenizer, branching=False)
    cut = tokenizer.encode("4 becau")
    prompt = answer(trajectory, tokenizer, [ASK], cut)
    longer = answer(trajectory, tokenizer, [ASK, says("4 becau"), MORE], [END])
    glue = tokenizer.encode("<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")
    assert longer == prompt + cut + glue
    assert longer.count(END) == 3
    assert len(trajectory.samples()) == 1


def test_ids_that_the_text_would_be_tokenised_differently_from_are_kept(tokenizer):
    """The engine may spell "hello" in pieces; encoding the text again would give one token."""
    trajectory = Trajectory(tokenizer, branching=False)
    pieces = [*tokenizer.encode("hel"), *tokenizer.encode("l"), *tokenizer.encode("o"), END]
    assert tokenizer.encode(tokenizer.decode(pieces)) != pieces[:-1]
    prompt = answer(trajectory, tokenizer, [ASK], pieces)
    longer = answer(trajectory, tokenizer, [ASK, says("hello"), MORE], [END])
    assert longer[: len(prompt) + 4] == prompt + pieces


def test_an_environment_that_changes_what_was_said_begins_a_second_sample(tokenizer):
    trajectory = Trajectory(tokenizer, branching=False)
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode("four"), END])
    messages = [ASK, says("five"), MORE]
    prompt = answer(trajectory, tokenizer, messages, [END])
    assert prompt == tokenizer.encode(tokenizer.render(messages, tools=None, generate=True))
    assert [int(sample.loss_mask.sum()) for sample in trajectory.samples()] == [5, 1]


def test_with_branching_each_turn_is_a_sample_of_its_own(tokenizer):
    trajectory = Trajectory(tokenizer, branching=True)
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode("4"), END])
    prompt = answer(trajectory, tokenizer, [ASK, says("4"), MORE], [END])
    one, two = trajectory.samples()
    assert two.ids.tolist() == [*prompt, END]
    assert one.length < two.length


def test_a_template_that_rewrites_earlier_turns_begins_a_second_sample_and_goes_on_with_that(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, QWEN_3))
    trajectory = Trajectory(tokenizer, branching=False)
    thinking = "<think>\nhm\n</think>\n\n4"
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode(thinking), END])
    conversation = [ASK, says(thinking), MORE]
    prompt = answer(trajectory, tokenizer, conversation, [*tokenizer.encode("yes"), END])
    assert "think" not in tokenizer.decode(prompt)
    tool = {"role": "tool", "content": "4"}
    longer = answer(trajectory, tokenizer, [*conversation, says("yes"), tool], [END])
    assert longer[: len(prompt)] == prompt
    assert [int(sample.loss_mask.sum()) for sample in trajectory.samples()] == [len(thinking) + 1, 5]


def test_a_template_that_trims_costs_a_second_sample_but_never_wrong_ids(tmp_path):
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path, LLAMA_3))
    trajectory = Trajectory(tokenizer, branching=False)
    answer(trajectory, tokenizer, [ASK], tokenizer.encode("4  <|eot|>"))
    messages = [ASK, says("4  "), MORE]
    prompt = answer(trajectory, tokenizer, messages, tokenizer.encode("yes<|eot|>"))
    assert prompt == tokenizer.encode(tokenizer.render(messages, tools=None, generate=True))
    assert len(trajectory.samples()) == 2


def test_turns_that_are_asked_for_at_once_do_not_mix(tokenizer):
    trajectory = Trajectory(tokenizer, branching=False)
    answer(trajectory, tokenizer, [ASK], [*tokenizer.encode("4"), END])
    tails = [{"role": "user", "content": text} for text in ("left?", "right?", "else?")]
    questions = [trajectory.ask([ASK, says("4"), tail], None) for tail in tails[:2]]
    questions.append(trajectory.ask([tails[2]], None))
    for question, word in reversed(list(zip(questions, ("one", "two", "three"), strict=True))):
        trajectory.record(question, turn([*tokenizer.encode(word), END]), word)
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
    trajectory = Trajectory(tokenizer, branching=False)
    prompt = answer(trajectory, tokenizer, [ASK], [*tokenizer.encode("4"), END])
    trajectory.ask([ASK, says("4"), {"role": "user", "content": "x" * 500}], None)
    (sample,) = trajectory.samples()
    assert sample.length == len(prompt) + 2


def test_a_rollout_without_a_sampled_token_has_no_sample(tokenizer):
    trajectory = Trajectory(tokenizer, branching=False)
    trajectory.ask([ASK], None)
    assert trajectory.samples() == []
    answer(trajectory, tokenizer, [ASK], [])
    assert trajectory.samples() == []


def test_tool_calls_leave_the_text_and_keep_their_order():
    text = (
        'Let me.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call>'
    )
    assert split_tool_calls(text, "call-2") == (
        "Let me.",
        [
            ToolCall(id="call-2-0", name="add", arguments='{"a": 1}'),
            ToolCall(id="call-2-1", name="now", arguments="{}"),
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
    assert split_tool_calls(text, "c") == (text, [])


def test_arguments_that_are_text_already_stay_as_the_model_wrote_them():
    _, calls = split_tool_calls('<tool_call>{"name": "run", "arguments": "{\\"a\\": 1"}</tool_call>', "c")
    assert calls[0].arguments == '{"a": 1'


def test_text_without_tool_calls_keeps_its_blanks():
    assert split_tool_calls("  two lines\n", "c") == ("  two lines\n", [])
