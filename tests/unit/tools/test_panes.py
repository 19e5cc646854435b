"""Whatever a line of results holds is shown, on pages and in columns."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.tools.rollouts import record_of
from trireme.tools.viewer.panes import columns_for, in_order, page

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
CALLS = JSON | st.lists(st.fixed_dictionaries({"function": JSON, "id": JSON}))
ROLE = st.sampled_from(["user", "assistant", "tool"]) | JSON
TALK = JSON | st.lists(st.fixed_dictionaries({}, optional={"role": ROLE, "content": JSON, "tool_calls": CALLS}))
KEYS = ["example_id", "reward", "answer", "info", "metrics", "tokens", "turns", "truncated", "stop", "error"]
LINE = st.dictionaries(st.sampled_from(KEYS), JSON) | st.fixed_dictionaries({"prompt": TALK, "completion": TALK})


@settings(max_examples=30)
@given(LINE)
def test_whatever_a_line_holds_is_shown(value):
    record = record_of(json.loads(json.dumps(value)), number=0)
    for longest in (100, None):
        shown = "".join(text.plain for text, _ in page(record, longest=longest))
        assert not any(ord(letter) < 32 for letter in shown.replace("\n", ""))
    for column in columns_for([record.row]):
        assert in_order([record.row], column, backwards=True) == [record.row]
