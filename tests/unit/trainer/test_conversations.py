"""Conversations that are read from files, programs and hubs."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow.parquet import write_table

from support.models.conversations import CALL, GREETING, TOOL, answer, call_of, chat, messages, write_lines
from trireme.base.errors import ConfigError
from trireme.config.sft import Source
from trireme.trainer.sft.conversations import Completion, Conversation, read_conversations, to_conversation


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def read(path: Path | str, **more: Any) -> list[Conversation | Completion]:
    return list(read_conversations(Source(data=str(path), **more)))


def test_a_folders_conversations_come_in_the_order_of_their_files(tmp_path):
    strange = chat("hi", "line\u2028separator, next\u0085line, form\x0cfeed, é, 漢, 🙂")
    first, second, third, fourth = (chat("hi", name) for name in "abcd")
    write_lines(tmp_path / "b.jsonl", third)
    write_lines(tmp_path / "a.jsonl", first, "", second)
    write_parquet(tmp_path / "c.parquet", strange)
    (tmp_path / "d.json").write_text(json.dumps([first]))
    (tmp_path / "e.json").write_text(json.dumps({"data": [fourth]}))
    (tmp_path / "f.jsonl").write_bytes("\r\n".join(2 * [json.dumps(strange, ensure_ascii=False)]).encode())
    (tmp_path / "README.md").write_text("# not data")
    expected = [first, second, third, strange, first, fourth, strange, strange]
    assert messages(read(tmp_path)) == [each["messages"] for each in expected]


def test_a_program_can_make_the_conversations(tmp_path):
    program = tmp_path / "data.py"
    program.write_text(f"def conversations():\n    return 2 * [{{'messages': {GREETING}}}]\n")
    assert messages(read(program)) == [GREETING, GREETING]
    program.write_text("def conversations():\n    return [{'messages': []}]\n")
    with pytest.raises(ConfigError, match=r"data.py, conversation 0 has no assistant message"):
        read(program)
    program.write_text("")
    with pytest.raises(ConfigError, match="no function `conversations`"):
        read(program)


def test_a_data_set_of_a_hub_is_read_by_its_subset_and_split(monkeypatch):
    def load_dataset(name: str, subset: str | None, *, split: str) -> Any:
        if subset is None:
            raise ConnectionError("Couldn't reach 'owner/name' on the Hub")
        assert (name, subset, split) == ("owner/name", "en", "train[:2]")
        return datasets.Dataset.from_list([{"messages": GREETING}, {"messages": GREETING[::-1]}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert messages(read("owner/name", subset="en", split="train[:2]")) == [GREETING, GREETING[::-1]]
    with pytest.raises(ConfigError, match=r"(?s)'owner/name' .*Couldn't reach.*download its parquet files elsewhere"):
        read("owner/name")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        {"instruction": "hi", "output": "yo"},
        {"messages": "hi"},
        {"messages": GREETING[:1]},
        {"messages": [{"role": "user"}, GREETING[1]]},
        {"messages": [{"content": "hi"}, GREETING[1]]},
        {"messages": [GREETING[0], answer("yo", weight=0.5)]},
        {"prompt": "hi", "completion": ""},
        {"prompt": GREETING, "completion": []},
        {"prompt": 3, "completion": 4},
        {"conversations": [{"from": "alien", "value": "hi"}]},
        {"messages": GREETING, "tools": "{"},
        {"messages": GREETING, "tools": {"a": 1}},
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line):
    path = write_lines(tmp_path / "data.jsonl", {"messages": GREETING}, "", line)
    with pytest.raises(ConfigError, match=r"data.jsonl, line 3 .*expected \{\"messages\"") as caught:
        read(path)
    assert str(caught.value).count("data.jsonl") == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nowhere.jsonl", None, r".* conversations were expected"),
        ("empty.jsonl", b"\n", ".* at least one was expected"),
        ("torn.parquet", b"PAR1 and no more", " .*no parquet file"),
        ("a.json", b"3", " .*no list"),
        ("latin.json", b'["\xe9"]', " is not JSON .*utf-8"),
        ("latin.jsonl", b'\n{"prompt": "\xe9", "completion": ""}\n', ", line 2 is not JSON .*utf-8"),
    ],
)
def test_data_that_cannot_be_read_is_refused_before_anything_starts(tmp_path, name, content, words):
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}{words}"):
        read(tmp_path / name)


def test_the_forms_of_one_conversation_are_one():
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    for other in (sharegpt, {"conversations": GREETING}):
        assert to_conversation(other, "") == to_conversation({"messages": GREETING}, "")
    assert to_conversation({"prompt": "a", "completion": "b"}, "x") == Completion("a", "b", "x")
    calls = [GREETING[0], answer(None, tool_calls=[CALL]), {"role": "assistant", "tool_calls": [CALL]}]
    assert messages([to_conversation({"messages": calls}, "")]) == [calls]
    pair = to_conversation({"prompt": GREETING[:1], "completion": GREETING[1:]}, "")
    assert messages([pair]) == [GREETING]
    assert isinstance(pair, Conversation)
    assert [pair.is_learned(index, ("user", "assistant")) for index in range(2)] == [False, True]


def test_sharegpts_system_tools_and_calls_are_understood():
    said = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "yo", "weight": 0},
    ]
    found = to_conversation({"system": "be kind", "tools": json.dumps([TOOL]), "conversations": said}, "")
    assert isinstance(found, Conversation)
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert (found.messages[2]["tool_calls"], found.tools) == ([CALL], (TOOL,))
    assert [found.is_learned(index, ("assistant",)) for index in range(5)] == [False, False, True, False, False]


def test_columns_that_an_entry_never_had_are_not_in_it(tmp_path):
    """A column of parquet gives every message all keys that any message has, and every call all arguments."""
    calls = [[GREETING[0], answer("", tool_calls=[call])] for call in (CALL, call_of("g", {"y": "z"}))]
    rows = [
        {"messages": calls[0], "tools": [TOOL]},
        *({"messages": each, "tools": None} for each in (calls[1], GREETING)),
    ]
    found = read(write_parquet(tmp_path / "data.parquet", *rows))
    assert messages(found) == [*calls, GREETING]
    assert [one.tools for one in found if isinstance(one, Conversation)] == [(TOOL,), None, None]
