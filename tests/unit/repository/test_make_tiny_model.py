"""The script that made the models that ship with the project."""

import json
from pathlib import Path

import pytest

from support.models.tiny import load_script

REPOSITORY = Path(__file__).parents[3]
build_tokenizer = load_script("make_tiny_model").build_tokenizer


@pytest.mark.parametrize("name", ["reverse-text", "alphabet-sort", "wordle", "color-squares"])
def test_shipped_tokenizer_is_reproduced_to_the_byte(name, tmp_path):
    path = REPOSITORY / f"configs/{name}/words.json"
    words = json.loads(path.read_text()) if name != "reverse-text" else []
    template = "pictures" if name == "color-squares" else "plain"
    tokenizer = build_tokenizer(words, template) if words else build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for file in files:
        assert (tmp_path / file).read_bytes() == (REPOSITORY / f"models/{name}-tiny" / file).read_bytes()
    assert all(len(tokenizer.encode(word)) == 1 for word in words)
    text = f"{words[:1]}Any other text,\tof 1 line\nor (2)?{words[-1:]}"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tools_template_writes_tool_calls_as_hermes_does():
    tokenizer = build_tokenizer(template="tools")
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    turns = [{"role": "user", "content": "2 and 3?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "content": "5"})
    asked, called, answered = (tokenizer.apply_chat_template(turns[:n], tools=[], tokenize=False) for n in (1, 2, 3))
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert called == f"{asked}<|im_start|>assistant\n{written}<|im_end|>\n"
    assert answered == f"{called}<|im_start|>tool\n<tool_response>\n5\n</tool_response><|im_end|>\n"
