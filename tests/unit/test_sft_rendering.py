"""What counts in a conversation: exactly what the model will have to say, after exactly what it will see."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tiny_tokenizer import LLAMA_3, MARKED, QWEN_3, write_tokenizer
from trireme.base.errors import ConfigError
from trireme.trainer.conversations import Completion, Conversation, to_conversation
from trireme.trainer.rendering import Rendered, Renderer, Tokenized, tokenized

START, END = "<|im_start|>", "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(write_tokenizer(tmp_path_factory.mktemp("qwen") / "t", QWEN_3))


@pytest.fixture
def llama(tmp_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "t", LLAMA_3))


def said(role: str, content: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": content} | more


def conversation(*messages: dict[str, object], **more: object) -> Conversation | Completion:
    return to_conversation({"messages": list(messages)} | more, "here")


def shown(tokenizer: PreTrainedTokenizerBase, sample: Tokenized) -> list[tuple[str, int]]:
    """Each token as text, and whether it counts."""
    return list(zip(tokenizer.convert_ids_to_tokens(sample.ids), sample.mask, strict=True))


def rendered(
    tokenizer: PreTrainedTokenizerBase, *messages: dict[str, object], roles: tuple[str, ...] = ("assistant",)
) -> list[tuple[str, int]]:
    (sample,) = Renderer(tokenizer, roles).samples(conversation(*messages))
    return shown(tokenizer, sample)


def counting(found: list[tuple[str, int]]) -> list[str]:
    return [token for token, counts in found if counts]


def learned(tokenizer: PreTrainedTokenizerBase, sample: Tokenized) -> str:
    return tokenizer.decode([token for token, counts in zip(sample.ids, sample.mask, strict=True) if counts])


GREETING = [said("user", "hi"), said("assistant", "yo")]


def test_each_answer_counts_with_its_end_of_turn_and_nothing_between_or_after(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    prompt = [START, "user\n", "h", "i", END, "\n", START, "assistant\n"]
    expected = [(token, 0) for token in prompt] + [("y", 1), ("o", 1), (END, 1), ("\n", 0)]
    assert rendered(tokenizer, *GREETING) == expected
    assert rendered(tokenizer, *GREETING, said("user", "bye")) == expected
    found = rendered(tokenizer, said("system", "x"), *GREETING, said("user", "b"), said("assistant", "c"))
    assert counting(found) == ["y", "o", END, "c", END]
    between = ["\n", START, "user\n", "b", END, "\n", START, "assistant\n"]
    first = found.index(("y", 1))
    assert found[first + 3 : first + 12] == [(token, 0) for token in between] + [("c", 1)]


def test_other_roles_and_marked_messages_count_with_all_that_the_template_writes_for_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    found = rendered(tokenizer, *GREETING, said("user", "b"), said("assistant", "c"), roles=("user",))
    assert counting(found) == [START, "user\n", "h", "i", END, START, "user\n", "b", END]
    both = rendered(tokenizer, *GREETING, roles=("user", "assistant"))
    assert [token for token, counts in both if not counts] == ["\n", START, "assistant\n", "\n"]
    for mark in ({"train": False}, {"weight": 0}):
        found = rendered(tokenizer, GREETING[0], said("assistant", "no", **mark), *GREETING)
        assert counting(found) == ["y", "o", END]
        assert ("n", 0) in found
    found = rendered(tokenizer, said("user", "hi", train=True), said("assistant", "yo", train=False))
    assert counting(found) == [START, "user\n", "h", "i", END]


def test_a_template_that_drops_earlier_thinking_makes_a_sample_of_each_turn_of_another_question(
    thinking: PreTrainedTokenizerBase,
) -> None:
    """In each, the model sees what it will see: no earlier thinking, and its own in full."""
    turns = [said("user", "a"), said("assistant", "<think>x</think>b"), said("user", "c"), said("assistant", "d")]
    samples = Renderer(thinking).samples(conversation(*turns))
    assert [learned(thinking, sample) for sample in samples] == [f"<think>x</think>b{END}", f"d{END}"]
    for sample, number in zip(samples, (1, 3), strict=True):
        asked = thinking.apply_chat_template(turns[:number], tokenize=False, add_generation_prompt=True)
        prompt = [token for token, counts in zip(sample.ids, sample.mask, strict=True) if not counts][:-1]  # "\n"
        assert thinking.decode(prompt) == asked
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    calling = said("assistant", "<think>1</think>", tool_calls=[call])
    turns = [said("user", "a"), calling, said("tool", "2"), said("assistant", "<think>3</think>4")]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    (sample,) = Renderer(thinking).samples(conversation(*turns, tools=tools))
    written = '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert learned(thinking, sample) == f"<think>1</think>{written}{END}<think>3</think>4{END}"
    assert '"name": "f"' in thinking.decode(sample.ids).partition("# Tools\n<tools>\n")[2].partition("</tools>")[0]


def test_only_the_completion_of_a_prompt_counts(tokenizer: PreTrainedTokenizerBase) -> None:
    def sample_of(prompt: object, completion: object) -> Tokenized:
        entry = to_conversation({"prompt": prompt, "completion": completion}, "here")
        (sample,) = Renderer(tokenizer).samples(entry)
        return sample

    texts = sample_of("ab", "cd")  # taken as they are
    assert shown(tokenizer, texts) == [("a", 0), ("b", 0), ("c", 1), ("d", 1), (END, 1)]
    assert learned(tokenizer, sample_of([*GREETING, said("user", "b")], [said("assistant", "c")])) == f"c{END}"
    mixed = sample_of("hi", [said("assistant", "yo")])
    assert shown(tokenizer, mixed) == rendered(tokenizer, *GREETING)


def test_an_end_of_turn_that_is_not_the_tokenizers_end_counts_and_nothing_behind_it(
    llama: PreTrainedTokenizerBase,
) -> None:
    """Llama and Gemma end turns with another token than texts."""
    llama.eos_token = "<|endoftext|>"
    llama.add_special_tokens({"additional_special_tokens": ["<|eot|>", "<|header|>"]})
    llama.chat_template = LLAMA_3.replace("| trim + '<|eot|>'", "| trim + '<|eot|>\n'")
    (sample,) = Renderer(llama).samples(conversation(*GREETING))
    assert learned(llama, sample) == "yo<|eot|>"
    assert sample.mask[-1] == 0


def test_what_a_template_begins_otherwise_or_refuses_is_told_with_its_place(
    tiny_model: Path, llama: PreTrainedTokenizerBase
) -> None:
    opening = AutoTokenizer.from_pretrained(tiny_model)
    opening.chat_template = opening.chat_template.replace("assistant\n' }}", "assistant\n<think>' }}")
    with pytest.raises(ConfigError, match=r"here: before an answer .*<think>.*enable_thinking"):
        Renderer(opening).samples(conversation(*GREETING))
    assert Renderer(opening).samples(conversation(GREETING[0], said("assistant", "<think>yo")))
    with pytest.raises(ConfigError, match=r"here: the chat template cannot render .*Only one system message"):
        Renderer(llama).samples(conversation(said("robot", "x"), *GREETING))
    llama.chat_template = None
    with pytest.raises(ConfigError, match=r"cannot render .*set `chat_template`"):
        Renderer(llama).samples(conversation(*GREETING))


def test_marks_of_a_template_change_nothing_and_its_arguments_reach_it(tmp_path: Path) -> None:
    """What `{% generation %}` encloses is what the renderer finds without it."""
    template = MARKED.replace("}}\n{% endif %}", "}}{% endif %}")
    marked = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "t", template))
    (sample,) = Renderer(marked).samples(conversation(*GREETING))
    encoded = marked.apply_chat_template(GREETING, return_dict=True, return_assistant_tokens_mask=True)
    assert (sample.ids, sample.mask) == (encoded["input_ids"], encoded["assistant_masks"])
    marked.chat_template = "{{ mood }}" + marked.chat_template
    (asked,) = Renderer(marked, template_kwargs=(("mood", "m"),)).samples(conversation(*GREETING))
    assert asked.ids == [*marked("m")["input_ids"], *sample.ids]


def test_a_token_that_reaches_over_the_border_of_an_answer_is_split_there(tmp_path: Path) -> None:
    """An engine has the prompt as tokens of its own, whatever the answer begins with."""
    greedy = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "t", extra_words=("t\nyo",)))
    text = "assistant\nyo!"
    (sample,) = Renderer(greedy).tokenize([Rendered(text, ((10, 13),))])
    assert greedy.convert_ids_to_tokens(greedy(text)["input_ids"])[8] == "t\nyo"
    assert shown(greedy, sample)[8:] == [("t", 0), ("\n", 0), ("y", 1), ("o", 1), ("!", 1)]


def test_many_conversations_give_the_samples_of_each_in_order(tokenizer: PreTrainedTokenizerBase) -> None:
    many = [conversation(said("user", "a"), said("assistant", "b" * number)) for number in range(1, 70)]
    found = list(tokenized(Renderer(tokenizer), iter(many)))
    assert found == [Renderer(tokenizer).samples(one) for one in many]
