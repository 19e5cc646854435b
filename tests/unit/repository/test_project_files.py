"""Pages name files that exist, packages are pinned, and shipped models are what their script makes."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.models.tiny import load_script

REPOSITORY = Path(__file__).parents[3]
LOCK = REPOSITORY / "uv.lock"

build_tokenizer = load_script("make_tiny_model").build_tokenizer


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/reliability.md"])
def test_files_that_a_page_names_exist(page):
    places = (*(REPOSITORY / name for name in ("src/trireme", "packages/trireme-worker", "tests")), REPOSITORY)
    text = (REPOSITORY / page).read_text()
    named = re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", text)
    braced = re.findall(r"`((?:[a-z_0-9]+/)*)\{([a-z_,0-9]+)\}\.py`", text)
    named += [f"{folder}{name}.py" for folder, names in braced for name in names.split(",")]
    bare = {path.name for path in (REPOSITORY / "src").rglob("*.py")} | {"shout.py"}
    found = {name for name in named if name in bare or any((place / name).exists() for place in places)}
    assert set(named) - found == set()


@pytest.mark.skipif(not LOCK.exists(), reason="uv writes what it resolved to uv.lock, and did not install this")
def test_every_package_of_every_resolution_is_pinned():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    uv, groups = project["tool"]["uv"], project["dependency-groups"].values()
    texts = [*project["project"]["dependencies"], *(text for group in groups for text in group)]
    texts += uv["override-dependencies"] + uv["constraint-dependencies"]
    pinned = {(each.name, str(each.specifier).removeprefix("==")) for each in map(Requirement, texts)}
    resolved = {(each["name"], each["version"]) for each in tomllib.loads(LOCK.read_text())["package"]}
    assert resolved - pinned == {("trireme", project["project"]["version"])}


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
