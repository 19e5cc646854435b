"""Tool calls in a model's text: a model that writes nonsense costs nobody but its rollout."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.orchestrator.chat import _for_template
from trireme.orchestrator.environments.wire import ToolCall
from trireme.orchestrator.tool_calls import split_tool_calls

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PIECES = ["<tool_call>", "</tool_call>", '{"name": "f"}', " ", "\n", "so", CALL]
PATTERN = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def by_pattern(text: str) -> tuple[str, list[str]]:
    """The same by a regular expression, which is shorter and backtracks."""
    names = []

    def take(match: re.Match[str]) -> str:
        try:
            names.append(json.loads(match.group(1))["name"])
        except (ValueError, TypeError):
            return match.group(0)
        return ""

    return PATTERN.sub(take, text).strip() if "<tool_call>" in text else text, names


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_calls_and_text_are_those_of_the_pattern(text):
    said, calls = split_tool_calls(text, 1)
    assert (said, [call.name for call in calls]) == by_pattern(text)
    assert len({call.id for call in calls}) == len(calls)


def test_tool_calls_leave_the_text_and_keep_their_order_and_the_models_arguments():
    written = '<tool_call>{"name": "run", "arguments": "{\\"a\\": 1"}</tool_call>'
    found = split_tool_calls(f'Let me.\n{CALL}\n<tool_call>\n{{"name": "now"}}\n</tool_call>{written}', 2)
    calls = [("call00200", "add", '{"a": 1}'), ("call00201", "now", "{}"), ("call00202", "run", '{"a": 1')]
    assert found == ("Let me.", [ToolCall(id=id, name=name, arguments=arguments) for id, name, arguments in calls])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{name: add}</tool_call>",
        "<tool_call>[1, 2]</tool_call>",
        "<tool_call>7</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add"',
        "  two lines\n",
    ],
)
def test_what_is_no_tool_call_stays_text(text):
    assert split_tool_calls(text, 1) == (text, [])


@pytest.mark.parametrize(
    "text", ["<tool_call>" + "\n" * 100_000, "<tool_call>" * 20_000, CALL * 5 + "<tool_call>" + " " * 99_999]
)
def test_a_tag_that_nothing_closes_takes_no_time(text):
    began = time.process_time()
    said, calls = split_tool_calls(text, 1)
    took = time.process_time() - began
    assert took < 20.0, f"{took:.0f} s: hours, where it backtracks"
    assert said.startswith("<tool_call>")
    assert len(calls) == text.count("</tool_call>")


def test_arguments_too_deep_to_read_reach_the_template_as_they_were_written():
    deep = "[" * 5000
    said, calls = split_tool_calls(f'hm <tool_call>{{"name": "f", "arguments": "{deep}"}}</tool_call>', 1)
    function = {"name": calls[0].name, "arguments": calls[0].arguments}
    message = {"role": "assistant", "content": said, "tool_calls": [{"id": calls[0].id, "function": function}]}
    assert _for_template(message)["tool_calls"][0]["function"] == {"name": "f", "arguments": deep}
