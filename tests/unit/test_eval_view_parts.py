"""What the viewer is made of: files of results, conversations, filters, tokens, pictures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tiny_tokenizer import write_tokenizer
from trireme.base.errors import ConfigError
from trireme.messages import build_tokens
from trireme.monitor.eval_view.batches import mean_advantage
from trireme.monitor.eval_view.conversation import Block, blocks, last_said, messages_of, searchable
from trireme.monitor.eval_view.filters import parse
from trireme.monitor.eval_view.found import Source, find, neighbours
from trireme.monitor.eval_view.listing import ROLLOUTS, fitting
from trireme.monitor.eval_view.pictures import clean, decimal, histogram, one_line
from trireme.monitor.eval_view.reading import page
from trireme.monitor.eval_view.results import CHUNK, ResultsFile
from trireme.monitor.eval_view.rewards import Rewards
from trireme.monitor.eval_view.rows import PREVIEW, Row, as_json, by_example, in_order, record_of
from trireme.monitor.eval_view.tokens import PART, WINDOW, describe, find_decoder, pieces, style_of, window_of
from trireme.orchestrator.eval_results import Answer, write_answers
from viewing import answer, write_evaluations, write_results
from written_run import write_whole_run


def read_all(path: Path) -> ResultsFile:
    file = ResultsFile(path)
    while file.read_on():
        pass
    return file


# files


def test_what_an_evaluation_writes_is_what_the_list_shows(tmp_path):
    written = Answer(
        example_id=3, reward=0.5, prompt=[{"role": "user", "content": "why?"}], answer="so", rollout=2, version=20,
        completion=[{"role": "assistant", "content": "because"}], metrics={"close": 0.25}, tokens=87, turns=2,
        truncated=True, stop="length",
    )  # fmt: skip
    failed = Answer(example_id="x", reward=None, error="timeout: not finished after 600 s")
    write_answers(tmp_path / "say.jsonl", [written, failed])
    file = read_all(tmp_path / "say.jsonl")
    row = file.rows[0]
    assert (row.example, row.rollout, row.reward, row.tokens, row.turns) == ("3", 2, 0.5, 87, 2)
    assert (row.truncated, row.stop, row.question, row.said) == (True, "length", "why?", "because")
    assert (file.rows[1].example, file.rows[1].reward, file.rows[1].error) == ("x", None, failed.error)
    record = file.record(row)
    assert (record.answer, record.metrics, record.row) == ("so", {"close": 0.25}, row)
    assert record.more == {"version": 20}


def test_files_of_others_need_only_a_reward_and_keep_the_rest(tmp_path):
    lines = [
        {"example_id": 4, "reward": 1, "prompt": "2+2?", "completion": "4", "exact_match": 1.0, "task": "sums"},
        {"example_id": 4, "reward": True, "prompt": "2+2?", "completion": "4", "is_truncated": True},
        {"reward": "high"},
    ]
    file = read_all(write_results(tmp_path / "any.jsonl", lines))
    assert [(row.example, row.rollout, row.reward) for row in file.rows] == [
        ("4", 0, 1.0),
        ("4", 1, 1.0),
        ("2", 0, None),
    ]
    record = file.record(file.rows[0])
    assert record.metrics == {"exact_match": 1.0}
    assert record.more == {"task": "sums"}
    assert [message["role"] for message in record.prompt + record.completion] == ["user", "assistant"]
    assert file.rows[1].truncated


def test_a_large_file_is_read_in_parts_and_no_conversation_stays_in_memory(tmp_path):
    long = "word " * 20_000
    file = ResultsFile(write_results(tmp_path / "long.jsonl", [answer(n, 0.5, long) for n in range(200)]))
    assert os.path.getsize(file.path) > 2 * CHUNK
    parts = 1
    while file.read_on():
        assert 0 < len(file.rows) < 200
        parts += 1
    assert parts > 2
    assert len(file.rows) == 200
    assert max(len(row.said) for row in file.rows) <= PREVIEW
    assert file.record(file.rows[137]).completion[0]["content"] == long


def test_one_line_longer_than_a_part_is_one_rollout(tmp_path):
    file = read_all(write_results(tmp_path / "huge.jsonl", [answer(0, 0.5, "x" * (2 * CHUNK)), answer(1, 1.0)]))
    assert [row.example for row in file.rows] == ["0", "1"]


def test_a_last_line_counts_once_it_is_whole_with_or_without_its_end(tmp_path):
    path = tmp_path / "growing.jsonl"
    line = json.dumps(answer(1, 0.5)).encode()
    path.write_bytes(json.dumps(answer(0, 0.5)).encode() + b"\n")
    file = read_all(path)
    for end in range(1, len(line)):
        path.write_bytes(json.dumps(answer(0, 0.5)).encode() + b"\n" + line[:end])
        file.read_on()
        assert (len(file.rows), file.damaged) == (1, [])
    path.write_bytes(json.dumps(answer(0, 0.5)).encode() + b"\n" + line)
    file.read_on()
    assert len(file.rows) == 2
    with open(path, "ab") as more:
        more.write(b"\n" + line + b"\n")
    file.read_on()
    assert ([row.rollout for row in file.rows], file.damaged) == ([0, 0, 0], [])


def test_a_line_that_is_not_there_any_more_says_so(tmp_path):
    file = read_all(write_results(tmp_path / "a.jsonl", [answer(0, 0.5)]))
    row = file.rows[0]
    file.path.write_bytes(b"")
    assert "is not there any more" in file.record(row).more["gone"]


def test_runs_evaluations_and_files_are_found_by_name_and_nothing_is_looked_for_among_weights(tmp_path):
    write_whole_run(tmp_path / "run", batches=3)
    write_evaluations(tmp_path / "run")
    write_results(tmp_path / "evals" / "say--org--model" / "8f2c" / "results.jsonl", [answer(0, 1.0)])
    write_results(tmp_path / "run" / "weights" / "step_1" / "say.jsonl", [answer(0, 1.0)])
    (tmp_path / "run" / "journal" / "set_aside_1").mkdir()
    (tmp_path / "run" / "journal" / "set_aside_1" / "batch_000009.msgpack").write_bytes(b"")
    homes = find([tmp_path])
    found = {
        home.title.split("/", 1)[-1]: {name: [source.label for source in shelf.sources]
                                       for name, shelf in home.shelves.items()}
        for home in homes
    }  # fmt: skip
    assert found == {
        tmp_path.name: {"say--org--model": ["8f2c"]},
        "run": {"training": ["step 0", "step 1", "step 2"], "say": ["step 0", "step 20"]},
    }
    sources = homes[1].shelves["say"].sources
    assert neighbours(sources[1], homes) == sources
    gone = Source(tmp_path / "x", "results", home=tmp_path / "x", shelf="x")
    assert neighbours(gone, homes) == [gone]


def test_mean_rewards_come_from_metrics_for_training_and_from_files_for_evaluations(tmp_path):
    config = write_whole_run(tmp_path / "run", batches=2)
    write_evaluations(tmp_path / "run", versions=(0,))
    homes, rewards = find([tmp_path]), Rewards()
    assert any(list(rewards.look(homes)))
    shelves = homes[0].shelves
    means = [rewards.known[source.path] for source in shelves["training"].sources]
    from trireme.ledger.journal import Journal

    journal = Journal(config.paths.journal)
    assert means == pytest.approx([np.mean([r.reward for r in journal.read(n).rollouts]) for n in range(2)])
    assert rewards.known[shelves["say"].sources[0].path] == pytest.approx((0.0 + 0.0 + 0.2 + 0.3) / 4)
    assert not any(list(rewards.look(homes)))
    write_evaluations(tmp_path / "run", versions=(0,), examples=2)
    assert any(list(rewards.look(homes)))
    assert rewards.trend(shelves["say"].sources) == [0.0]


# conversations


def test_a_conversation_is_taken_apart_in_the_order_in_which_it_was_said():
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": "<think>hm\n</think>\n\nI call.", "tool_calls": [
            {"id": "1", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}},
            json.dumps({"id": "2", "function": {"name": "run", "arguments": "not json"}}),
        ]},
        {"role": "tool", "tool_call_id": "2", "content": "done"},
        {"role": "assistant", "reasoning_content": "so", "content": None},
        {"role": "assistant", "content": "", "refusal": "no"},
    ]  # fmt: skip
    assert blocks(messages) == [
        Block("text", "system", "", "Look.\n[image_url]"),
        Block("reasoning", "assistant", "", "hm"),
        Block("text", "assistant", "", "I call."),
        Block("call", "assistant", "add", "a: 1\nb: [2]"),
        Block("call", "assistant", "run", "not json"),
        Block("result", "tool", "run", "done"),
        Block("reasoning", "assistant", "", "so"),
        Block("text", "assistant", "", ""),
        Block("other", "assistant", "", '{"refusal": "no"}'),
    ]
    assert last_said(messages[:3]) == "not json"
    assert last_said(messages[:1]) == "Look.\n[image_url]"
    assert "add a: 1" in searchable(messages)


def test_reasoning_that_never_ends_is_reasoning():
    assert blocks([{"role": "assistant", "content": "<think>and on"}])[0] == Block(
        "reasoning", "assistant", "", "and on"
    )
    assert messages_of(["a", {"role": "x"}, 3], "user") == [
        {"role": "user", "content": "a"},
        {"role": "x"},
        {"role": "user", "content": "3"},
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool"]) | JSON,
        "content": JSON,
        "tool_calls": JSON | st.lists(st.fixed_dictionaries({"function": JSON, "id": JSON})),
        "reasoning_content": JSON,
    },
)
LINE = st.dictionaries(
    st.sampled_from(
        ["example_id", "reward", "answer", "info", "metrics", "tokens", "turns", "truncated", "stop", "error"]
    ),
    JSON,
) | st.fixed_dictionaries({"prompt": st.lists(MESSAGE) | JSON, "completion": st.lists(MESSAGE) | JSON, "stop": JSON})


@given(LINE)
def test_whatever_a_line_holds_is_shown(value):
    record = record_of(json.loads(json.dumps(value)), number=0)
    assert all(part.lines(Console(width=30), 30) is not None for part in page(record, longest=100))
    for part in page(record, longest=None):
        for line in part.lines(Console(width=30), 30):
            assert not any(ord(letter) < 32 for letter in line.plain)
    json.loads(as_json(record))
    assert in_order([record.row], "reward", backwards=True) == [record.row]
    assert by_example([record.row])[0].count == 1


# filters


def rows_that_pass(line: str) -> list[int]:
    rows = [
        Row(number=0, example="9", rollout=0, reward=0.1 + 0.2, tokens=10, stop="length", truncated=True, env="a"),
        Row(number=1, example="10", rollout=1, reward=None, error="Timeout: late", env="b"),
        Row(number=2, example="x=1", rollout=0, reward=1.0, turns=3, advantage=-0.5, flaws="repetition", env="b"),
    ]
    chosen = parse(line)
    return [row.number for row in rows if chosen.passes(row) and chosen.says("It's The Capital of reward<1 France")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", [0, 1, 2]),
        ("reward=0.3", [0]),
        ("reward<1", [0]),
        ("reward!=1 reward>=0", [0]),
        ("-reward<1", [1, 2]),
        ("example=10", [1]),
        ("example>9", [1]),
        ("example<=9", [0]),
        ("example=x=1", [2]),
        ("tokens>=10", [0]),
        ("turns>2 advantage<0", [2]),
        ("stop~LENG", [0]),
        ("error~timeout", [1]),
        ("env:b -is:failed", [2]),
        ("is:truncated", [0]),
        ("is:flawed", [2]),
        ("capital france", [0, 1, 2]),
        ('"capital of"', [0, 1, 2]),
        ('"of capital"', []),
        ("-capital", []),
        ("-berlin", [0, 1, 2]),
        ("it's", [0, 1, 2]),
        ('"reward<1', [0]),
        ("https://no", []),
    ],
)
def test_a_filter_means_what_it_says(line, expected):
    assert rows_that_pass(line) == expected


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rewrad<1", "Did you mean reward<1"),
        ("reward<high", "'high' is no number"),
        ("reward~1", "reward is a number"),
        ("env<b", "env is a name"),
        ("is:odd", "is:truncated, is:failed, is:flawed"),
    ],
)
def test_a_filter_that_cannot_be_meant_is_refused_with_what_can(line, said):
    with pytest.raises(ConfigError, match=said):
        parse(line)


@given(st.text())
def test_no_filter_breaks_anything(line):
    try:
        chosen = parse(line)
    except ConfigError:
        return
    chosen.passes(Row(number=0, example="1", rollout=0, reward=0.5))
    chosen.says(line)


# order


def test_what_has_no_value_is_last_either_way_round_and_numbers_are_not_words():
    rows = [
        Row(number=n, example=e, rollout=0, reward=r) for n, (e, r) in enumerate([("10", None), ("9", 0.2), ("b", 0.1)])
    ]
    assert [row.example for row in in_order(rows, "example", backwards=False)] == ["9", "10", "b"]
    assert [row.reward for row in in_order(rows, "reward", backwards=False)] == [0.1, 0.2, None]
    assert [row.reward for row in in_order(rows, "reward", backwards=True)] == [0.2, 0.1, None]


def test_columns_give_way_before_the_last_words_do():
    assert fitting(ROLLOUTS, 120) == ROLLOUTS
    narrow = [column.name for column in fitting(ROLLOUTS, 50)]
    assert narrow == ["example", "rollout", "reward", "stop", "said"]
    assert [column.name for column in fitting(ROLLOUTS, 20)] == ["example", "reward", "said"]


# tokens


def sample_of(ids, **columns):
    zeros = {name: [0] * len(ids) for name in ("loss_mask", "logprobs", "advantages", "versions")}
    return build_tokens(ids=ids, **zeros | columns)


def test_the_texts_of_tokens_make_up_the_text(tmp_path):
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path / "weights" / "step_3")
    tokenizer = Tokenizer.from_file(str(tmp_path / "weights" / "step_3" / "tokenizer.json"))
    decode = find_decoder(tmp_path)
    ids = tokenizer.encode("say 12", add_special_tokens=False).ids
    assert "".join(pieces(ids, decode)) == tokenizer.decode(ids, skip_special_tokens=False) == "say 12"


def test_several_tokens_of_one_character_show_it_at_the_last():
    letters = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b"z", 5: b"\xff"}
    decode = lambda ids: b"".join(letters[number] for number in ids).decode(errors="replace")  # noqa: E731
    assert pieces([1, 2, 3, 4], decode) == ["a", PART, "é", "z"]
    assert len(pieces([5, 5, 5, 5, 5, 5, 1], decode)) == 7


def test_without_a_tokenizer_tokens_are_numbers(tmp_path):
    assert find_decoder(tmp_path) is None
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.json").write_text('{"model": {"name": "../no model/at all"}}')
    assert find_decoder(tmp_path) is None
    folder = tmp_path / "weights" / "step_1"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{torn")
    assert find_decoder(tmp_path) is None
    assert pieces([17, 4], None) == ["17 ", "4 "]


def test_a_token_says_all_that_the_journal_knows_of_it():
    sample = sample_of([5, 9], loss_mask=[0, 1], logprobs=[0, np.log(0.25)], advantages=[0, 0.5], versions=[-1, 3])
    assert describe(sample, 0, "a", step=5) == "token 1/2 · 5 'a' · given"
    assert describe(sample, 1, "b\n", step=5) == (
        "token 2/2 · 9 'b\\n' · logprob -1.386, p 0.250 · adv +0.500 · v3, lag 2"
    )


def test_colours_follow_sign_and_size_and_leave_what_was_given_alone():
    sample = sample_of(
        [1] * 5, loss_mask=[0, 1, 1, 1, 1], logprobs=[0, 0, -5, -9, -2.5], advantages=[0, 1, -1, 0, 0.5],
        versions=[-1, 3, 4, 3, 3],
    )  # fmt: skip
    logprob, advantage, version = (
        [style_of(sample, place, colour, scale=1.0).bgcolor for place in range(5)]
        for colour in ("logprob", "advantage", "version")
    )
    assert logprob[0] is None
    assert logprob[1] is None
    assert logprob[2] == logprob[3] != logprob[4]
    assert len({str(colour) for colour in advantage}) == 4  # none twice: what was given, and an advantage of 0
    assert version[1] == version[3] != version[2]
    assert style_of(sample, 0, "version", scale=1.0).dim


def test_windows_follow_each_other_without_gap_or_overlap():
    assert window_of(0, 10) == range(10)
    assert window_of(WINDOW - 1, 2 * WINDOW + 5) == range(WINDOW)
    assert window_of(WINDOW, 2 * WINDOW + 5) == range(WINDOW, 2 * WINDOW)
    assert window_of(2 * WINDOW + 4, 2 * WINDOW + 5) == range(2 * WINDOW, 2 * WINDOW + 5)


def test_the_advantage_of_a_rollout_is_the_mean_over_what_is_trained_on():
    from trireme.ledger.records import Rollout

    sample = sample_of([1, 2, 3], loss_mask=[0, 1, 1], advantages=[9, 1, 2])
    rollout = Rollout(group=0, place=0, attempt=0, env="a", example=0, reward=0, samples=[sample], temperature=1.0)
    assert mean_advantage(rollout) == 1.5
    assert mean_advantage(msgspec.structs.replace(rollout, samples=[])) is None


# pictures


def test_numbers_and_histograms_are_short():
    assert [decimal(value) for value in (None, float("nan"), 0.5, -1, 123456.0)] == [
        "-",
        "-",
        "0.500",
        "-1.000",
        "1.23e+05",
    ]
    assert histogram([0, 0, 0, 0.5, 1], width=3) == "█▃▃"
    assert histogram([2.0] * 4, width=3) == "█  "
    assert histogram([]) == ""


@given(st.text())
def test_a_cleaned_text_has_no_commands_and_loses_no_lines(text):
    shown = clean(text)
    assert not any(ord(letter) < 32 and letter != "\n" for letter in shown)
    assert shown.count("\n") == text.count("\n")
    assert "\n" not in one_line(text, 20)
    assert len(one_line(text, 20)) <= 40
