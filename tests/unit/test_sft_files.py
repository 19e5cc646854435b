"""Conversations wherever people have them, in the forms that they have them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow.parquet import write_table

from trireme.base.errors import ConfigError
from trireme.config.sft import Source
from trireme.trainer.conversation_files import read_conversations
from trireme.trainer.conversations import Completion, Conversation, to_conversation

GREETING = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def read(path: Path | str) -> list[Conversation | Completion]:
    return list(read_conversations(Source(data=str(path))))


def messages(found: list[Conversation | Completion]) -> list[list[Any]]:
    return [list(one.messages) for one in found if isinstance(one, Conversation)]


def test_a_folders_conversations_come_in_the_order_of_their_files(tmp_path: Path) -> None:
    """With every character that JSON allows in a text."""
    text = "line\u2028separator, next\u0085line, form\x0cfeed, é, 漢, 🙂"
    turned, strange = {"messages": GREETING[::-1]}, {"messages": [GREETING[0], {"role": "assistant", "content": text}]}
    write_lines(tmp_path / "b.jsonl", {"messages": GREETING})
    write_lines(tmp_path / "a.jsonl", turned, "", {"messages": GREETING})
    write_parquet(tmp_path / "c.parquet", strange)
    (tmp_path / "d.json").write_text(json.dumps([turned]))
    (tmp_path / "e.json").write_text(json.dumps({"data": [{"messages": GREETING}]}))
    (tmp_path / "f.jsonl").write_bytes("\r\n".join(2 * [json.dumps(strange, ensure_ascii=False)]).encode())
    (tmp_path / "README.md").write_text("# not data")
    expected = [GREETING[::-1], GREETING, GREETING, strange["messages"], GREETING[::-1], GREETING]
    assert messages(read(tmp_path)) == [*expected, *2 * [strange["messages"]]]


def test_a_program_can_make_the_conversations(tmp_path: Path) -> None:
    program = tmp_path / "data.py"
    program.write_text(f"def conversations():\n    return 2 * [{{'messages': {GREETING}}}]\n")
    assert messages(read(program)) == [GREETING, GREETING]
    program.write_text("def conversations():\n    return [{'messages': []}]\n")
    with pytest.raises(ConfigError, match=r"data.py, conversation 0 has no assistant message"):
        read(program)
    program.write_text("")
    with pytest.raises(ConfigError, match="no function `conversations`"):
        read(program)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"text": "hi"}',
        '{"messages": null}',
        '{"messages": []}',
        '{"messages": "hi"}',
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '{"messages": [{"role": "user"}, {"role": "assistant", "content": "yo"}]}',
        '{"messages": [{"content": "hi"}, {"role": "assistant", "content": "yo"}]}',
        '{"messages": [{"role": "assistant", "content": "yo"}, "hi"]}',
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "weight": 0.5}]}',
        '{"prompt": "hi"}',
        '{"prompt": "hi", "completion": ""}',
        '{"prompt": [{"role": "user", "content": "hi"}], "completion": []}',
        '{"prompt": 3, "completion": 4}',
        '{"conversations": [{"from": "alien", "value": "hi"}]}',
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}], "tools": "{"}',
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "data.jsonl", {"messages": GREETING}, "", line)
    with pytest.raises(ConfigError, match=r"data.jsonl, line 3 .*expected \{\"messages\""):
        read(path)


def test_the_forms_of_one_conversation_are_one() -> None:
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    for other in (sharegpt, {"conversations": GREETING}):
        assert to_conversation(other, "") == to_conversation({"messages": GREETING}, "")
    assert to_conversation({"prompt": "a", "completion": "b"}, "x") == Completion("a", "b", "x")
    call, silent = ({"role": "assistant", "tool_calls": [CALL]} | more for more in ({"content": None}, {}))
    assert messages([to_conversation({"messages": [GREETING[0], call, silent]}, "")]) == [[GREETING[0], call, silent]]
    with pytest.raises(ConfigError, match=r"its keys are instruction, output"):
        to_conversation({"instruction": "a", "output": "b"}, "here")
    pair = to_conversation({"prompt": GREETING[:1], "completion": GREETING[1:]}, "")
    assert messages([pair]) == [GREETING]
    assert [pair.is_learned(index, ("user", "assistant")) for index in range(2)] == [False, True]  # type: ignore[union-attr]


def test_sharegpts_system_tools_and_calls_are_understood() -> None:
    entry = {
        "system": "be kind",
        "tools": json.dumps([TOOL]),
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "yo", "weight": 0},
        ],
    }
    found = to_conversation(entry, "")
    assert isinstance(found, Conversation)
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2]["tool_calls"] == [CALL]
    assert found.tools == (TOOL,)
    assert [found.is_learned(index, ("assistant",)) for index in range(5)] == [False, False, True, False, False]


def test_columns_that_an_entry_never_had_are_not_in_it(tmp_path: Path) -> None:
    """A column of parquet gives every message all keys that any message has, and every call all arguments."""
    other = {"type": "function", "function": {"name": "g", "arguments": {"y": "z"}}}
    calls = [[GREETING[0], {"role": "assistant", "content": "", "tool_calls": [call]}] for call in (CALL, other)]
    tools = [[TOOL], None, None]
    rows = [{"messages": each, "tools": given} for each, given in zip([*calls, GREETING], tools, strict=True)]
    found = read(write_parquet(tmp_path / "data.parquet", *rows))
    assert messages(found) == [row["messages"] for row in rows]
    assert [one.tools for one in found if isinstance(one, Conversation)] == [(TOOL,), None, None]


def test_data_that_cannot_be_read_is_refused_before_anything_starts(tmp_path: Path) -> None:
    empty = tmp_path / "none"
    empty.mkdir()
    for path in [tmp_path / "nowhere.jsonl", empty, write_lines(tmp_path / "empty.jsonl", "")]:
        with pytest.raises(ConfigError, match=r"conversation.* expected"):
            read(path)
    for name, content, words in (("torn.parquet", b"PAR1 and no more", "no parquet file"), ("a.json", b"3", "no list")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name} .*{words}"):
            read(tmp_path / name)


def test_a_data_set_of_a_hub_is_read_by_its_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, subset: str | None, *, split: str) -> Any:
        if subset is None:
            raise ConnectionError("Couldn't reach 'owner/name' on the Hub")
        assert (name, subset, split) == ("owner/name", "en", "train[:2]")
        return datasets.Dataset.from_list([{"messages": GREETING}, {"messages": GREETING[::-1]}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = list(read_conversations(Source(data="owner/name", subset="en", split="train[:2]")))
    assert messages(found) == [GREETING, GREETING[::-1]]
    with pytest.raises(ConfigError, match=r"(?s)'owner/name' .*Couldn't reach.*download its parquet files elsewhere"):
        read("owner/name")
