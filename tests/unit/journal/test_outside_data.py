"""Data from outside costs at most that item: at each place of entry, it is read, or there is one documented error."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.token import read_key
from trireme.config.files import find_run_file, read_run
from trireme.config.load import load_run_config
from trireme.config.run import RunConfig
from trireme.journal.entry import FORMAT, Header
from trireme.journal.journal import Journal
from trireme.journal.manifest import complete_steps
from trireme.journal.records import BatchRecord, Branch, Rollout, State
from trireme.journal.turns import KeptRequest, RolloutLog
from trireme.launch.folder import launcher_of
from trireme.monitor.metrics import read_metrics
from trireme.monitor.progress import Progress
from trireme.orchestrator.session import wire

WORDS = """
    type task ask done call messages role content reward metrics prompt completion example_id info choices token_ids
    logprobs weight_versions step process time_s model loss max_steps orchestrator trainer env id name rollouts state
    dropped __class__
"""
NAMES = st.sampled_from(WORDS.split())
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | NAMES
    | st.sampled_from([2**63, -(2**70), 1e308, float("nan"), "\ud800", "x" * 10_000, "\0", "../../x"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=6)
)
RECORDS = st.dictionaries(NAMES, VALUES, max_size=10)
DEEP = st.sampled_from([900, 5_000, 100_000]).map(lambda depth: b'{"type":"done","task":"1","info":' + b"[" * depth)
TORN = st.tuples(RECORDS, st.integers(0, 40)).map(lambda pair: in_json(pair[0])[: -pair[1] or None])
BYTES = st.binary(max_size=200) | RECORDS.map(lambda value: in_json(value)) | TORN | DEEP


def in_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def in_msgpack(value: Any) -> bytes:
    with suppress(Exception):  # some values have no place in it
        return msgspec.msgpack.encode(value)
    return b"\x91" * 100_000


@given(payload=st.binary(max_size=200) | RECORDS.map(in_msgpack), head=BYTES)
def test_an_entry_of_the_journal_is_read_or_named_as_corrupt(payload, head, tmp_path_factory):
    journal = Journal(tmp_path_factory.getbasetemp())
    header = msgspec.json.encode(Header(FORMAT, 7, len(payload), hashlib.sha256(payload).hexdigest()))
    for first in (header, head):
        journal.path(7).write_bytes(first + b"\n" + payload)
        with suppress(JournalCorrupt):
            Journal(journal.path(7).parent).read(7)


@given(lines=st.lists(BYTES, max_size=5))
@example(lines=[b'{"step": 3, "process": []}', b'{"step": 3, "process": null}'])
def test_lines_of_metrics_are_rows_or_left_out(lines, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    good = {"step": 3, "process": "trainer", "time_s": 1.5, "loss": 0.5}
    file.write_bytes(b"\n".join([in_json(good), *lines, in_json(good), b""]))
    rows, offset = read_metrics(file)
    assert good in rows
    assert offset == file.stat().st_size
    Progress(10).add(rows)


@given(config=BYTES, rest=BYTES)
def test_the_folder_of_a_run_is_read_or_refused(config, rest, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "run"
    for name in ("configs/run.json", ".launcher", ".token", "checkpoints/step_3/manifest.json", "metrics.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(config if name.endswith("run.json") else rest)
    with suppress(ConfigError):
        paths = read_run(RunConfig, find_run_file(folder, "trainer")).paths
        launcher_of(paths)
    read_key(folder)
    complete_steps(folder / "checkpoints")


@given(data=BYTES, flags=st.lists(st.text(max_size=12).filter(lambda word: "\0" not in word), max_size=3))
def test_a_file_and_flags_are_a_configuration_or_one_error(data, flags, tmp_path_factory):
    for name in ("run.toml", "run.json"):
        file: Path = tmp_path_factory.getbasetemp() / name
        file.write_bytes(data)
        with suppress(ConfigError, SystemExit):  # `--help` ends
            load_run_config(["@", str(file), *flags], program="rl")


# messages of workers

DONE = {"type": "done", "task": "r1.0", "reward": 1, "metrics": {}, "prompt": [], "completion": [], "example_id": 3}
ASK = {"type": "ask", "task": "r1.0", "call": "1", "messages": [], "sampling": {}}
USER = {"role": "user", "content": "hello"}
AUDIO, PICTURE = {"type": "audio", "text": "x"}, {"type": "image_url", "image_url": "data:,"}


def nested(levels: int) -> list:
    return [nested(levels - 1)] if levels > 1 else []


@pytest.mark.parametrize(
    "odd",
    [
        *(ASK | {"messages": [USER | {"role": role}]} for role in (None, "", "x" * 65)),
        *(ASK | {"messages": [USER | {"content": content}]} for content in (5, ["a"])),
        *(ASK | {"messages": [USER | {"content": [part]}]} for part in (AUDIO, PICTURE)),
        *(ASK | {"messages": [USER | {"tool_calls": calls}]} for calls in ("add(1)", [5])),
        *(ASK | {"messages": [USER | {"tool_calls": [{"function": odd}]}]} for odd in (None, {"name": 5})),
        ASK | {"tools": [{"a": nested(32)}]},
        DONE | {"info": {"deep": nested(32)}},
        DONE | {"completion": [{"role": "user", "content": nested(31)}]},
        *(DONE | {"turn_rewards": rewards} for rewards in (None, [[None]], [["1"]], [[0.5], [-1e13]])),
        *(DONE | {"reward": reward} for reward in (1e13, None)),
        # in JSON that Python does not write
        *(in_json(DONE).replace(b"{}", b'{"x": ' + number + b"}") for number in (b"NaN", b"1e999", b"9" * 5000)),
        in_json(DONE | {"info": {"x": "deep"}}).replace(b'"deep"', b"[" * 100_000 + b"]" * 100_000),
    ],
    ids=lambda odd: repr(odd)[:60],
)
def test_a_message_that_no_reader_expects_costs_its_rollout(odd):
    error = wire.decode(odd if isinstance(odd, bytes) else in_json(odd))
    assert (type(error), error.task, error.stage) == (wire.Error, "r1.0", "rollout")


@pytest.mark.parametrize("number", [2**64, 2**64 - 1, -(2**63), -(2**63) - 1])
def test_whole_numbers_of_any_size_get_into_the_journal(number, tmp_path):
    """Those beyond 64 bits as text, which no reader takes for another number."""
    kept = number if -(2**63) <= number < 2**64 else str(number)
    message, table = USER | {"n": [number]}, {"n": number}
    more = {"prompt": [message], "completion": [message], "info": table, "columns": table, "example_id": number}
    done = wire.decode(in_json(DONE | more))
    rollout = Rollout.of(done, env="env", example=0, temperature=1.0, branches=[Branch(why="", messages=[message])])
    Journal(tmp_path).append(BatchRecord(step=0, rollouts=[rollout], dropped=[], state=State()))
    (read,) = Journal(tmp_path).read(0).rollouts
    texts = read.prompt + read.completion + read.branches[0].messages
    assert [each["n"] for each in texts] == [[kept]] * 3
    assert (read.info, read.columns, read.example_id) == ({"n": kept}, {"n": kept}, kept)
    asked = KeptRequest(session="one", number=1, messages=[message], tools=[{"maximum": number}])
    RolloutLog(tmp_path / "a.turns").write_request(asked)
    assert RolloutLog(tmp_path / "a.turns").read_requests("one") == [asked]  # else its turns would not be found


def test_what_readers_expect_gets_through():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER | {"tool_calls": None}]
    assert wire.decode(in_json(ASK | {"messages": messages})).messages == messages
    info, metrics = {"deep": nested(31)}, {"a/b@2:c+d-e f_g.h": 1.0} | {str(number): 1.0 for number in range(499)}
    turns = [[0.5], [], [1, 2, -3.5], [1e12], [-1e12]]
    done = wire.decode(in_json(DONE | {"info": info, "metrics": metrics, "turn_rewards": turns}))
    assert (done.info, done.metrics, done.turn_rewards) == (info, metrics, turns)
