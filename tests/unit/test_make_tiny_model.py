"""The script that made the models that ship with the project."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tiny import load_script

REPOSITORY = Path(__file__).parents[2]
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
build_tokenizer = load_script("make_tiny_model").build_tokenizer


@pytest.mark.parametrize("name", ["reverse-text", "alphabet-sort", "wordle"])
def test_a_shipped_tokenizer_is_made_again_to_the_byte_and_gives_back_what_is_printable(name, tmp_path):
    path = REPOSITORY / f"configs/{name}/words.json"
    words = json.loads(path.read_text()) if name != "reverse-text" else []
    tokenizer = build_tokenizer(words) if words else build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for file in files:
        assert (tmp_path / file).read_bytes() == (REPOSITORY / f"models/{name}-tiny" / file).read_bytes()
    assert all(len(tokenizer.encode(word)) == 1 for word in words)
    text = f"{words[:1]}Any other text,\tof 1 line\nor (2)?{words[-1:]}"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tools_template_shows_tools_calls_and_answers_as_hermes_does_and_only_grows_at_its_end():
    tokenizer = build_tokenizer(template="tools")

    def render(count: int, *, generate: bool = False) -> str:
        given = {"tools": TOOLS, "tokenize": False, "add_generation_prompt": generate}
        return tokenizer.apply_chat_template(CONVERSATION[:count], **given)

    texts = [render(2, generate=True), render(3), render(5, generate=True), render(6)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert texts[-1].count("<|im_start|>system\n") == 1
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in texts[-1]
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    ) in texts[-1]
    plain = [message for message in CONVERSATION if message["content"] and message["role"] != "tool"]
    without_tools = {
        build_tokenizer(template=name).apply_chat_template(plain, tokenize=False) for name in ("plain", "tools")
    }
    assert len(without_tools) == 1
