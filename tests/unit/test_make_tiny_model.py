"""The script that made the models that ship with the project."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tiny import load_script

REPOSITORY = Path(__file__).parents[2]
WORDS = {
    "reverse-text": None,
    "alphabet-sort": "configs/alphabet-sort/words.json",
    "wordle": "configs/wordle/words.json",
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
    {"id": "2", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}},
]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 and 3?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "tool", "tool_call_id": "2", "content": "3"},
    {"role": "assistant", "content": "5"},
]


@pytest.fixture(scope="module")
def script():
    return load_script("make_tiny_model")


def words_of(name: str) -> list[str] | None:
    path = WORDS[name]
    return json.loads((REPOSITORY / path).read_text()) if path else None


@pytest.mark.parametrize("name", WORDS)
def test_a_shipped_tokenizer_is_made_again_to_the_byte(script, name, tmp_path):
    words = words_of(name)
    (script.build_tokenizer(words) if words else script.build_tokenizer()).save_pretrained(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for file in files:
        assert (tmp_path / file).read_bytes() == (REPOSITORY / f"models/{name}-tiny" / file).read_bytes()


@pytest.mark.parametrize("name", ["alphabet-sort", "wordle"])
def test_a_word_is_one_token_and_everything_printable_comes_back(script, name):
    words = words_of(name)
    tokenizer = script.build_tokenizer(words)
    assert all(len(tokenizer.encode(word)) == 1 for word in words)
    text = f"{words[0]}Any other text,\tof 1 line\nor (2)?{words[-1]}"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_with_tools_a_conversation_only_grows_at_its_end(script):
    tokenizer = script.build_tokenizer(template="tools")

    def render(count: int, *, generate: bool = False) -> str:
        return tokenizer.apply_chat_template(
            CONVERSATION[:count], tools=TOOLS, tokenize=False, add_generation_prompt=generate
        )

    texts = [render(2, generate=True), render(3), render(5, generate=True), render(6)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))


def test_the_tools_template_shows_tools_calls_and_answers_as_hermes_does(script):
    tokenizer = script.build_tokenizer(template="tools")
    text = tokenizer.apply_chat_template(CONVERSATION, tools=TOOLS, tokenize=False)
    assert text.count("<|im_start|>system\n") == 1
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    ) in text


def test_without_tools_both_templates_say_the_same(script):
    plain = [message for message in CONVERSATION if message["content"] and message["role"] != "tool"]
    texts = {
        script.build_tokenizer(template=template).apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        for template in ("plain", "tools")
    }
    assert len(texts) == 1
